"""What a checkpoint's config.json says about a decoder, in one vocabulary for every family and
transformers version.

Reads shapes and switches only; weights are `utils/loader.py`'s, and what the user asked for is the
engine's config.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint_json import read_json_object
from nanovllm.utils.hub import read_with_transformers
from nanovllm.utils.loader import checkpoint_dtype

_NEEDED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
DEFAULT_ROPE_THETA = 10000.0  # transformers' own default where a config names none


@dataclass(frozen=True)
class DecoderConfig:
    """All that distinguishes one supported decoder from another. Counts are of the full model."""

    architecture: str  # as in config.json, e.g. "Qwen3ForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # num_heads * head_dim need not equal hidden_size
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool  # the LM head is the embedding matrix
    qk_norm: bool  # RMSNorm on each query and key head
    qkv_bias: bool
    o_bias: bool
    dtype: torch.dtype  # the checkpoint's
    eos_token_ids: tuple[int, ...]  # of config.json only; generation_config.json may add some

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and (type(value) is not int or value < 1):
                raise CheckpointError(f"config.json: {field.name}={value!r} must be a number >= 1")
        eps = self.rms_norm_eps
        if not isinstance(eps, (int, float)) or not 0 <= eps < 1:  # false for NaN too
            raise CheckpointError(f"config.json: rms_norm_eps={eps!r} must be in [0, 1)")


def load_decoder_config(path: str | Path) -> DecoderConfig:
    """Read the config.json of the checkpoint folder `path`.

    Raises:
        CheckpointError: the file is missing or unreadable, or describes a model that is not
        supported.
    """
    from nanovllm.models import ARCHITECTURES  # here: the registry imports this module

    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist; `model` must be a folder with config.json and *.safetensors"
        )
    raw = read_json_object(file)
    names = raw.get("architectures")
    known_names = [name for name in ARCHITECTURES if isinstance(names, list) and name in names]
    architecture = known_names[0] if known_names else None
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file} has architectures={names}, which is not supported; supported: {known}"
        )
    full = dict(raw) if _is_complete(raw) else _with_defaults(folder)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        full["dtype"] = checkpoint_dtype(folder)
    try:
        return ARCHITECTURES[architecture](full)
    except (KeyError, TypeError, ZeroDivisionError) as error:  # a field is absent or no number
        raise CheckpointError(f"{file} has an unusable value: {error!r}") from error


def _is_complete(raw: Mapping[str, Any]) -> bool:
    """Whether nothing is left to a family's defaults, as in every file that transformers writes.

    Then transformers need not be imported, which took 9 s of a 12 s start where that was measured.
    """
    has_rope = "rope_theta" in raw or "rope_parameters" in raw
    return has_rope and all(key in raw for key in _NEEDED_KEYS)


def _with_defaults(folder: Path) -> dict[str, Any]:
    """The config as a dict in which transformers has filled in each family's defaults."""
    config = read_with_transformers("AutoConfig", folder, str(folder / "config.json"))
    values: dict[str, Any] = config.to_dict()
    return values


def head_dim_of(hf: Mapping[str, Any]) -> int:
    """The explicit head_dim, or hidden_size over heads where the config has none."""
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def rope_theta_of(hf: Mapping[str, Any]) -> float:
    """The rotary base, from the flat key (transformers 4) or the dict (transformers 5), which wins
    if both exist.

    Raises:
        CheckpointError: a scaled, partial or per-layer rotary embedding, which would be silently
        wrong if ignored.
    """
    thetas = [hf.get("rope_theta")]
    _refuse_partial(hf)
    for key in ("rope_parameters", "rope_scaling"):  # each by itself: neither excuses the other
        rope = hf.get(key) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{key}={rope!r} must be an object")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise CheckpointError(f"rotary parameters per layer type are not supported: {rope}")
        for rope_type in (rope.get("rope_type"), rope.get("type")):
            if rope_type not in (None, "default"):
                raise CheckpointError(
                    f"RoPE type {rope_type!r} is not supported; supported: 'default'"
                )
        _refuse_partial(rope)
        thetas.append(rope.get("rope_theta"))
    theta = next((theta for theta in reversed(thetas) if theta), DEFAULT_ROPE_THETA)
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise CheckpointError(f"rope_theta={theta!r} must be a number > 0")
    return float(theta)


def _refuse_partial(config: Mapping[str, Any]) -> None:
    partial = config.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported; only 1 is")


def dtype_of(hf: Mapping[str, Any]) -> torch.dtype:
    """The dtype under its new or old name, as a string or a torch.dtype; bfloat16 if absent."""
    given = hf.get("dtype") or hf.get("torch_dtype") or torch.bfloat16
    value = given
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), value)
    if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
        raise CheckpointError(
            f"dtype={given!r} is not supported; supported: bfloat16, float16, float32"
        )
    return value


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raise CheckpointError for switches of any family that no layer here implements."""
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act={activation!r} is not supported; supported: 'silu'")
    if hf.get("quantization_config"):
        raise CheckpointError(
            "quantized checkpoints are not supported; use the bfloat16 or float16 original"
        )
    if _uses_sliding_window(hf):
        raise CheckpointError(
            f"sliding_window={hf.get('sliding_window')} is in use, which is not supported; "
            "use a checkpoint whose layers all attend to the whole context"
        )


def _uses_sliding_window(hf: Mapping[str, Any]) -> bool:
    layer_types = hf.get("layer_types")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if not hf.get("use_sliding_window") or hf.get("sliding_window") is None:
        return False
    return hf.get("max_window_layers", 0) < hf["num_hidden_layers"]
