"""The loop: schedule, launch, absorb.

Owns one model with its scheduler and ranks. Checking prompts and turning tokens into text is done
above, in `llm.py`.
"""

import logging
import random
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import BatchBuilder
from nanovllm.engine.cuda_graphs import graph_size_finder
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.tp_workers import TPWorkers
from nanovllm.models.config import load_decoder_config
from nanovllm.requests import Request, RequestLimits
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.hub import find_eos_token_ids, load_tokenizer, resolve_model
from nanovllm.utils.integers import divide_up

logger = logging.getLogger("nanovllm")


@dataclass(slots=True)
class RunStats:
    """Tokens and the time they really took, from one absorbed step to the next."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_steps: int = 0
    num_decode_steps: int = 0  # steps with at least one decode row
    prefill_s: float = 0.0
    decode_s: float = 0.0
    _last_s: float = field(default_factory=time.perf_counter, repr=False)

    def add(self, batch: ScheduledBatch) -> None:
        """Count a step that has just been absorbed; a mixed step's time is shared by its tokens."""
        now = time.perf_counter()
        num_decode = batch.num_decode_seqs
        num_prefill = batch.num_tokens - num_decode
        share = num_prefill / (num_prefill + num_decode)
        self.prefill_s += (now - self._last_s) * share
        self.decode_s += (now - self._last_s) * (1 - share)
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_decode
        self.num_steps += 1
        self.num_decode_steps += num_decode > 0
        self._last_s = now


class LLMEngine:
    """A loaded model that takes requests and steps until all are finished."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and take the KV cache.

        Raises:
            ConfigError: options and hardware do not go together.
            CheckpointError: the checkpoint is missing, incomplete or unsupported.
        """
        folder = resolve_model(config.model)
        model_config = load_decoder_config(folder)
        self.config = config
        self.model_config = model_config
        self.max_model_len = min(config.max_model_len, model_config.max_position_embeddings)
        self.workers: ModelRunner | TPWorkers
        if config.tensor_parallel_size == 1:
            self.workers = ModelRunner(config, model_config, folder, self.max_model_len, TPGroup())
        else:
            self.workers = TPWorkers(config, model_config, folder, self.max_model_len)
        try:
            # beside the weights: importing transformers can take as long as loading them
            with ThreadPoolExecutor(1) as thread:
                tokenizer = thread.submit(load_tokenizer, folder)
                num_blocks = self._start_workers()
                self.tokenizer = tokenizer.result()
            self.eos_token_ids = find_eos_token_ids(
                folder, model_config.eos_token_ids, self.tokenizer
            )
            self._report(num_blocks)
        except BaseException:
            self.workers.close()
            raise
        self.limits = RequestLimits(
            model_config.vocab_size,
            self.max_model_len,
            config.kvcache_block_size,
            num_blocks,
            self.max_model_len == model_config.max_position_embeddings,
        )
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=config.kvcache_block_size,
            eos_token_ids=self.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
        )
        find_graph_size = None
        if self.workers.uses_graphs:
            find_graph_size = graph_size_finder(config.max_num_seqs)
        self._builder = BatchBuilder(
            config.max_num_seqs, self.max_model_len, config.kvcache_block_size, find_graph_size
        )
        self._seeds = random.Random(config.seed)  # None: from the operating system
        self._num_added = 0
        self._in_flight: tuple[ScheduledBatch, StepHandle] | None = None
        self.stats = RunStats()

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a step has not been absorbed."""
        return self.scheduler.has_unfinished or self._in_flight is not None

    def add_request(self, request: Request) -> Sequence:
        """Queue a checked request; returns the sequence that will hold its tokens."""
        seed = request.params.seed
        if seed is None:
            seed = self._seeds.getrandbits(64)
        seq = Sequence(self._num_added, request.token_ids, request.params, self.max_model_len, seed)
        self._num_added += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Sequence]:
        """Launch the next step, then absorb the one before it: the GPU never waits for Python.

        Returns:
            The sequences that ended.
        """
        scheduled = self.scheduler.schedule()
        launched = self._launch(scheduled) if scheduled else None
        finished = self._absorb(self._in_flight) if self._in_flight else []
        self._in_flight = launched
        if launched and not self.config.async_scheduling:
            self._in_flight = None
            finished += self._absorb(launched)
        return finished

    def abort_all(self) -> None:
        """Drop every request, in-flight ones too; the engine is ready for the next call."""
        self._in_flight = None
        self.scheduler.abort_all()

    def begin_call(self) -> None:
        """Count tokens and time anew, and drop what a call left that was interrupted twice."""
        if self.has_work or self.scheduler.num_in_flight_steps:
            self.abort_all()
        self.stats = RunStats()

    def close(self) -> None:
        """Drop all requests and give the memory back; idempotent."""
        self.abort_all()
        self.workers.close()

    def _start_workers(self) -> int:
        """Load the model on every rank and make it ready; returns the number of KV blocks."""
        self.workers.load()
        num_blocks = self.config.num_kvcache_blocks or self.workers.num_blocks_that_fit()
        self.workers.allocate_kv_cache(num_blocks)
        self.workers.prepare()
        return num_blocks

    def _launch(self, scheduled: ScheduledBatch) -> tuple[ScheduledBatch, StepHandle]:
        return scheduled, self.workers.launch(self._builder.build(scheduled))

    def _absorb(self, in_flight: tuple[ScheduledBatch, StepHandle]) -> list[Sequence]:
        batch, handle = in_flight
        finished = self.scheduler.absorb(batch, handle.wait())
        self.stats.add(batch)
        return finished

    def _report(self, num_blocks: int) -> None:
        """Log the size of the cache; warn if not even one sequence of full length fits."""
        block_size, runner = self.config.kvcache_block_size, self.workers
        num_tokens = num_blocks * block_size
        logger.info(
            "%s on %s, %s attention: loaded in %.1f s; %d KV blocks of %d tokens (%.2f GiB), "
            "enough for %.1f sequences of %d tokens",
            self.model_config.architecture,
            runner.device,
            runner.attention.name,
            runner.load_s,
            num_blocks,
            block_size,
            num_blocks * runner.block_bytes() / 2**30,
            num_tokens / self.max_model_len,
            self.max_model_len,
        )
        if divide_up(self.max_model_len - 1, block_size) > num_blocks:
            warnings.warn(
                f"the KV cache holds {num_tokens} tokens ({num_blocks} blocks of {block_size}), "
                f"less than max_model_len={self.max_model_len}; longer requests will be refused",
                stacklevel=4,
            )
