"""Decoder architectures: one definition (`decoder.py`) and, per family, what differs as data.

`ARCHITECTURES` is the list of what can be loaded, by the name that config.json gives.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.models import qwen3
from nanovllm.models.config import DecoderConfig

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "Qwen3ForCausalLM": qwen3.decoder_config,
}
