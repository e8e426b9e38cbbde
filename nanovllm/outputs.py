"""What `LLM.generate` returns: nano-vllm's dict, with the attributes of vLLM's `RequestOutput`.

Plain values only; turning tokens into text is done in `llm.py`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request, named as in vLLM."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop": end-of-sequence token; "length": max_tokens, max_model_len


class RequestOutput(dict[str, Any]):
    """The result of one prompt.

    Keys, which are also attributes: `text` (special tokens left out), `token_ids` (the output, the
    end-of-sequence token included), `finish_reason` ("stop" | "length"), `prompt_token_ids`, and
    `num_cached_tokens` (prompt tokens that the prefix cache saved at first admission). Being a
    plain dict, it goes into `json.dumps` and `pandas.DataFrame` as it is.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        text: str,
        token_ids: list[int],
        finish_reason: str,
        num_cached_tokens: int,
    ) -> None:
        super().__init__(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_token_ids=prompt_token_ids,
            num_cached_tokens=num_cached_tokens,
        )
        self.request_id = request_id  # the prompt's index in its call
        self.prompt = prompt  # None if the prompt was given as token ids
        self.finished = True

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions, one per request."""
        return [CompletionOutput(0, self["text"], self["token_ids"], self["finish_reason"])]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"RequestOutput has no attribute {name!r}") from None
