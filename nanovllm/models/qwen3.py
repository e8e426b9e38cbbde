"""Qwen3 (dense): what distinguishes it, as data for `decoder.py`.

No layer is defined here.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import (
    DecoderConfig,
    dtype_of,
    head_dim_of,
    refuse_unsupported,
    rope_theta_of,
)
from nanovllm.utils.checkpoint_json import eos_token_ids_of


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Translate a Qwen3 config, as written by transformers 4 or 5.

    Raises:
        CheckpointError: the config uses something that would be silently wrong if ignored.
    """
    refuse_unsupported(hf)
    bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=head_dim_of(hf),
        rms_norm_eps=hf["rms_norm_eps"],
        rope_theta=rope_theta_of(hf),
        max_position_embeddings=hf["max_position_embeddings"],
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        dtype=dtype_of(hf),
        eos_token_ids=eos_token_ids_of(hf),
    )
