"""One token stream: its tokens, its counters, its block table.

Torch-free. Who runs when is the scheduler's business; which blocks exist is the block manager's.
"""

from nanovllm.sampling_params import SamplingParams


class Sequence:
    """One request in the engine.

    A token that a launched step is sampling counts in `num_tokens` before its value is known; that
    is what lets the next step be scheduled while this one runs.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "finish_reason",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_shared_blocks",
        "params",
        "prefill_end",
        "row",
        "seed",
        "seq_id",
        "table_version",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.seed = seed  # 64-bit key of this request's sampling noise
        self.token_ids = list(prompt_token_ids)  # every token whose value is known
        self.num_prompt_tokens = len(prompt_token_ids)
        # prompt and output together; reaching it ends the sequence with "length"
        self.max_num_tokens = min(len(prompt_token_ids) + params.max_tokens, max_model_len)
        self.num_in_flight_tokens = 0  # 1 while a launched step samples for this sequence
        self.num_computed_tokens = 0  # tokens whose KV is in the cache, launched steps included
        self.prefill_end = 0  # tokens [0, prefill_end) are computed as prefill
        self.num_cached_tokens = 0  # prefix-cache hits at first admission (a statistic)
        self.num_shared_blocks = 0  # leading blocks that were cache hits at the last admission
        self.num_preemptions = 0
        self.block_table: list[int] = []  # ids of the blocks that hold tokens [0, num_tokens)
        self.table_version = 0  # changes with every change of block_table
        self.block_keys: list[int] = []  # chained hash of each full block of known tokens, as asked
        self.row: int | None = None  # row of the token store while running
        self.finish_reason: str | None = None  # "stop" | "length" | "abort"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, the one in flight included."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, the one in flight included."""
        return len(self.token_ids) + self.num_in_flight_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The known output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens remain to be computed before the next one can be sampled."""
        return self.num_computed_tokens < self.prefill_end
