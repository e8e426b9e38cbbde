"""The flash-attn backend: FlashAttention-3 where `flash_attn_3` is installed, else 2.

Prefill is one varlen call, on contiguous k and v where no sequence has a prefix in the cache, else
through the block table; decode is one kvcache call. FlashAttention-3 multiplies the rows of a large
block behind a sequence's end by zero, so a cache must start out without NaN.
"""

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention.triton import TritonAttention
from nanovllm.utils.context import AttentionMetadata, LayerKV

logger = logging.getLogger("nanovllm")

_FLASH2_BLOCK_MULTIPLE = 256


def _has_flash3(device: torch.device) -> bool:
    """FlashAttention-3 is built for Hopper only."""
    return torch.cuda.get_device_capability(device)[0] == 9 and _can_load_flash3()


@functools.cache
def _can_load_flash3() -> bool:
    if importlib.util.find_spec("flash_attn_3") is None:
        return False
    try:
        importlib.import_module("flash_attn_3._C")
    except ImportError as error:  # as a rule built for another torch
        logger.warning("FlashAttention-3 is installed and cannot be loaded: %s", error)
        return False
    return True


class FlashAttention:
    """Attention through the flash-attn packages; one instance serves all layers."""

    name = "flash"

    def __init__(
        self, version: int | None = None, decode_backend: TritonAttention | None = None
    ) -> None:
        """Load the flash-attn package.

        Args:
            version: 2 or 3; by default the newest that runs here.
            decode_backend: takes the decode rows; on an H200 our decode kernel is the faster one at
                every batch size, flash-attn the faster one for prefill.
        """
        self._decode_backend = decode_backend
        self.version = version or (3 if _has_flash3(torch.device("cuda")) else 2)
        if self.version == 3:
            # The operator itself: the package's functions around it import torch's compiler at
            # their first call, which takes seconds, and serve autograd at every call.
            importlib.import_module("flash_attn_3._C")
            self._flash3 = torch.ops.flash_attn_3.fwd
        else:
            module = importlib.import_module("flash_attn")
            self._varlen = module.flash_attn_varlen_func
            self._kvcache = module.flash_attn_with_kvcache

    @staticmethod
    def unavailable_reason(
        device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Say why this backend cannot run here, or None if it can."""
        if device.type != "cuda":
            return (
                f"flash-attn needs an NVIDIA GPU, the device is {device.type!r}; "
                "use attention_backend='reference'"
            )
        if dtype not in (torch.bfloat16, torch.float16):
            return (
                f"flash-attn computes in bfloat16 or float16, not {dtype}; "
                "use attention_backend='triton' or 'reference', or dtype='bfloat16'"
            )
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "flash-attn needs an Ampere GPU or newer; use attention_backend='reference'"
        if head_dim % 8 or head_dim > 256:
            return f"flash-attn needs a head_dim that is a multiple of 8 up to 256, not {head_dim}"
        if _has_flash3(device):
            return None
        if importlib.util.find_spec("flash_attn") is None:
            return (
                "neither flash_attn_3 (FlashAttention-3) nor flash_attn is installed; "
                "pip install --no-build-isolation flash-attn (FlashAttention-2; needs a CUDA "
                "toolkit), or use attention_backend='triton'"
            )
        if block_size % _FLASH2_BLOCK_MULTIPLE:
            return (
                f"FlashAttention-2 needs a block_size that is a multiple of "
                f"{_FLASH2_BLOCK_MULTIPLE}, not {block_size}; change it, or use "
                "attention_backend='triton'"
            )
        return None

    def attend(
        self,
        q: Tensor,  # [N, Hq, D]
        k: Tensor,  # [N, Hkv, D]
        v: Tensor,  # [N, Hkv, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
    ) -> Tensor:  # [N, Hq, D]
        """Causal attention of the step's tokens to the cache."""
        num_decode = meta.num_decode_seqs
        if num_decode == meta.seqlens_k.shape[0]:
            if self._decode_backend is not None:
                return self._decode_backend.attend(q, k, v, layer_kv, meta)
            return self._decode(q, layer_kv, meta)
        out = self._prefill(q, k, v, layer_kv, meta)
        if num_decode and self._decode_backend is not None:
            self._decode_backend.decode(q[:num_decode], layer_kv, meta, out[:num_decode])
        elif num_decode:
            out[:num_decode] = self._decode(q[:num_decode], layer_kv, meta)
        return out

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, meta: AttentionMetadata
    ) -> Tensor:  # [N, Hq, D]; the decode rows are left unset
        """Attention of the sequences from num_decode_seqs on; offsets stay those of the step."""
        cu_seqlens_q = meta.cu_seqlens_q[meta.num_decode_seqs :]
        tables = meta.block_tables[meta.num_decode_seqs :]
        scale = q.shape[-1] ** -0.5
        if self.version == 3:
            # With a page table it wants the keys' lengths, not offsets.
            keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_q, "max_seqlen_k": meta.max_seqlen_q}
            if meta.has_prefix:
                k, v = layer_kv.k, layer_kv.v
                keys = {"seqused_k": meta.seqlens_k[meta.num_decode_seqs :], "page_table": tables}
            return self._flash3(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=meta.max_seqlen_q,
                softmax_scale=scale,
                is_causal=True,
                num_splits=1,
                **keys,
            )[0]
        if not meta.has_prefix:
            # Then the new tokens are all the tokens: offsets into k are those into q.
            longest = meta.max_seqlen_q
            return self._varlen(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_q,
                longest,
                longest,
                softmax_scale=scale,
                causal=True,
            )
        return self._varlen(
            q,
            layer_kv.k,
            layer_kv.v,
            cu_seqlens_q,
            meta.cu_seqlens_k[meta.num_decode_seqs :],
            meta.max_seqlen_q,
            meta.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=tables,
        )

    def _decode(
        self,
        q: Tensor,  # [num_decode_seqs, Hq, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
    ) -> Tensor:  # [num_decode_seqs, Hq, D]
        """Attention of one new token per sequence."""
        tables = meta.block_tables[: meta.num_decode_seqs]
        lengths = meta.seqlens_k[: meta.num_decode_seqs]
        scale = q.shape[-1] ** -0.5
        if self.version == 3:
            out = self._flash3(
                q.unsqueeze(1),
                layer_kv.k,
                layer_kv.v,
                seqused_k=lengths,
                page_table=tables,
                softmax_scale=scale,
                is_causal=True,
            )[0]
        else:
            out = self._kvcache(
                q.unsqueeze(1),
                layer_kv.k,
                layer_kv.v,
                cache_seqlens=lengths,
                softmax_scale=scale,
                causal=True,
                block_table=tables,
            )
        return out.squeeze(1)
