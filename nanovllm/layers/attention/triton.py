"""The Triton attention backend: our own paged prefill and split-KV decode kernels.

Needs nothing but triton and takes float32 in full precision. The kernels are in
`nanovllm/kernels/paged_attention.py` and `prefill_attention.py`; this only hands them the step.
"""

import importlib.util

import torch
from torch import Tensor

from nanovllm.utils.context import AttentionMetadata, LayerKV
from nanovllm.utils.device import is_triton_interpreted

_MIN_COUNTERS = 1 << 17  # a decode step needs batch size times kv heads; beyond this, they grow


class TritonAttention:
    """Attention through Triton kernels; one instance serves all layers, on one stream."""

    name = "triton"

    def __init__(self) -> None:
        from nanovllm.kernels.paged_attention import plain_decode_attention
        from nanovllm.kernels.prefill_attention import prefill_attention

        self._decode_attention = plain_decode_attention
        self._prefill_attention = prefill_attention
        # int32 counters, zero between steps; the last ones serve, captured graphs need the others
        self._arrivals: list[Tensor] = []

    @staticmethod
    def unavailable_reason(
        device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Say why this backend cannot run here, or None if it can."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; install it or use attention_backend='reference'"
        if device.type != "cuda" and not is_triton_interpreted():
            return (
                f"the Triton kernels need an NVIDIA GPU, the device is {device.type!r}; "
                "use attention_backend='reference' (TRITON_INTERPRET=1 runs them on CPU, for tests)"
            )
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype {dtype} is not supported; use bfloat16, float16 or float32"
        if head_dim not in (32, 64, 128):
            return (
                f"head_dim {head_dim} is not one of 32, 64, 128; use attention_backend='reference'"
            )
        if block_size < 16 or block_size & (block_size - 1):
            return f"block_size {block_size} is not a power of two from 16; set it to 16 or 256"
        return None

    def attend(
        self,
        q: Tensor,  # [N, Hq, D]
        k: Tensor,  # [N, Hkv, D]; unused, the cache holds them already
        v: Tensor,  # [N, Hkv, D]; unused
        layer_kv: LayerKV,
        meta: AttentionMetadata,
    ) -> Tensor:  # [N, Hq, D]
        """Causal attention of the step's tokens to the cache."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decode = meta.num_decode_seqs
        if num_decode:
            self.decode(q[:num_decode], layer_kv, meta, out[:num_decode])
        if num_decode < meta.seqlens_k.shape[0]:
            self._prefill_attention(
                q,
                layer_kv,
                meta.block_tables[num_decode:],
                meta.cu_seqlens_q[num_decode:],
                meta.seqlens_k[num_decode:],
                meta.max_seqlen_q,
                out,
            )
        return out

    def decode(
        self,
        q: Tensor,  # [num_decode_seqs, Hq, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
        out: Tensor,  # [num_decode_seqs, Hq, D] contiguous, written
    ) -> None:
        """Attention of the step's decode rows; rows with seqlens_k 0 become zero."""
        num_decode = meta.num_decode_seqs
        num_counters = num_decode * layer_kv.k.shape[2]
        if not self._arrivals or self._arrivals[-1].numel() < num_counters:
            # Made in a capture, the counters would be zero only after the graph's first replay.
            assert q.device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), (
                "run a decode step of this batch size before capturing a graph of it"
            )
            size = max(num_counters, _MIN_COUNTERS)
            self._arrivals.append(torch.zeros(size, dtype=torch.int32, device=q.device))
        self._decode_attention(
            q,
            layer_kv,
            meta.block_tables[:num_decode],
            meta.seqlens_k[:num_decode],
            self._arrivals[-1],
            out,
        )
