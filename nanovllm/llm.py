"""`LLM`: prompts in, completions out.

Text and token ids on this side; requests, blocks and devices are `engine/llm_engine.py`'s.
"""

import threading
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine, RunStats
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import NanoVLLMError
from nanovllm.outputs import RequestOutput
from nanovllm.progress import ProgressBar
from nanovllm.requests import Prompt, Request, check_requests
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.garbage import short_collections
from nanovllm.utils.interrupts import deferred_interrupt


class LLM:
    """A language model for offline batch inference.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            print(llm.generate("The capital of France is")[0]["text"])

    Any number may live at once. Calls from several threads take turns.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load a model.

        Args:
            model: a local folder with a Hugging Face checkpoint, or a hub id.
            options: fields of `nanovllm.config.EngineConfig`.

        Raises:
            ConfigError: an option is unknown or bad, or cannot work on this machine.
            CheckpointError: the model is missing, incomplete or unsupported.
        """
        self._engine: LLMEngine | None = None
        self._lock = threading.RLock()  # one call at a time
        self._engine = LLMEngine(EngineConfig.from_options(model, options))

    @property
    def engine(self) -> LLMEngine:
        """The engine below.

        Raises:
            NanoVLLMError: after `close()`.
        """
        if self._engine is None:
            raise NanoVLLMError("this LLM has been closed; create a new one")
        return self._engine

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer; None if it has no tokenizer files."""
        return self.engine.tokenizer

    @property
    def stats(self) -> RunStats:
        """Tokens and times of the last `generate`."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        All prompts and parameters are checked before any work starts. If the call is interrupted or
        fails, its requests are dropped and the engine is ready for the next call.

        Args:
            prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a
                list of these, mixed as you like.
            sampling_params: one for all prompts or one for each; None for the defaults.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has been run.
        """
        with self._lock, short_collections():
            engine = self.engine
            requests = check_requests(prompts, sampling_params, engine.tokenizer, engine.limits)
            # the caller's autocast is not meant for us
            with torch.autocast(engine.workers.device.type, enabled=False):
                return self._run(
                    engine, requests, ProgressBar(len(requests), use_tqdm and bool(requests))
                )

    def close(self) -> None:
        """Give the memory back and end worker processes; idempotent."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.close()

    def _run(
        self, engine: LLMEngine, requests: list[Request], bar: ProgressBar
    ) -> list[RequestOutput]:
        """Step until all requests are done; whatever ends this early drops them."""
        outputs: dict[int, RequestOutput] = {}
        try:
            engine.begin_call()
            index_of = {
                engine.add_request(request).seq_id: index for index, request in enumerate(requests)
            }
            while engine.has_work:
                for seq in engine.step():
                    index = index_of[seq.seq_id]
                    outputs[index] = self._output(index, requests[index], seq)
                    bar.advance(engine.stats)
        except BaseException:
            with deferred_interrupt():
                engine.abort_all()
            raise
        finally:
            bar.close()
        return [outputs[index] for index in range(len(requests))]

    def _output(self, index: int, request: Request, seq: Sequence) -> RequestOutput:
        token_ids = seq.output_token_ids
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert seq.finish_reason is not None, "an output of an unfinished sequence"
        return RequestOutput(
            request_id=str(index),
            prompt=request.prompt,
            prompt_token_ids=request.token_ids,
            text=text,
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            num_cached_tokens=seq.num_cached_tokens,
        )
