"""The small JSON files of a checkpoint: reading them, and the one field that two of them share.

What their other fields mean is for those who ask.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {str(value)[:40]!r}, not a JSON object")
    return value


def eos_token_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` as a tuple, whether the config has an int, a list or nothing.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get("eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"eos_token_id={value!r} must be a token id or a list of them")
    return tuple(ids)
