"""Every field's checks; a bad value once ran for ever or failed far away on the device."""

import dataclasses

import numpy as np
import pytest

from nanovllm import RequestError, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("temperature", value)
            for value in (-0.1, -1e-9, NAN, INF, -INF, "1", None, True, [1], 1j)
        ),
        *(("max_tokens", value) for value in (0, -1, 2.5, 2.0, "3", None, True, NAN)),
        *(("ignore_eos", value) for value in (0, 1, None, "no")),
        *(("seed", value) for value in (1.5, "1", True, 2**64, -(2**63) - 1)),
    ],
)
def test_bad_value_is_named(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert repr(value) in str(caught.value)


def test_unknown_field_is_named():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed) == (
        1.0,
        64,
        False,
        None,
    )


@pytest.mark.parametrize("temperature", [0, 1, 1e-11, np.float32(0.5), 1e30])
def test_good_temperature(temperature):
    params = SamplingParams(temperature=temperature)
    assert type(params.temperature) is float
    assert params.temperature == float(temperature)


def test_good_numbers():
    params = SamplingParams(max_tokens=np.int64(5), seed=2**64 - 1)
    assert (params.max_tokens, type(params.max_tokens)) == (5, int)
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)


def test_frozen_and_equal_by_value():
    params = SamplingParams(temperature=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert params == SamplingParams(temperature=0)
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3
