"""config.json of every transformers version, and refusal of what would be silently wrong."""

import json

import pytest
import torch

from nanovllm.errors import CheckpointError
from nanovllm.models import ARCHITECTURES
from nanovllm.models.config import load_decoder_config

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


def read(without=(), **changes):
    config = {key: value for key, value in QWEN3.items() if key not in without}
    return ARCHITECTURES["Qwen3ForCausalLM"](config | changes)


def test_fields():
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (28, 16, 8)
    assert (config.head_dim, config.hidden_size, config.vocab_size) == (128, 1024, 151936)
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert not config.qkv_bias
    assert not config.o_bias
    assert read(attention_bias=True).qkv_bias
    assert read(attention_bias=True).o_bias


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"rope_type": "default", "rope_theta": 1e6},
        },
    ],
    ids=["flat", "null scaling", "v5 dict", "v4 dict", "dict wins", "all three"],
)
def test_rope_theta_in_every_form(rope):
    """transformers 5 moved theta into a dict: upstream then silently used its own default (N18)."""
    assert read(without=["rope_theta"], **rope).rope_theta == 1e6


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "new"])
@pytest.mark.parametrize(
    ("field", "key"),
    [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")],
)
def test_scaled_rope_is_refused_never_ignored(kind, field, key):
    with pytest.raises(CheckpointError, match=f"'{kind}'"):
        read(**{field: {key: kind, "factor": 4.0, "rope_theta": 1e6}})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
        ({"partial_rotary_factor": 0.25}, "0.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 5}, "4096"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "nonsense"}, "nonsense"),
    ],
)
def test_unsupported_switches_are_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


def test_sliding_window_that_no_layer_uses_is_fine():
    read(use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    read(use_sliding_window=True, sliding_window=4096, max_window_layers=28)
    read(layer_types=["full_attention"] * 28, sliding_window=None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"torch_dtype": torch.float32}, torch.float32),
        ({"dtype": "torch.float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
        ({}, torch.bfloat16),
    ],
)
def test_dtype_under_either_name(given, expected):
    """Loading failed with one name or the other, depending on the transformers version (N19)."""
    assert read(without=["torch_dtype"], **given).dtype == expected


def test_eos_is_an_int_a_list_or_absent():
    assert read().eos_token_ids == (151645,)
    assert read(eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_head_dim_and_kv_heads_have_defaults():
    config = read(without=["head_dim", "num_key_value_heads"])
    assert (config.head_dim, config.num_kv_heads) == (64, 16)


# What follows reads files, through transformers' AutoConfig.


def test_reads_what_transformers_writes(tiny_checkpoint):
    config = load_decoder_config(tiny_checkpoint(tied=False, rope_theta=5e5, attention_bias=True))
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.rope_theta, config.dtype, config.eos_token_ids) == (5e5, torch.float32, (2,))
    assert (config.head_dim, config.num_heads, config.hidden_size) == (32, 4, 64)
    assert config.qkv_bias
    assert not config.tie_word_embeddings


@pytest.fixture
def folder_with(tmp_path):
    def write(without=(), **changes):
        config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **QWEN3, **changes}
        config = {key: value for key, value in config.items() if key not in without}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_old_config_file(folder_with):
    config = load_decoder_config(folder_with())
    assert (config.rope_theta, config.dtype) == (1e6, torch.bfloat16)


def test_scaled_rope_in_a_file_is_refused(folder_with):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(CheckpointError, match="yarn"):
        load_decoder_config(folder_with(rope_scaling=scaling))


def test_dtype_absent_from_the_config_is_taken_from_the_weights(folder_with):
    from safetensors.torch import save_file

    folder = folder_with(without=["torch_dtype"])
    assert load_decoder_config(folder).dtype == torch.bfloat16
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, folder / "model.safetensors")
    assert load_decoder_config(folder).dtype == torch.float16


def test_unknown_architecture_names_the_known_ones(folder_with):
    with pytest.raises(CheckpointError, match=r"OtherForCausalLM.*Qwen3ForCausalLM"):
        load_decoder_config(folder_with(architectures=["OtherForCausalLM"]))
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM"):
        load_decoder_config(folder_with(architectures=None))


def test_missing_or_broken_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_decoder_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_decoder_config(tmp_path)
