"""One token stream: its tokens, its counters, its block table.

Torch-free. Who runs when is the scheduler's business; which blocks exist is the block manager's.
"""

from dataclasses import InitVar, dataclass, field

from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One request in the engine.

    A token that a launched step is sampling counts in `num_tokens` before its value is known; that
    is what lets the next step be scheduled while this one runs.
    """

    seq_id: int
    token_ids: list[int]  # every token whose value is known; at first a copy of the prompt
    params: SamplingParams
    max_model_len: InitVar[int]
    seed: int = 0  # 64-bit key of this request's sampling noise
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)  # of prompt and output; it ends with "length" there
    num_in_flight_tokens: int = 0  # 1 while a launched step samples for this sequence
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, launched steps included
    prefill_end: int = 0  # tokens [0, prefill_end) are computed as prefill
    num_cached_tokens: int = 0  # prefix-cache hits at first admission (a statistic)
    num_shared_blocks: int = 0  # leading blocks that were cache hits at the last admission
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)  # blocks of tokens [0, num_tokens)
    table_version: int = 0  # changes with every change of block_table
    block_keys: list[int] = field(default_factory=list)  # chained hash of each full block, as asked
    row: int | None = None  # row of the token store while running
    finish_reason: str | None = None  # "stop" | "length" | "abort"

    def __post_init__(self, max_model_len: int) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = min(len(self.token_ids) + self.params.max_tokens, max_model_len)

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
