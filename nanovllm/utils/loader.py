"""Fills a model's parameters from safetensors files, or with seeded random numbers.

Each parameter says which checkpoint tensors it is made of (`shards`) and takes its rank's slice of
each (`weight_loader`), see `layers/linear.py`; here are the files, the names and the proof that
nothing is missing.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint_json import read_json_object
from nanovllm.utils.distributed import TPGroup

INDEX_NAME = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors names them
_MAX_NAMES = 8  # in one message


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor goes."""

    parameter: Any  # nn.Parameter with weight_loader
    shard_id: str | None
    shape: tuple[int, ...]  # the checkpoint tensor's


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Stream the folder's *.safetensors into `model`; each rank reads only its slices.

    Tensors that nothing uses are named in a warning, except those that are known to be derived or
    tied.

    Raises:
        CheckpointError: no files, a missing or damaged file, a wrong shape, or a parameter that
        nothing filled.
    """
    folder = Path(folder)
    targets = _targets(model)
    missing = dict(targets)
    unused: list[str] = []
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    target = targets.get(name)
                    if target is None:
                        unused.append(name)
                        continue
                    _fill(target, tensors.get_slice(name), name, file)
                    missing.pop(name, None)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is damaged or incomplete ({error}); download it again"
            ) from error
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(targets)} tensors: {_some(missing)}; "
            "the checkpoint is incomplete or its config.json belongs to another model"
        )
    unused = [name for name in unused if not _is_expected_extra(name)]
    if unused:
        warnings.warn(f"{folder}: unused tensors: {_some(unused)}", stacklevel=2)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, from its index if it has one.

    Raises:
        CheckpointError: there are none, or the index names a file that does not exist.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(read_json_object(index)["weight_map"].values()))
            paths = [folder / name for name in names]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a readable index: {error!r}") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the {len(names)} files in {INDEX_NAME}: "
                f"{_some(absent)}; finish the download"
            )
        return paths
    # Mistral repositories carry the same weights twice; consolidated* has other names.
    files = [
        f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("consolidated")
    ]
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors files; finish the download, or set load_format='dummy' "
            "for random weights"
        )
    return files


def checkpoint_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the checkpoint's first floating-point tensor, or None without readable files."""
    try:
        with safe_open(checkpoint_files(folder)[0], framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_slice(name)[:0]
                if tensor.is_floating_point():
                    return tensor.dtype
    except (CheckpointError, SafetensorError, OSError):
        return None  # loading will say what is wrong; dummy weights need no files
    return None


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fill `model` with random weights that keep activations finite and logits of order one.

    Matrices are normal with standard deviation fan_in ** -0.5, norms one, biases zero. The numbers
    depend on `seed`, on the rank and on the device; torch's global generators are left alone.
    """
    tp = cast(TPGroup, model.tp)
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed + tp.rank)
        if parameter.dim() == 2:
            # The embedding too: tied or not, the head sees inputs of unit scale.
            (full_shape, *_) = parameter.shards.values()  # type: ignore[attr-defined]
            parameter.data.normal_(0.0, full_shape[1] ** -0.5, generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    for module in model.modules():
        zero_padding = getattr(module, "zero_padding", None)
        if callable(zero_padding):
            zero_padding()


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Every checkpoint tensor that `model` needs, by name; a tied head counts as the embedding."""
    targets = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        parent = owner.rpartition(".")[0]
        for shard_id, shape in parameter.shards.items():  # type: ignore[attr-defined]
            source = name if shard_id is None else f"{parent}.{shard_id}_proj.{leaf}"
            targets[source] = _Target(parameter, shard_id, shape)
    return targets


def _fill(target: _Target, tensor: Any, name: str, file: Path) -> None:
    if tensor.get_dtype() not in _DTYPES:
        raise CheckpointError(
            f"{file}: {name} is stored as {tensor.get_dtype()}, which is not supported (quantised "
            f"checkpoints are not); supported: {', '.join(_DTYPES)}"
        )
    shape = tuple(tensor.get_shape())
    if shape != target.shape:
        raise CheckpointError(
            f"{file}: {name} has shape {list(shape)}, but config.json asks for {list(target.shape)}"
        )
    target.parameter.weight_loader(target.parameter.data, tensor, target.shard_id)


def _is_expected_extra(name: str) -> bool:
    """Derived tables of old checkpoints, and a stored copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more
