"""Prompts and sampling parameters of one call, checked as a whole before the engine is touched.

Knows limits, not blocks or devices; queueing what was checked is the engine's.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.integers import divide_up

_BYTES = (bytes, bytearray, memoryview)
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One checked prompt."""

    prompt: str | None  # None if token ids were given
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request must fit into."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    is_checkpoint_limit: bool = False  # max_model_len is as long as the checkpoint allows

    @property
    def way_to_more(self) -> str:
        """How to get a longer context, to end a message with."""
        if self.is_checkpoint_limit:
            return " (the checkpoint allows no more)"
        return " or raise max_model_len"


def check_requests(
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Any,
    limits: RequestLimits,
) -> list[Request]:
    """Turn the arguments of `generate` into requests; either all are good or none is taken.

    Args:
        prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a
            list of these.
        sampling_params: one for all, one per prompt, or None for the defaults.
        tokenizer: None if the checkpoint has none; then only token ids can be served.

    Raises:
        RequestError: something is wrong with a prompt; the message has its index, the value, the
            limit and a way out.
    """
    items = _as_list(prompts)
    all_params = _as_params(sampling_params, len(items))
    texts: list[str | None] = []
    ids: list[Any] = []
    for index, item in enumerate(items):
        text, given = _split_prompt(index, item)
        texts.append(text)
        ids.append(given)
    _tokenize(texts, ids, tokenizer)
    return [
        Request(text, _check(index, given, params, limits), params)
        for index, (text, given, params) in enumerate(zip(texts, ids, all_params, strict=True))
    ]


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping, *_BYTES)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor, of one prompt or of several
        prompts = prompts.tolist()
    try:
        items = list(prompts)
    except TypeError:
        raise RequestError(
            f"prompts={prompts!r} must be a string, a list of token ids, or a list of these"
        ) from None
    if items and all(_is_int(item) for item in items):
        return [items]  # one prompt given as token ids
    return items


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    try:
        if isinstance(params, Mapping):
            raise TypeError
        all_params = list(params)
    except TypeError:
        raise RequestError(
            f"sampling_params={params!r} must be a SamplingParams or a list of them"
        ) from None
    if len(all_params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts, but {len(all_params)} sampling parameters; give one for all "
            "or one per prompt"
        )
    for index, item in enumerate(all_params):
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params of prompt {index} is {item!r}, no SamplingParams")
    return all_params


def _split_prompt(index: int, item: Any) -> tuple[str | None, Any]:
    """(text, None) or (text or None, token ids) of one prompt in any of its forms."""
    if isinstance(item, Mapping):
        if item.get("prompt_token_ids") is not None:
            text = item.get("prompt")
            if text is not None and not isinstance(text, str):
                raise RequestError(f"prompt {index} has 'prompt': {text!r}, which is no string")
            return text, item["prompt_token_ids"]
        if item.get("input_ids") is not None:  # what a tokenizer or its chat template returns
            return None, item["input_ids"]
        if "prompt" not in item:
            raise RequestError(
                f"prompt {index} is a dict with keys {list(item)}; it needs 'prompt' or "
                "'prompt_token_ids'"
            )
        item = item["prompt"]
    if isinstance(item, str):
        return item, None
    return None, item


def _tokenize(texts: list[str | None], ids: list[Any], tokenizer: Any) -> None:
    """Fill `ids` of the prompts that came as text, all in one call of the tokenizer."""
    where = [i for i, given in enumerate(ids) if given is None and texts[i] is not None]
    if not where:
        return
    if tokenizer is None:
        raise RequestError(
            f"prompt {where[0]} is text, but the checkpoint has no tokenizer files; give lists of "
            "token ids"
        )
    try:
        encoded = tokenizer([texts[i] for i in where])["input_ids"]
    except (TypeError, UnicodeError) as error:  # a lone surrogate; the error names no prompt
        for i in where:
            if any("\ud800" <= char <= "\udfff" for char in texts[i] or ""):
                raise RequestError(
                    f"prompt {i} is {texts[i]!r}, which is not valid Unicode (it holds a lone "
                    "surrogate); clean it, or give token ids"
                ) from error
        raise
    for i, token_ids in zip(where, encoded, strict=True):
        ids[i] = token_ids


def _check(index: int, given: Any, params: SamplingParams, limits: RequestLimits) -> list[int]:
    """The prompt's token ids, if they can be served with these parameters."""
    token_ids = _check_ids(index, given, limits.vocab_size)
    if not token_ids:
        raise RequestError(f"prompt {index} is empty; it needs at least one token")
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"prompt {index} has {len(token_ids)} tokens, but max_model_len={limits.max_model_len} "
            f"leaves no room for an answer; shorten it{limits.way_to_more}"
        )
    longest = min(len(token_ids) + params.max_tokens, limits.max_model_len)
    num_needed = divide_up(longest - 1, limits.block_size)  # the last token needs no KV
    if num_needed > limits.num_blocks:
        raise RequestError(
            f"prompt {index} needs {num_needed} KV blocks of {limits.block_size} tokens "
            f"({len(token_ids)} in, up to {longest - len(token_ids)} out), but the cache has "
            f"{limits.num_blocks}; lower max_tokens or raise num_kvcache_blocks"
        )
    return token_ids


def _check_ids(index: int, given: Any, vocab_size: int) -> list[int]:
    try:
        if isinstance(given, _BYTES):  # integers to Python, but meant as text
            raise TypeError
        token_ids = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError:
        raise RequestError(
            f"prompt {index} is {given!r}; it must be a string or a list of token ids"
        ) from None
    if not isinstance(token_ids, list):
        raise RequestError(f"prompt {index} is {given!r}; it must be a list of token ids")
    if set(map(type, token_ids)) - {int}:
        for token_id in token_ids:
            if not _is_int(token_id):
                raise RequestError(f"prompt {index} holds {token_id!r}, which is no token id")
        token_ids = [int(token_id) for token_id in token_ids]
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"prompt {index} holds token id {bad}, outside the vocabulary [0, {vocab_size})"
        )
    return token_ids


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
