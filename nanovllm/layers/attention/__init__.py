"""Attention over the paged KV cache: one signature, several backends, chosen by `select_backend`.

`reference.py` (torch) defines what is right; `triton.py` and `flash.py` are imported only when
chosen.
"""

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.utils.context import AttentionMetadata, LayerKV

BACKEND_NAMES = ("auto", "reference", "triton", "flash")


class AttentionBackend(Protocol):
    """Causal attention of this step's tokens over their sequences, softmax scale D ** -0.5."""

    name: str

    def attend(
        self,
        q: Tensor,  # [N, Hq, D]
        k: Tensor,  # [N, Hkv, D]
        v: Tensor,  # [N, Hkv, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
    ) -> Tensor:  # [N, Hq, D]
        """Attend each token to its sequence's tokens up to itself.

        The step's own keys and values are in the cache already, except padding; `k` and `v` are
        handed over so that a prefill without prefix may read them contiguously. All three may be
        strided views with a contiguous last dimension. Rows of padding (seqlens_k 0) come back as
        zeros or anything finite.
        """
        ...

    @staticmethod
    def unavailable_reason(
        device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Say why this backend cannot run here and what to do instead, or None if it can."""
        ...


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    """Build the backend `name`; "auto" takes what was measured to be fastest of those that can run.

    That is flash-attn for prefill and our Triton kernel for decode, else Triton for both, else
    the reference (docs/performance.md).

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here; says why and what to do.
    """
    if name == "auto":
        return _fastest_backend(device, dtype, head_dim, block_size)
    if name not in BACKEND_NAMES:
        known = ", ".join(BACKEND_NAMES)
        raise ConfigError(f"attention_backend={name!r} is unknown; choose one of: {known}")
    backend = _backend_class(name)
    reason = backend.unavailable_reason(device, dtype, head_dim, block_size)
    if reason is not None:
        raise ConfigError(f"attention_backend={name!r} cannot run: {reason}")
    return backend()


def _fastest_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    from nanovllm.layers.attention.flash import FlashAttention
    from nanovllm.layers.attention.triton import TritonAttention

    triton: TritonAttention | None = None
    if device.type == "cuda":
        if TritonAttention.unavailable_reason(device, dtype, head_dim, block_size) is None:
            triton = TritonAttention()
        if FlashAttention.unavailable_reason(device, dtype, head_dim, block_size) is None:
            return FlashAttention(decode_backend=triton)
    return triton or _backend_class("reference")()


def _backend_class(name: str) -> type[AttentionBackend]:
    if name == "flash":
        from nanovllm.layers.attention.flash import FlashAttention

        return FlashAttention
    if name == "triton":
        from nanovllm.layers.attention.triton import TritonAttention

        return TritonAttention
    from nanovllm.layers.attention.reference import ReferenceAttention

    return ReferenceAttention
