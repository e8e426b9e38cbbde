"""What the user asked for: every engine option with its default and its checks, frozen.

Nothing measured is stored here (block counts, devices chosen): those are results and live with
whoever measured them.
"""

import dataclasses
import difflib
import numbers
import os
import re
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ConfigError

_CHOICES = {
    "scheduling_policy": ("prefill_first", "mixed"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention_backend": ("auto", "reference", "triton", "flash"),
    "load_format": ("auto", "dummy"),
}
_FLAGS = (
    "enforce_eager",
    "enable_prefix_caching",
    "async_scheduling",
    "fused_kernels",
    "fast_decode",
)
_POSITIVE = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of `LLM(model, **options)`.

    Raises:
        ConfigError: an option has a wrong type or an impossible value; the message names it.
    """

    model: str  # local folder of a Hugging Face checkpoint, or a hub id
    max_num_batched_tokens: int = 16384  # new tokens in a step; longer prompts come in chunks
    max_num_seqs: int = 512  # sequences running at once
    max_model_len: int = 4096  # prompt + output tokens of one sequence; bounded by the checkpoint
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV
    tensor_parallel_size: int = 1  # GPUs (or CPU processes) that share the model
    enforce_eager: bool = False  # no CUDA graphs
    kvcache_block_size: int = 256  # tokens per KV block
    num_kvcache_blocks: int | None = None  # exactly this many; None = what fits in memory
    scheduling_policy: str = "prefill_first"  # or "mixed": prompt chunks fill up decode steps
    dtype: str = "auto"  # the checkpoint's on a GPU, float32 on CPU
    device: str = "auto"  # "cuda" if there is one, else "cpu"
    attention_backend: str = "auto"  # "reference" | "triton" | "flash"
    enable_prefix_caching: bool = True  # reuse the KV blocks of equal prompt beginnings
    async_scheduling: bool = True  # schedule the next step while this one runs
    load_format: str = "auto"  # "dummy" = random weights, only config.json is read
    seed: int | None = None  # of requests without their own; None = from the system
    fused_kernels: bool = True  # Triton kernels for norms, activation, RoPE + store and sampling
    fast_decode: bool = True  # the hand-fused decode step where model and GPU allow it

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} must be a folder or a hub id")
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "device", str(self.device))
        self._check_numbers()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {choices}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} must be 'auto', 'cpu', 'cuda' or 'cuda:N'")

    def _check_numbers(self) -> None:
        limits = dict.fromkeys(_POSITIVE, (1, 2**31 - 1))
        limits["tensor_parallel_size"] = (1, 8)
        if self.num_kvcache_blocks is not None:
            limits["num_kvcache_blocks"] = (1, 2**31 - 1)
        if self.seed is not None:
            limits["seed"] = (-(2**63), 2**64 - 1)
        for name, (low, high) in limits.items():  # numpy's integers become Python's
            object.__setattr__(self, name, _check_int(name, getattr(self, name), low, high))
        share = self.gpu_memory_utilization
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:  # false for NaN too
            raise ConfigError(f"gpu_memory_utilization={share!r} must be in (0, 1]")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for a prompt and an answer; use >= 2")

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> "EngineConfig":
        """Build from `LLM(model, **options)`.

        Raises:
            ConfigError: an option is unknown (the message names near ones or all) or bad.
        """
        known = [field.name for field in dataclasses.fields(cls) if field.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(model, **options)


def _check_int(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    number = int(value)
    if not low <= number <= high:
        raise ConfigError(f"{name}={value} must be between {low} and {high}")
    return number
