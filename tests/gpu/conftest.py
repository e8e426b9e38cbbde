"""Tests of one module leave their GPU memory to the next."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def give_memory_back():
    """Engines take a share of what is free when they start, so torch's cache must not hold it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
