"""The progress bar of one call; an unusable stderr costs the bar, not the results."""

import contextlib
import sys
from typing import Any

from nanovllm.engine.llm_engine import RunStats


class ProgressBar:
    """A bar on stderr that counts prompts and tells the prefill and decode rates so far."""

    def __init__(self, num_prompts: int, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown and sys.stderr is not None:
            # here: merely creating a bar settles multiprocessing's start method
            from tqdm.auto import tqdm

            with contextlib.suppress(OSError):  # a full or closed device
                self._bar = tqdm(total=num_prompts, desc="Generating", dynamic_ncols=True)

    def advance(self, stats: RunStats) -> None:
        """One more prompt is done."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_postfix(_rates(stats), refresh=False)
                self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def _rates(stats: RunStats) -> dict[str, str]:
    prefill = stats.num_prefill_tokens / stats.prefill_s if stats.prefill_s else 0.0
    decode = stats.num_decode_tokens / stats.decode_s if stats.decode_s else 0.0
    return {"Prefill": f"{prefill:.0f}tok/s", "Decode": f"{decode:.0f}tok/s"}
