"""Attention over the paged KV cache: one signature, several backends, chosen by `select_backend`.

`reference.py` (torch) defines what is right; `triton.py` and `flash.py` are imported only when
chosen.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.utils.context import AttentionMetadata, LayerKV


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


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    """Build the backend `name`; "auto" takes the first of flash, triton and reference that can run.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here; says why and what to do.
    """
    if name == "auto":
        for candidate in ("flash", "triton") if device.type == "cuda" else ():
            if _REFUSALS[candidate](device, dtype, head_dim, block_size) is None:
                return _build(candidate)
        return _build("reference")
    if name not in _REFUSALS:
        known = ", ".join(repr(known) for known in ("auto", *_REFUSALS))
        raise ConfigError(f"attention_backend={name!r} is unknown; choose one of {known}")
    refusal = _REFUSALS[name](device, dtype, head_dim, block_size)
    if refusal is not None:
        raise ConfigError(
            f"attention_backend={name!r} cannot run: {refusal}, or choose 'auto' or 'reference'"
        )
    return _build(name)


def _build(name: str) -> AttentionBackend:
    if name == "flash":
        from nanovllm.layers.attention.flash import FlashAttention

        return FlashAttention()
    if name == "triton":
        from nanovllm.layers.attention.triton import TritonAttention

        return TritonAttention()
    from nanovllm.layers.attention.reference import ReferenceAttention

    return ReferenceAttention()


def _refuse_flash(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the device is {str(device)!r}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash_attn is not installed; pip install 'nanovllm[flash-attn]'"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16 only; set dtype (now {dtype}) to one of them"
    if head_dim > 256 or head_dim % 8:
        return (
            f"it needs a head_dim that is a multiple of 8 up to 256, and the model's is {head_dim}"
        )
    if block_size % 256:
        return f"it needs kvcache_block_size to be a multiple of 256 (now {block_size})"
    return None


def _refuse_triton(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton (Linux only)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"it needs a GPU, and the device is {str(device)!r}; set TRITON_INTERPRET=1 in the "
            "environment to interpret its kernels (slow, for tests)"
        )
    if head_dim not in (32, 64, 128):
        return f"it supports head_dim 32, 64 and 128, and the model's is {head_dim}"
    if block_size < 16 or block_size & (block_size - 1):
        return f"it needs kvcache_block_size to be a power of two from 16 (now {block_size})"
    return None


def _never_refuse(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    return None


_REFUSALS: dict[str, Callable[[torch.device, torch.dtype, int, int], str | None]] = {
    "reference": _never_refuse,
    "triton": _refuse_triton,
    "flash": _refuse_flash,
}
