"""The whole decode step of a CausalLM, embedding to logits, in five kernels a layer (or seven).

The weights and answers of the model's own forward (up to rounding), without its dozen small
kernels. Which kernels run depends on the batch size alone, so a CUDA graph can hold a step.
Sampling and the graphs themselves are the engine's.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.models.config import DecoderConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.device import is_triton_interpreted

if TYPE_CHECKING:
    from nanovllm.kernels.peer_exchange import PeerExchange

MAX_LINEAR_ROWS = 64  # largest batch of our own products


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    qkv: Tensor  # [(Hq + 2 Hkv) * D, C], input norm folded in
    o: Tensor  # [C, Hq * D]
    gate_up: Tensor  # [2 I, C], post-attention norm folded in, rows g0, u0, g1, u1, ...
    down: Tensor  # [C, I]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    norm_after_o: Tensor  # [C], ones
    norm_after_down: Tensor  # [C], the next layer's ones, or the final norm's weight


class FastDecode:
    """Decode steps of `model` over `kv_cache`; prepares the model's weights in place, once.

    Norm weights are folded into the products that follow them and replaced by ones, and the rows
    of gate_up_proj are interleaved; the model's own forward goes on to work with that.

    Args:
        model: one rank's share, weights loaded; `unsupported_reason` says None.
        kv_cache: [2, L, num_blocks, S, Hkv, D].
        max_num_seqs: largest batch of a step; scratch memory is allocated for it.
        max_model_len: longest context, new token included.
        exchange: sums over ranks, up to its `max_rows`; other sums are the group's collectives.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: Tensor,
        max_num_seqs: int,
        max_model_len: int,
        exchange: "PeerExchange | None" = None,
    ) -> None:
        from nanovllm.kernels import decode_attention

        self.model, self.kv_cache, self.max_model_len = model, kv_cache, max_model_len
        self._exchange = exchange
        self._attend = decode_attention.fused_decode_attention
        self._plan_attention = decode_attention.plan_attention
        _prepare_weights(model)
        self._layers = _layer_weights(model)
        attention: Any = model.model.layers[0].self_attn
        self._group = attention.num_heads_per_rank // attention.num_kv_heads_per_rank
        self._scratch = _Scratch(model, kv_cache, max_num_seqs, self._num_pieces(max_num_seqs))

    @staticmethod
    def unsupported_reason(
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        tp_size: int = 1,
    ) -> str | None:
        """Why this model cannot decode this way here, or None; the plain forward always can."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type != "cuda" and not is_triton_interpreted():
            return f"it needs an NVIDIA GPU, and the device is {str(device)!r}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 and float16, not {dtype}"
        if config.head_dim not in (64, 128):
            return f"head_dim is {config.head_dim}, not 64 or 128"
        if config.qkv_bias or config.o_bias:
            return "the projections have biases"
        if config.hidden_size % 64 or config.intermediate_size % (64 * tp_size):
            return (
                f"hidden_size={config.hidden_size} and, on each of {tp_size} ranks, "
                f"intermediate_size={config.intermediate_size} are not multiples of 64"
            )
        if config.num_heads // config.num_kv_heads > 16:
            return f"{config.num_heads} query heads share {config.num_kv_heads} KV heads"
        if block_size < 16 or block_size & (block_size - 1):
            return f"kvcache_block_size={block_size} is not a power of two from 16"
        return None

    def forward(
        self,
        input_ids: Tensor,  # int32 [B]
        seqlens_k: Tensor,  # int32 [B], new token included: it is at position seqlens_k - 1
        block_tables: Tensor,  # int32 [B, max_blocks]
        slot_mapping: Tensor,  # int32 [B]
    ) -> Tensor:  # [B, V] this rank's vocabulary shard; the next step overwrites it
        """Run one token per sequence: store its keys and values, return its logits.

        Padded rows (seqlens_k 0, slot -1, any valid id) store nothing and change no other row.
        Rows may have any order; from batch 64 on, longest first is faster. No host sync. A kernel
        on the same stream may have written `input_ids` just before; the other arguments are read
        before preceding kernels have finished.
        """
        if self._exchange is not None:
            self._exchange.check()
        batch_size = input_ids.shape[0]
        plan = self._plan(batch_size)
        scratch, pdl = self._scratch, self._scratch.pdl
        stream = _ResidualStream(self.model, scratch, batch_size, self._exchange)
        stream.start(input_ids)
        for layer, k_cache, v_cache in zip(self._layers, *self.kv_cache.unbind(), strict=True):
            qkv = stream.product_of_norm(layer.qkv, scratch.qkv[:batch_size])
            heads = scratch.heads[:batch_size]  # [B, Hq * D]
            self._attend(
                qkv,
                k_cache,
                v_cache,
                block_tables,
                seqlens_k,
                slot_mapping,
                self.model.model.cos_sin,
                layer.q_norm,
                layer.k_norm,
                heads,
                scratch.partials,
                scratch.counts,
                plan,
                eps=self.model.config.rms_norm_eps,
                pdl=pdl,
            )
            stream.add_product(heads, layer.o, layer.norm_after_o)
            activation = stream.product_of_norm(
                layer.gate_up, scratch.activation[:batch_size], silu=True
            )
            stream.add_product(activation, layer.down, layer.norm_after_down)
        return stream.logits()

    def _plan(self, batch_size: int) -> Any:
        num_kv_heads = self.kv_cache.shape[-2]
        return self._plan_attention(batch_size, num_kv_heads, self._group, self.max_model_len)

    def _num_pieces(self, max_num_seqs: int) -> int:
        """Most pieces of heads that attention leaves to be merged, over all batch sizes."""
        heads = self.kv_cache.shape[-2] * self._group
        sizes = range(1, max_num_seqs + 1)
        return max(heads * size * int(self._plan(size).num_splits) for size in sizes)


class _Scratch:
    """Activations of one step, allocated for the largest batch; a step uses the first rows."""

    def __init__(
        self, model: CausalLM, kv_cache: Tensor, max_num_seqs: int, num_pieces: int
    ) -> None:
        from nanovllm.kernels import decode_linear
        from nanovllm.kernels.pdl import HAS_PDL

        device, dtype = kv_cache.device, kv_cache.dtype
        layer = _layer_weights(model)[0]
        products = (layer.qkv, layer.o, layer.gate_up, layer.down)
        hidden_size, head_dim = model.config.hidden_size, kv_cache.shape[-1]
        is_cuda = device.type == "cuda"
        self.pdl = HAS_PDL and is_cuda and torch.cuda.get_device_capability(device) >= (9, 0)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.stream = empty(max_num_seqs, hidden_size)
        self.delta = empty(max_num_seqs, hidden_size)  # a product not yet added to the stream
        self.normed = empty(max_num_seqs, hidden_size)  # the stream after a sum over ranks
        self.qkv = empty(max_num_seqs, layer.qkv.shape[0])
        self.heads = empty(max_num_seqs, layer.o.shape[1])
        self.activation = empty(max_num_seqs, layer.down.shape[1])
        self.logits = empty(max_num_seqs, model.lm_head.weight.shape[0])
        self.num_squares = hidden_size // decode_linear.BLOCK_N
        self.squares = empty(self.num_squares * max_num_seqs, dtype=torch.float32)
        rows = min(_max_linear_rows(hidden_size), max_num_seqs)
        split_outputs = max(decode_linear.split_k(*w.shape) * w.shape[0] * rows for w in products)
        # Partial results and arrivals of split kernels: each has merged before the next one runs.
        partials = max(num_pieces * (head_dim + 1), split_outputs)
        self.partials = empty(partials, dtype=torch.float32)
        tiles = max(w.shape[0] // decode_linear.BLOCK_N for w in products)
        counts = max(max_num_seqs * kv_cache.shape[-2], tiles)
        self.counts = torch.zeros(counts, dtype=torch.int32, device=device)


class _ResidualStream:
    """One step's residual stream and the products that read and extend it.

    The batch size chooses the products: one row, matrix times vector; few rows, our own with fused
    norm and residual addition; more, cuBLAS and separate kernels. With several ranks, products are
    summed over ranks before they are added: by a kernel that also adds and normalises, or, without
    an exchange or beyond its `max_rows`, by the group's collective.
    """

    def __init__(
        self,
        model: CausalLM,
        scratch: _Scratch,
        batch_size: int,
        exchange: "PeerExchange | None",
    ) -> None:
        from nanovllm.kernels.decode_embed import embed
        from nanovllm.kernels.decode_gemv import gemv
        from nanovllm.kernels.decode_linear import linear

        self.model, self.scratch, self.batch_size = model, scratch, batch_size
        self.tp, self.ops, self.eps = model.tp, model.ops, model.config.rms_norm_eps
        self._embed, self._gemv, self._linear = embed, gemv, linear
        self.uses_cublas = batch_size > _max_linear_rows(model.config.hidden_size)
        self.is_fused = self.tp.size == 1 and not self.uses_cublas
        is_exchanged = exchange is not None and batch_size <= exchange.max_rows
        self.exchange = exchange if is_exchanged else None
        self.stream = scratch.stream[:batch_size]  # [B, C]
        self.source = self.stream  # [B, C] what products read: normed already unless fused

    def start(
        self,
        input_ids: Tensor,  # int32 [B]
    ) -> None:
        """Begin with the tokens' embeddings."""
        decoder: Any = self.model.model
        table = decoder.embed_tokens
        self._embed(
            input_ids,
            table.weight,
            self.stream,
            self.scratch.squares,
            self.scratch.num_squares,
            vocab_start=table.vocab_start,
            pdl=self.scratch.pdl,
        )
        if self.is_fused:
            return
        ones = decoder.layers[0].input_layernorm.weight
        if self.exchange is not None:
            self._exchange_and_norm(self.stream, ones, add=False)
        else:
            self.tp.all_reduce(self.stream)
            self.source = self.ops.rms_norm(self.stream, ones, self.eps)

    def product_of_norm(
        self,
        weight: Tensor,  # [N, C], norm weight folded in
        out: Tensor,  # [B, N], or [B, N / 2] with silu
        silu: bool = False,
    ) -> Tensor:
        """Return norm(stream) @ weight.T, as a rule in `out`; silu: gate and up combined."""
        if self.uses_cublas:
            if silu:
                return self.ops.silu_and_mul(torch.mm(self.source, weight.t()), True)
            return torch.mm(self.source, weight.t(), out=out)
        options: dict[str, Any] = {"silu": silu, "pdl": self.scratch.pdl}
        if self.is_fused:
            options["eps"] = self.eps
        if self.batch_size == 1:
            self._gemv(self.source, weight, out, **options)
        else:
            if self.is_fused:
                options["squares_in"] = self.scratch.squares
            self._linear(
                self.source, weight, out, self.scratch.partials, self.scratch.counts, **options
            )
        return out

    def add_product(
        self,
        x: Tensor,  # [B, K]
        weight: Tensor,  # [C, K]
        norm_weight: Tensor,  # [C] of the norm that comes next
    ) -> None:
        """Add x @ weight.T, summed over ranks, to the stream."""
        out = self.stream if self.is_fused else self.scratch.delta[: self.batch_size]
        options: dict[str, Any] = {"pdl": self.scratch.pdl}
        if self.is_fused:
            options["residual"] = out
        if self.uses_cublas:
            torch.mm(x, weight.t(), out=out)
        elif self.batch_size == 1:
            self._gemv(x, weight, out, **options)
        else:
            if self.is_fused:
                options["squares_out"] = self.scratch.squares
            self._linear(x, weight, out, self.scratch.partials, self.scratch.counts, **options)
        if self.exchange is not None:
            self._exchange_and_norm(out, norm_weight, add=True)
        elif not self.is_fused:
            self.tp.all_reduce(out)
            self.source = self.ops.add_rms_norm(out, self.stream, norm_weight, self.eps)[0]

    def _exchange_and_norm(
        self,
        x: Tensor,  # [B, C] this rank's part
        norm_weight: Tensor,  # [C] of the norm that comes next
        add: bool,
    ) -> None:
        """Sum `x` over ranks into the stream and normalise that, in one kernel."""
        assert self.exchange is not None, "only called with an exchange"
        self.source = self.scratch.normed[: self.batch_size]
        self.exchange.reduce_add_rms_norm(
            x, self.stream, norm_weight, self.source, self.eps, add=add, pdl=self.scratch.pdl
        )

    def logits(self) -> Tensor:  # [B, V]
        """The LM head of the finished stream."""
        weight, out = self.model.lm_head.weight, self.scratch.logits[: self.batch_size]
        final_norm = self.model.model.norm.weight
        if self.batch_size == 1 and self.is_fused:
            self._gemv(
                self.stream,
                weight,
                out,
                eps=self.eps,
                norm_weight=final_norm,
                pdl=self.scratch.pdl,
            )
            return out
        if self.is_fused:
            self.source = self.ops.rms_norm(self.stream, final_norm, self.eps)
        return torch.mm(self.source, weight.t(), out=out)


