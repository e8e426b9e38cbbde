"""Which device and dtype an engine computes with, and how much memory there is.

Nothing here changes torch's global state for good.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from nanovllm.errors import ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])


def resolve_device(name: str, tp_rank: int = 0, tp_size: int = 1) -> torch.device:
    """The device of one rank.

    Raises:
        ConfigError: CUDA was asked for and is absent, or there are fewer GPUs than ranks.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device; use device='cpu'")
    num_gpus = torch.cuda.device_count()
    if ":" in name and tp_size > 1:
        raise ConfigError(
            f"device={name!r} is one GPU, but tensor_parallel_size={tp_size} takes GPUs 0 to "
            f"{tp_size - 1}; choose them with CUDA_VISIBLE_DEVICES and use device='cuda'"
        )
    index = int(name.split(":")[1]) if ":" in name else tp_rank
    if tp_size > num_gpus or index >= num_gpus:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} on device={name!r} needs more GPUs than {num_gpus} "
            "visible; lower it or check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights, activations and cache; "auto" is float32 on CPU, else the checkpoint's.

    Raises:
        ConfigError: bfloat16 on a GPU that has none.
    """
    if name != "auto":
        dtype = getattr(torch, name)
    else:
        dtype = torch.float32 if device.type == "cpu" else checkpoint_dtype
    assert isinstance(dtype, torch.dtype)
    if dtype == torch.bfloat16 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ConfigError(
                f"dtype=bfloat16 needs compute capability 8.0 or newer, and {device} has "
                f"{capability[0]}.{capability[1]}; use dtype='float16'"
            )
    return dtype


def on_own_device(method: Method) -> Method:
    """Make `self.device` the current one during a method; Triton, events and graphs use that."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return cast(Method, wrapped)


def is_triton_interpreted() -> bool:
    """Whether TRITON_INTERPRET makes Triton run its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def free_host_bytes() -> int:
    """Memory of this machine that is free now; half of all of it where the system does not tell."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        try:
            return page * os.sysconf("SC_AVPHYS_PAGES")
        except (ValueError, OSError):  # macOS has no such key
            return page * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):  # Windows has no sysconf
        return 4 << 30
