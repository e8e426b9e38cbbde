"""The only transformer definition: pre-norm decoder with GQA, rotary embedding and SwiGLU, shaped
by DecoderConfig.

Knows tensors and ranks, not steps or requests. Parameter names are those of Hugging Face
checkpoints, with q/k/v merged into `qkv_proj` and gate/up into `gate_up_proj`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    kv_heads_per_rank,
)
from nanovllm.layers.ops import LayerOps
from nanovllm.layers.rotary_embedding import cos_sin_table
from nanovllm.models.config import DecoderConfig
from nanovllm.utils.context import AttentionMetadata, LayerKV
from nanovllm.utils.distributed import TPGroup


class Parts(NamedTuple):
    """What all modules of one rank's model are built with."""

    tp: TPGroup
    ops: LayerOps
    attention: AttentionBackend
    device: torch.device  # where parameters live
    dtype: torch.dtype  # of all parameters


class Attention(nn.Module):
    """Projections, q/k norm, rotation, cache store, attention, output projection."""

    def __init__(self, config: DecoderConfig, parts: Parts) -> None:
        super().__init__()
        tp, self.ops, self.attention, device, dtype = parts
        self.num_heads_per_rank = config.num_heads // tp.size
        self.num_kv_heads_per_rank = kv_heads_per_rank(config.num_kv_heads, tp.size)
        self.eps = config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            tp,
            device,
            dtype,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.o_bias, tp, device, dtype
        )
        self.q_norm = RMSNorm(config.head_dim, device, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, device, dtype) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,  # [N, C]
        positions: Tensor,  # int [N]
        cos_sin: Tensor,  # float32 [max_positions, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
        rows: Tensor | None,  # int [B'] tokens whose output is wanted; None = all
    ) -> Tensor:  # [N, C], or [B', C]
        """Attend each token to its sequence so far, itself included."""
        q, k, v = self.ops.qk_norm_rope_store(
            self.qkv_proj(x),
            positions,
            cos_sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            layer_kv,
            meta.slot_mapping,
        )
        out = self.attention.attend(q, k, v, layer_kv, meta)  # [N, Hq, D]
        if rows is not None:
            out = out[rows]
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DecoderConfig, parts: Parts) -> None:
        super().__init__()
        tp, self.ops, _, device, dtype = parts
        self.interleaved = False  # gate_up_proj has been reordered to g0, u0, g1, u1, ...
        sizes: dict[str | None, int] = {
            "gate": config.intermediate_size,
            "up": config.intermediate_size,
        }
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, False, tp, device, dtype
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, False, tp, device, dtype
        )

    def forward(
        self,
        x: Tensor,  # [N, C]
    ) -> Tensor:  # [N, C]
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x), self.interleaved))


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to the residual stream after."""

    def __init__(self, config: DecoderConfig, parts: Parts) -> None:
        super().__init__()
        _, self.ops, _, device, dtype = parts
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config, parts)
        self.mlp = MLP(config, parts)
        self.input_layernorm = RMSNorm(config.hidden_size, device, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, device, dtype)

    def forward(
        self,
        x: Tensor,  # [N, C] the layer before's output, not yet in the residual stream
        residual: Tensor | None,  # [N, C]; None in the first layer, where x starts the stream
        positions: Tensor,  # int [N]
        cos_sin: Tensor,  # float32 [max_positions, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
        rows: Tensor | None = None,  # int [B'] tokens whose output is wanted; None = all
    ) -> tuple[Tensor, Tensor]:  # [N, C], [N, C]; or [B', C] each
        """Return (MLP output, residual stream without it); the next norm adds the two."""
        norm_weight = self.input_layernorm.weight
        if residual is None:
            x, residual = self.ops.rms_norm(x, norm_weight, self.eps), x
        else:
            x, residual = self.ops.add_rms_norm(x, residual, norm_weight, self.eps)
        x = self.self_attn(x, positions, cos_sin, layer_kv, meta, rows)
        if rows is not None:
            residual = residual[rows]
        norm_weight = self.post_attention_layernorm.weight
        x, residual = self.ops.add_rms_norm(x, residual, norm_weight, self.eps)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: DecoderConfig, parts: Parts) -> None:
        super().__init__()
        tp, self.ops, _, device, dtype = parts
        self.eps = config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp, device, dtype
        )
        self.layers = nn.ModuleList(DecoderLayer(config, parts) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, device, dtype)
        self.cos_sin = cos_sin_table(
            config.head_dim, config.max_position_embeddings, config.rope_theta, device
        )  # float32 [max_positions, D]; no parameter, no buffer: checkpoints do not hold it

    def forward(
        self,
        input_ids: Tensor,  # int [N]
        positions: Tensor,  # int [N]
        kv_cache: Tensor,  # [2, L, num_blocks, S, Hkv, D]
        meta: AttentionMetadata,
        rows: Tensor | None = None,  # int [B'] tokens whose hidden state is wanted; None = all
    ) -> Tensor:  # [N, C], or [B', C]
        """Hidden states after the final norm.

        The last layer's products are computed for `rows` only: of a prefill, nobody needs more.
        """
        x = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        caches = zip(kv_cache[0].unbind(), kv_cache[1].unbind(), strict=True)
        for i, (layer, (k, v)) in enumerate(zip(self.layers, caches, strict=True), start=1):
            wanted = rows if i == len(self.layers) else None
            x, residual = layer(x, residual, positions, self.cos_sin, LayerKV(k, v), meta, wanted)
        assert residual is not None, "a decoder has at least one layer"
        return self.ops.add_rms_norm(x, residual, self.norm.weight, self.eps)[0]


class CausalLM(nn.Module):
    """A decoder with its LM head: one rank's share of the weights, uninitialised until loaded.

    Args:
        config: shapes and switches of the full model.
        tp: this rank.
        ops: the small operations' implementation.
        attention: the attention backend.
        device: where parameters live.
        dtype: of all parameters, whatever torch's default dtype is.

    Raises:
        ConfigError: heads, MLP or KV heads do not divide over `tp`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tp: TPGroup,
        ops: LayerOps,
        attention: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.ops, self.attention = config, tp, ops, attention
        self.model = Decoder(config, Parts(tp, ops, attention, device, dtype))
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, tp, device, dtype, tied
        )

    def forward(
        self,
        input_ids: Tensor,  # int [N]
        positions: Tensor,  # int [N]
        kv_cache: Tensor,  # [2, L, num_blocks, S, Hkv, D]
        meta: AttentionMetadata,
        rows: Tensor | None = None,  # int [B'] tokens whose hidden state is wanted; None = all
    ) -> Tensor:  # [N, C], or [B', C]
        """Run the step's tokens, store their KV, and return hidden states after the final norm."""
        return self.model(input_ids, positions, kv_cache, meta, rows)

    def compute_logits(
        self,
        hidden: Tensor,  # [B, C]
    ) -> Tensor:  # [B, V]
        """Logits of this rank's vocabulary shard, see `lm_head.vocab_start` and `.num_valid`."""
        return self.lm_head(hidden)
