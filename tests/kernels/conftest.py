"""Kernel tests run under Triton's interpreter without a GPU, and compiled with `-m gpu` on one."""

import os

import pytest
import torch


class CountedKernel:
    """Stands in for a Triton kernel and counts its launches."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def count_launches(monkeypatch):
    """count_launches(module, "_kernel") -> CountedKernel: tells whether the kernel ran."""

    def install(module, name):
        counted = CountedKernel(getattr(module, name))
        monkeypatch.setattr(module, name, counted)
        return counted

    return install


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    if request.param == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set: the kernels would not be compiled")
    return torch.device(request.param)


@pytest.fixture
def pdl(device):
    """Whether kernels are launched with programmatic dependent launch: where it can be had."""
    from nanovllm.kernels.pdl import HAS_PDL

    return HAS_PDL and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def tolerance(device, dtype):
    """assert_close arguments for a few roundings in `dtype`; the interpreter truncates bf16."""
    if dtype == torch.float32:
        return {"rtol": 1e-5, "atol": 1e-5}
    return {"rtol": 3e-2, "atol": 6e-2} if device.type == "cpu" else {"rtol": 1.6e-2, "atol": 1e-2}


@pytest.fixture
def randn(device):
    """Seeded normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    return draw
