"""Every option's checks: the message names the option, the value and what would do."""

import dataclasses
import pathlib

import numpy as np
import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, NanoVLLMError

NAN, INF = float("nan"), float("inf")
NO_COUNTS = (0, -1, 2.5, True, None, "8", NAN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_num_batched_tokens", value) for value in NO_COUNTS),
        *(("max_num_seqs", value) for value in NO_COUNTS),
        *(("max_model_len", value) for value in (*NO_COUNTS, 1)),
        *(("kvcache_block_size", value) for value in NO_COUNTS),
        *(("tensor_parallel_size", value) for value in (*NO_COUNTS, 9)),
        *(("num_kvcache_blocks", value) for value in (0, -1, 2.5, True, "8")),
        *(
            ("gpu_memory_utilization", value)
            for value in (0, -0.1, 1.01, NAN, INF, "0.9", None, True)
        ),
        *(("seed", value) for value in (1.5, "1", True, 2**64, -(2**63) - 1)),
        *(("enforce_eager", value) for value in (0, 1, None, "yes")),
        *(("enable_prefix_caching", value) for value in (0, "no")),
        *(("async_scheduling", value) for value in (1, None)),
        *(("fused_kernels", value) for value in (1, None)),
        *(("fast_decode", value) for value in (1, None)),
        *(("scheduling_policy", value) for value in ("fcfs", None, 1)),
        *(("dtype", value) for value in ("int8", "float8", None)),
        *(("device", value) for value in ("tpu", "cuda:", "cuda:x", "cpu:1", "auto:0", None)),
        *(("attention_backend", value) for value in ("sdpa", None)),
        *(("load_format", value) for value in ("gguf", None)),
        *(("model", value) for value in ("", None, 3)),
    ],
)
def test_bad_value_is_named(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**({"model": "m"} | {name: value}))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NanoVLLMError)
    assert value is None or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("max_model_length", "max_model_len"),
        ("max_seqs", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("block_size", "kvcache_block_size"),
        ("eager", "enforce_eager"),
        ("tp", "dtype"),
    ],
)
def test_unknown_option_names_the_nearest(unknown, nearest):
    """Upstream ignores what it does not know."""
    with pytest.raises(ConfigError, match=f"{unknown}.*{nearest}"):
        EngineConfig.from_options("m", {unknown: 1})


def test_defaults_are_nano_vllms():
    config = EngineConfig("m")
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (16384, 512)
    assert (config.max_model_len, config.gpu_memory_utilization) == (4096, 0.9)
    assert (config.tensor_parallel_size, config.enforce_eager) == (1, False)
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (256, None)


def test_good_values():
    config = EngineConfig(
        pathlib.PurePath("folder"),
        max_num_seqs=np.int64(3),
        kvcache_block_size=1,
        max_num_batched_tokens=1,
        gpu_memory_utilization=1,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 1),
        seed=-1,
    )
    assert (config.model, config.dtype, config.device) == ("folder", "bfloat16", "cuda:1")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig("m").max_num_seqs = 3