def _max_linear_rows(hidden_size: int) -> int:
    """Largest batch whose products are ours; above, cuBLAS was faster on the H200."""
    if hidden_size < 4096:
        return MAX_LINEAR_ROWS
    return MAX_LINEAR_ROWS // 2 if hidden_size < 5120 else 1


def _layer_weights(model: CausalLM) -> list[_LayerWeights]:
    layers: list[Any] = list(model.model.layers)
    next_norms = [layer.input_layernorm.weight for layer in layers[1:]] + [model.model.norm.weight]
    return [
        _LayerWeights(
            qkv=layer.self_attn.qkv_proj.weight,
            o=layer.self_attn.o_proj.weight,
            gate_up=layer.mlp.gate_up_proj.weight,
            down=layer.mlp.down_proj.weight,
            q_norm=None if layer.self_attn.q_norm is None else layer.self_attn.q_norm.weight,
            k_norm=None if layer.self_attn.k_norm is None else layer.self_attn.k_norm.weight,
            norm_after_o=layer.post_attention_layernorm.weight,
            norm_after_down=next_norm,
        )
        for layer, next_norm in zip(layers, next_norms, strict=True)
    ]


@torch.no_grad()
def _prepare_weights(model: CausalLM) -> None:
    """Fold the layers' norms into the products after them and interleave gate and up rows."""
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        if layer.mlp.interleaved:
            continue  # by another FastDecode of the same model
        gate_up = layer.mlp.gate_up_proj.weight
        for norm, product in (
            (layer.input_layernorm.weight, layer.self_attn.qkv_proj.weight),
            (layer.post_attention_layernorm.weight, gate_up),
        ):
            product.mul_(norm)  # computed in float32, rounded once
            norm.fill_(1.0)
        gate, up = gate_up.chunk(2)
        gate_up.copy_(torch.stack((gate, up), dim=1).flatten(0, 1))
        layer.mlp.interleaved = True
