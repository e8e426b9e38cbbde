"""One rank's device: its model, its KV cache, and `launch(batch) -> StepHandle`.

Knows tensors and steps; which sequences are in a step, and where blocks come from, is decided
before.
"""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import BatchInput, ForwardBatch
from nanovllm.engine.cuda_graphs import CudaGraphs
from nanovllm.engine.first_compile import compiling
from nanovllm.engine.memory import (
    DeviceBudget,
    explain_out_of_memory,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from nanovllm.engine.staging import Staging
from nanovllm.engine.step_handle import CudaStep, DoneStep, StepHandle
from nanovllm.errors import ConfigError
from nanovllm.layers.attention import select_backend
from nanovllm.layers.linear import kv_heads_per_rank
from nanovllm.layers.ops import select_ops
from nanovllm.models.config import DecoderConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.fast_decode import FastDecode
from nanovllm.utils.device import on_own_device, resolve_device, resolve_dtype
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import fill_dummy, load_weights

if TYPE_CHECKING:
    from nanovllm.kernels.peer_exchange import PeerExchange

logger = logging.getLogger("nanovllm")


class ModelRunner:
    """Loads one rank's share of a model and runs steps on it.

    Use: `load()`, `allocate_kv_cache(num_blocks)` with a number that all ranks share, `prepare()`,
    then `launch` per step. `close()` gives the memory back.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: DecoderConfig,
        folder: Path,
        max_model_len: int,
        tp: TPGroup,
    ) -> None:
        """Create the rank; no device memory is taken yet.

        Args:
            folder: of the checkpoint.
            max_model_len: the configured length, bounded by the checkpoint.

        Raises:
            ConfigError: device, dtype or attention backend cannot be had.
        """
        self.config, self.model_config, self.tp = config, model_config, tp
        self.folder = folder
        self.max_model_len = max_model_len
        self.device = resolve_device(config.device, tp.rank, tp.size)
        self.dtype = resolve_dtype(config.dtype, self.device, model_config.dtype)
        self.attention = select_backend(
            config.attention_backend,
            self.device,
            self.dtype,
            model_config.head_dim,
            config.kvcache_block_size,
        )
        self.ops = select_ops(self.device, config.fused_kernels)
        # the torch twins and the reference backend read values back to the host
        self.uses_graphs = (
            self.device.type == "cuda"
            and not config.enforce_eager
            and self.ops.name == "triton"
            and self.attention.name != "reference"
        )
        self.load_s = 0.0
        self.graphs: CudaGraphs | None = None
        self.fast_decode: FastDecode | None = None
        self._exchange: PeerExchange | None = None
        self._budget = DeviceBudget(self.device)

    @on_own_device
    def load(self) -> None:
        """Build the model on the device and fill it from the checkpoint, or at random if asked to.

        Raises:
            CheckpointError: weights are missing, incomplete or of the wrong shape.
            ConfigError: they do not fit into the device's memory.
        """
        began = time.perf_counter()
        remedy = "Use more GPUs (tensor_parallel_size) or a smaller model"
        with explain_out_of_memory(self.device, "loading the weights", remedy):
            self.build_model()  # first, since what is compiled with is allocated too
            with compiling(self):
                if self.config.load_format == "dummy":
                    fill_dummy(self.model, self.config.seed or 0)
                else:
                    load_weights(self.model, self.folder)
        self.load_s = time.perf_counter() - began

    def build_model(self) -> None:
        """Allocate the model; what its weights hold is left open."""
        self.model = CausalLM(
            self.model_config, self.tp, self.ops, self.attention, self.device, self.dtype
        )

    @on_own_device
    @torch.inference_mode()
    def num_blocks_that_fit(self) -> int:
        """KV blocks that this rank's memory allows, measured with the largest steps there can be.

        Raises:
            ConfigError: not one sequence fits; the message has the numbers and remedies.
        """
        if self.device.type == "cpu":
            return num_blocks_on_cpu(self.config, self.max_model_len, self.block_bytes())
        remedy = "Lower max_num_batched_tokens or max_num_seqs, or use more GPUs"
        with explain_out_of_memory(self.device, "running the largest steps", remedy):
            return num_blocks_on_gpu(self, self._budget)

    def block_bytes(self) -> int:
        """Bytes of one KV block on this rank, over all layers."""
        return 2 * self.dtype.itemsize * int(np.prod(self._kv_shape(1)[1:]))

    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads here; an untied embedding is only gathered."""
        num_bytes = sum(p.numel() * p.itemsize for p in self.model.parameters())
        if not self.model_config.tie_word_embeddings:
            embedding = self.model.model.embed_tokens.weight
            num_bytes -= embedding.numel() * embedding.itemsize
        return num_bytes

    @on_own_device
    @torch.inference_mode()
    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged cache and the token store.

        Raises:
            ConfigError: the memory for `num_blocks` cannot be had.
        """
        try:
            # zeros: flash-attn multiplies what lies behind a sequence's end by zero, NaN included
            self.kv_cache = torch.zeros(
                self._kv_shape(num_blocks), dtype=self.dtype, device=self.device
            )
        except (RuntimeError, TypeError) as error:  # TypeError: beyond 64 bits
            size = num_blocks * self.block_bytes() / 2**30
            raise ConfigError(
                f"num_kvcache_blocks={num_blocks} needs {size:.1f} GiB, which {self.device} cannot "
                f"give; lower it or kvcache_block_size ({error})"
            ) from error
        # row max_num_seqs is where padded rows write to
        self.token_store = torch.zeros(
            self.config.max_num_seqs + 1, dtype=torch.int32, device=self.device
        )

    def release_kv_cache(self) -> None:
        """Drop the cache and what was built over it."""
        self.graphs = self.fast_decode = None
        for name in ("_staging", "token_store", "kv_cache"):
            self.__dict__.pop(name, None)

    @on_own_device
    @torch.inference_mode()
    def prepare(self) -> None:
        """Make ready to launch, with the cache at its final size: buffers and decode graphs.

        Raises:
            ConfigError: the cache leaves too little memory for that.
        """
        remedy = "Lower gpu_memory_utilization, num_kvcache_blocks or max_num_seqs"
        with explain_out_of_memory(self.device, "preparing decode steps", remedy):
            self.build_fast_decode()
            if self.device.type == "cuda":
                self._staging = Staging(self.config, self.max_model_len, self.device)
                if self.uses_graphs:
                    self.graphs = CudaGraphs(self, self._staging.device_buffer)

    def build_fast_decode(self) -> None:
        """Set up the fused decode step over the present cache, if it is wanted and can run."""
        if not (self.uses_graphs and self.config.fast_decode):
            return
        reason = FastDecode.unsupported_reason(
            self.model_config,
            self.dtype,
            self.device,
            self.config.kvcache_block_size,
            self.tp.size,
        )
        if reason is not None:
            logger.info("decoding with plain layers: %s", reason)
            return
        if self.tp.size > 1 and self._exchange is None:
            from nanovllm.kernels.peer_exchange import PeerExchange

            hidden_size = self.model_config.hidden_size
            self._exchange = PeerExchange.create(
                self.tp, self.device, self.config.max_num_seqs, hidden_size
            )
        self.fast_decode = FastDecode(
            self.model,
            self.kv_cache,
            self.config.max_num_seqs,
            self.max_model_len,
            self._exchange,
        )

    @on_own_device
    @torch.inference_mode()
    def launch(self, batch: BatchInput) -> StepHandle:
        """Start one step and return without waiting for the device."""
        if self.device.type == "cpu":
            forward = ForwardBatch.from_buffer(batch.header, torch.from_numpy(batch.buffer))
            return DoneStep(self.run(forward).tolist())
        buffer = self._staging.upload(batch.buffer)
        if batch.header.is_graph and self.graphs is not None:
            token_ids = self.graphs.replay(batch.header.num_seqs)
        else:
            token_ids = self.run(ForwardBatch.from_buffer(batch.header, buffer))
        pinned, event = self._staging.download(token_ids, batch.header.num_samples)
        return CudaStep(pinned, batch.header.num_samples, event)

    def run(self, batch: ForwardBatch) -> Tensor:  # int32 [num_samples]
        """Copy blocks, compute the step's tokens, sample, and store the samples by row."""
        if len(batch.copies):
            source, target = batch.copies.long().unbind(1)
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]
        meta = batch.meta
        self.load_decode_ids(batch)
        last_tokens = None  # of the sampled sequences; None = one token each, all sampled
        if batch.num_samples < len(batch.input_ids):
            last_tokens = meta.cu_seqlens_q[1 : batch.num_samples + 1] - 1
        hidden = self.model(batch.input_ids, batch.positions, self.kv_cache, meta, last_tokens)
        if batch.num_samples == 0:
            return batch.rows[:0]
        return self.sample(self.model.compute_logits(hidden), batch)

    def decode(self, batch: ForwardBatch) -> Tensor:  # int32 [B]
        """A decode-only step of static size, as a CUDA graph captures it."""
        self.load_decode_ids(batch)
        meta = batch.meta
        if self.fast_decode is not None:
            logits = self.fast_decode.forward(
                batch.input_ids, meta.seqlens_k, meta.block_tables, meta.slot_mapping
            )
        else:
            hidden = self.model(batch.input_ids, batch.positions, self.kv_cache, meta)
            logits = self.model.compute_logits(hidden)
        return self.sample(logits, batch)

    def load_decode_ids(self, batch: ForwardBatch) -> None:
        """Fetch the decode rows' input ids from the token store, where the step before put them."""
        num_decode = batch.meta.num_decode_seqs
        if num_decode:
            rows = batch.rows[:num_decode]
            torch.index_select(self.token_store, 0, rows, out=batch.input_ids[:num_decode])

    def sample(
        self,
        logits: Tensor,  # [num_samples, V]
        batch: ForwardBatch,
    ) -> Tensor:  # int32 [num_samples]
        """Sample one token per row and store it by row; every rank gets the same ones."""
        n, head = len(logits), self.model.lm_head
        scores, token_ids = self.ops.sample(
            logits,
            batch.temperatures[:n],
            batch.seeds[:n],
            batch.meta.seqlens_k[:n],
            head.vocab_start,
            head.num_valid,
        )
        if self._exchange is not None:
            self._exchange.best_of_ranks(scores, token_ids)
        elif self.tp.size > 1:
            token_ids = self._best_of_ranks(scores, token_ids)
        self.token_store[batch.rows[:n].long()] = token_ids
        return token_ids

    def _best_of_ranks(
        self,
        scores: Tensor,  # float32 [num_samples]
        token_ids: Tensor,  # int32 [num_samples]
    ) -> Tensor:  # int32 [num_samples]
        """The best of all ranks' vocabulary shards; ties go to the lowest id."""
        pairs = self.tp.all_gather(torch.stack([scores.view(torch.int32), token_ids]))
        scores, ids = pairs[:, 0].view(torch.float32), pairs[:, 1]  # each [tp_size, num_samples]
        is_best = ~(scores < scores.amax(0))  # true for NaN too: some id is always found
        return torch.where(is_best, ids, torch.iinfo(torch.int32).max).amin(0)

    @on_own_device
    def close(self) -> None:
        """Drop graphs first, then cache and weights; idempotent. The object is of no use after."""
        self.release_kv_cache()
        self.__dict__.pop("model", None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (
            2,
            self.model_config.num_layers,
            num_blocks,
            self.config.kvcache_block_size,
            kv_heads_per_rank(self.model_config.num_kv_heads, self.tp.size),
            self.model_config.head_dim,
        )
