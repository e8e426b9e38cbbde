"""From a model's name to its folder, and what lies in that folder beside weights and shapes.

Weights are `loader.py`'s, config.json's shapes are `models/config.py`'s.
"""

import re
import threading
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint_json import eos_token_ids_of, read_json_object
from nanovllm.utils.loader import checkpoint_files

_IMPORTING = threading.Lock()  # transformers cannot be imported first by two threads at once
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def resolve_model(model: str) -> Path:
    """The local folder of a checkpoint; a hub id is looked up in the local cache, then downloaded.

    Raises:
        CheckpointError: there is no such folder, and no such model can be had from the hub.
    """
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
        is_file = folder.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no such user
        raise CheckpointError(f"model={model!r} is no folder on this machine: {error}") from error
    if is_file:
        raise CheckpointError(f"model={model!r} is a file; give the folder that holds config.json")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise CheckpointError(
            f"model={model!r} is no folder on this machine and no hub id such as 'Qwen/Qwen3-0.6B'"
        )
    cached = cached_model(model)
    if cached is not None:
        return cached
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client raises many kinds, OSError among them
        raise CheckpointError(
            f"model={model!r} is no folder on this machine, and the hub did not give it: {error}"
        ) from error


def cached_model(hub_id: str) -> Path | None:
    """The local snapshot of a hub model whose download was finished earlier, or None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_PATTERNS, local_files_only=True))
        checkpoint_files(folder)
    except Exception:  # not cached: the client has several exception types for it
        return None
    return folder if (folder / "config.json").is_file() else None


def load_tokenizer(folder: Path) -> Any | None:
    """The checkpoint's tokenizer, or None if the folder has no tokenizer files.

    Raises:
        CheckpointError: there are tokenizer files, but transformers cannot read them.
    """
    # asked by file, because transformers 5 builds an empty tokenizer where there is none
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return read_with_transformers("AutoTokenizer", folder, f"the tokenizer in {folder}")


def read_with_transformers(auto_class: str, folder: Path, what: str) -> Any:
    """What one of transformers' auto classes reads from a checkpoint; importing them takes seconds.

    Raises:
        CheckpointError: it cannot read `what`.
    """
    with _IMPORTING:
        import transformers

        reader = getattr(transformers, auto_class)
    try:
        return reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # many kinds: validation, missing keys, unknown types
        raise CheckpointError(f"transformers cannot read {what}: {error}") from error


def find_eos_token_ids(folder: Path, config_ids: tuple[int, ...], tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence: those of config.json, generation_config.json and tokenizer."""
    ids = set(config_ids)
    file = folder / "generation_config.json"
    if file.is_file():
        ids.update(eos_token_ids_of(read_json_object(file)))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
