"""Prompts in all their forms, and every way to get them wrong: the message names the index."""

import numpy as np
import pytest
import torch

from nanovllm import RequestError, SamplingParams
from nanovllm.requests import RequestLimits, check_requests

LIMITS = RequestLimits(vocab_size=100, max_model_len=32, block_size=4, num_blocks=6)


def fake_tokenizer(texts):
    """One id per character."""
    return {"input_ids": [[ord(char) % 100 for char in text] for text in texts]}


def check(prompts, params=None, tokenizer=fake_tokenizer, limits=LIMITS):
    return check_requests(prompts, params or SamplingParams(max_tokens=4), tokenizer, limits)


def ids(prompts, **options):
    return [request.token_ids for request in check(prompts, **options)]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], []),
        ("Hi", [[72, 5]]),
        (["Hi", "i"], [[72, 5], [5]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], (3,)], [[1, 2], [3]]),
        (["Hi", [3, 4]], [[72, 5], [3, 4]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), [np.int32(3)]], [[1, 2], [3]]),
        ([torch.tensor([1, 2])], [[1, 2]]),
        ({"prompt": "Hi"}, [[72, 5]]),
        ({"prompt_token_ids": [7]}, [[7]]),
        ([{"prompt": "Hi", "prompt_token_ids": [7]}, {"prompt": "i"}], [[7], [5]]),
        ({"prompt": "Hi", "prompt_token_ids": None}, [[72, 5]]),
        ((text for text in ("Hi", "i")), [[72, 5], [5]]),
        ([range(3)], [[0, 1, 2]]),
        ([[0, 99]], [[0, 99]]),
    ],
)
def test_forms_of_prompts(prompts, expected):
    result = ids(prompts)
    assert result == expected
    assert all(type(token_id) is int for token_ids in result for token_id in token_ids)


def test_prompt_text_is_kept():
    requests = check(["Hi", [3], {"prompt": "yo", "prompt_token_ids": [4]}])
    assert [request.prompt for request in requests] == ["Hi", None, "yo"]


def test_callers_list_is_not_shared():
    mine = [1, 2, 3]
    [request] = check([mine])
    assert request.token_ids == mine
    request.token_ids.append(4)
    assert mine == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        ([-1], r"-1.*\[0, 100\)"),
        ([5, 100], r"100.*\[0, 100\)"),
        ([2**31], "2147483648"),
        ([2**70], str(2**70)),
        ([1, None], "None"),
        ([1.0], "1.0"),
        ([True], "True"),
        ([[1]], r"\[1\]"),
        (["ab"], "ab"),
        (None, "None"),
        (7.5, "7.5"),
        (3, "3"),
        (b"ab", "b'ab'"),
        (np.array([1.5]), "1.5"),
        (np.array([[1, 2]]), r"\[1, 2\]"),
        ({"text": "Hi"}, "'prompt'"),
        ({1: 2, "a": 3}, "'prompt'"),
        ({"prompt": None}, "None"),
        ({"prompt_token_ids": "Hi"}, "H"),
        ([1] * 32, "32.*max_model_len=32"),
        ([1] * 40, "40.*max_model_len=32"),
        ([1] * 22, "needs 7 KV blocks.*has 6.*num_kvcache_blocks"),
    ],
)
def test_bad_prompt_is_named_by_index(prompt, words):
    for index, prompts in ((0, [prompt, [1]]), (1, [[1], prompt]), (2, ["ok", [1], prompt])):
        with pytest.raises(RequestError, match=f"(?s)prompt {index} .*{words}") as caught:
            check(prompts)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("prompts", [5, None, 2.5, b"ab", object()])
def test_no_prompts_at_all(prompts):
    with pytest.raises(RequestError, match="prompt"):
        check(prompts)


def test_request_that_just_fits():
    """The last token needs no KV: 24 slots serve 25 tokens; max_model_len bounds what is wanted."""
    assert len(check([[1] * 21])) == 1
    assert len(check([[1]], SamplingParams(max_tokens=24))) == 1
    with pytest.raises(RequestError, match="needs 7 KV blocks of 4 tokens"):
        check([[1]], SamplingParams(max_tokens=25))
    roomy = RequestLimits(vocab_size=100, max_model_len=32, block_size=4, num_blocks=8)
    assert len(check([[1] * 31], SamplingParams(max_tokens=10**9), limits=roomy)) == 1


def test_a_lone_big_request_is_refused_and_a_small_one_is_not():
    tiny = RequestLimits(vocab_size=100, max_model_len=32, block_size=4, num_blocks=2)
    for prompt in ([1] * 8, [1] * 9):
        with pytest.raises(RequestError, match=r"prompt 0 needs 3 KV blocks.*the cache has 2"):
            check([prompt, [1, 2, 3]], limits=tiny)
    assert ids([[1, 2, 3]], limits=tiny) == [[1, 2, 3]]


def test_params_one_for_all_or_one_each():
    each = [SamplingParams(max_tokens=n) for n in (1, 2)]
    assert [request.params for request in check([[1], [2]], each)] == each
    assert [request.params for request in check([[1], [2]], tuple(each))] == each
    roomy = RequestLimits(vocab_size=100, max_model_len=32, block_size=4, num_blocks=8)
    assert check_requests([[1]], None, None, roomy)[0].params == SamplingParams()


def test_params_of_another_length():
    """A list that was too short silently dropped prompts."""
    with pytest.raises(RequestError, match=r"3 prompts.*2 sampling"):
        check([[1], [2], [3]], [SamplingParams(max_tokens=1)] * 2)
    with pytest.raises(RequestError, match=r"1 prompts.*2 sampling"):
        check("a", [SamplingParams(max_tokens=1)] * 2)


@pytest.mark.parametrize("params", [{"temperature": 0}, 3, "greedy", [None], [SamplingParams]])
def test_params_of_another_kind(params):
    with pytest.raises(RequestError, match="sampling"):
        check([[1]], params)


def test_text_without_a_tokenizer():
    with pytest.raises(RequestError, match=r"prompt 1 .*tokenizer"):
        check([[1], "Hi"], tokenizer=None)
    assert ids([[1]], tokenizer=None) == [[1]]


def test_texts_are_encoded_in_one_call():
    calls = []
    ids(["Hi", [1], "yo"], tokenizer=lambda texts: calls.append(texts) or fake_tokenizer(texts))
    assert calls == [["Hi", "yo"]]
