"""How one request is sampled. Checks every field when built; applying them is the sampler's."""

import math
import numbers
from dataclasses import dataclass

from nanovllm.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        RequestError: a field has a wrong type or is out of range; the message names the field.
    """

    temperature: float = 1.0  # 0 = greedy; else logits are divided by it before sampling
    max_tokens: int = 64  # at most this many new tokens
    ignore_eos: bool = False  # go on to max_tokens even if an end-of-sequence token is sampled
    seed: int | None = None  # same seed, same prompt: same tokens, whatever else is in the batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _check_temperature(self.temperature))
        object.__setattr__(self, "max_tokens", _check_int("max_tokens", self.max_tokens))
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens} must be at least 1")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if self.seed is not None:
            object.__setattr__(self, "seed", _check_int("seed", self.seed))
            if not -(2**63) <= self.seed < 2**64:
                raise RequestError(f"seed={self.seed} must fit in 64 bits")


def _check_temperature(value: object) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise RequestError(f"temperature={value!r} must be a number >= 0 (0 = greedy)")
    try:
        temperature = float(value)
    except OverflowError:  # an integer or a fraction beyond all floats
        temperature = math.inf
    if not math.isfinite(temperature) or temperature < 0:
        raise RequestError(f"temperature={value!r} must be finite and >= 0 (0 = greedy)")
    return temperature


def _check_int(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise RequestError(f"{name}={value!r} must be a whole number")
    return int(value)
