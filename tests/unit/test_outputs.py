"""A result is nano-vllm's dict and has vLLM's attributes."""

import copy
import json
import pickle

import pytest

from nanovllm import RequestOutput


@pytest.fixture
def output():
    return RequestOutput(
        request_id="3",
        prompt="Hi",
        prompt_token_ids=[7, 8],
        text=" there",
        token_ids=[9, 1],
        finish_reason="stop",
        num_cached_tokens=1,
    )


FIELDS = {
    "text": " there",
    "token_ids": [9, 1],
    "finish_reason": "stop",
    "prompt_token_ids": [7, 8],
    "num_cached_tokens": 1,
}


def test_a_plain_dict(output):
    assert output == FIELDS
    assert isinstance(output, dict)
    assert json.loads(json.dumps(output)) == FIELDS
    assert {**output} == FIELDS


def test_attributes_of_vllm(output):
    assert (output.request_id, output.prompt, output.finished) == ("3", "Hi", True)
    assert (output.prompt_token_ids, output.num_cached_tokens) == ([7, 8], 1)
    [completion] = output.outputs
    assert (completion.index, completion.text) == (0, " there")
    assert (completion.token_ids, completion.finish_reason) == ([9, 1], "stop")


def test_keys_are_attributes(output):
    assert {name: getattr(output, name) for name in FIELDS} == FIELDS
    with pytest.raises(AttributeError, match="logprobs"):
        output.logprobs  # noqa: B018
    assert not hasattr(output, "logprobs")


@pytest.mark.parametrize("duplicate", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy])
def test_copies_are_whole(output, duplicate):
    other = duplicate(output)
    assert type(other) is RequestOutput
    assert other == output
    assert (other.request_id, other.prompt, other.finished) == ("3", "Hi", True)


def test_data_frame(output):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([output, output])
    assert list(frame.columns) == list(FIELDS)
    assert frame["text"].tolist() == [" there"] * 2
