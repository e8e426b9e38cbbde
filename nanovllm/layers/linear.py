"""Linear layers split over tensor-parallel ranks, and how a checkpoint's tensors get into them.

Column parallel splits the outputs, row parallel the inputs. Each parameter carries a
`weight_loader` that reads only this rank's slice, and `shards`: the checkpoint tensors it is made
of.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.errors import ConfigError
from nanovllm.utils.distributed import TPGroup

Loaded = Any  # a Tensor, or a safetensors slice, which reads from the file only what is indexed
WeightLoader = Callable[[Tensor, Loaded, str | None], None]  # (parameter, tensor, shard id)
Shards = Mapping[str | None, tuple[int, ...]]  # full checkpoint shape by shard id


def new_weight(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    weight_loader: WeightLoader,
    shards: Shards,
) -> nn.Parameter:
    """Create an uninitialised, frozen parameter that the checkpoint loader knows how to fill.

    Args:
        shards: one entry per checkpoint tensor. The id None means a tensor of the parameter's own
            name; any other id is a projection's name without its "_proj", in a merged parameter.
    """
    weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    weight.weight_loader = weight_loader  # type: ignore[attr-defined]
    weight.shards = shards  # type: ignore[attr-defined]
    return weight


def load_replicated(weight: Tensor, loaded: Loaded, shard_id: str | None) -> None:
    """Load a parameter that every rank holds in full."""
    weight.copy_(loaded[:])


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    """Key/value heads on each rank: an equal share, or one that several ranks hold a copy of.

    Raises:
        ConfigError: neither count divides the other.
    """
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} and num_key_value_heads={num_kv_heads} do not divide "
            "one another; choose a size that divides, or is a multiple of, the key/value heads"
        )
    return max(1, num_kv_heads // tp_size)


def share_per_rank(total: int, tp_size: int, what: str) -> int:
    """`total / tp_size`.

    Raises:
        ConfigError: it does not divide.
    """
    if total % tp_size:
        raise ConfigError(
            f"{what}={total} does not divide by tensor_parallel_size={tp_size}; "
            "choose a size that divides it"
        )
    return total // tp_size


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel projections of one input as one matmul: this rank's rows of each.

    Args:
        output_sizes: full output size by shard id, in the order of the merged rows.
    """

    weight: nn.Parameter  # [this rank's rows of every shard, C]
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_sizes: Mapping[str | None, int],
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        rows: dict[str | None, tuple[int, int, int]] = {}  # first row here, first row there, count
        start = 0
        for shard_id, total in output_sizes.items():
            first, count = self._share(shard_id, total, tp)
            rows[shard_id] = (start, first, count)
            start += count

        # Closes over the rows, not over self: a cycle would keep GPU memory until the next GC.
        def load(weight: Tensor, loaded: Loaded, shard_id: str | None) -> None:
            start, first, count = rows[shard_id]
            weight[start : start + count].copy_(loaded[first : first + count])

        shapes = {shard_id: (total, input_size) for shard_id, total in output_sizes.items()}
        self.weight = new_weight((start, input_size), dtype, device, load, shapes)
        self.bias = None
        if bias:
            bias_shapes = {shard_id: (total,) for shard_id, total in output_sizes.items()}
            self.bias = new_weight((start,), dtype, device, load, bias_shapes)

    def _share(self, shard_id: str | None, total: int, tp: TPGroup) -> tuple[int, int]:
        """First row and number of rows of a checkpoint tensor that belong to this rank."""
        count = share_per_rank(total, tp.size, f"output size of {shard_id or 'a linear layer'}")
        return tp.rank * count, count

    def forward(
        self,
        x: Tensor,  # [N, C]
    ) -> Tensor:  # [N, this rank's rows of every shard]
        """Project; the result stays split over ranks."""
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer whose outputs are split over ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(input_size, {None: output_size}, bias, tp, device, dtype)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections, split by heads; a key/value head may be on several ranks.

    Rows are [Hq + 2 * Hkv, D]: queries, then keys, then values.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        share_per_rank(num_heads, tp.size, "num_attention_heads")
        self._kv_rows = kv_heads_per_rank(num_kv_heads, tp.size) * head_dim
        self._ranks_per_kv_head = max(1, tp.size // num_kv_heads)
        sizes: dict[str | None, int] = {
            "q": num_heads * head_dim,
            "k": num_kv_heads * head_dim,
            "v": num_kv_heads * head_dim,
        }
        super().__init__(hidden_size, sizes, bias, tp, device, dtype)

    def _share(self, shard_id: str | None, total: int, tp: TPGroup) -> tuple[int, int]:
        if shard_id == "q":
            return super()._share(shard_id, total, tp)
        return tp.rank // self._ranks_per_kv_head * self._kv_rows, self._kv_rows


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over ranks; partial outputs are summed over ranks."""

    weight: nn.Parameter  # [outputs, this rank's inputs]
    bias: nn.Parameter | None  # [outputs] on every rank, used on rank 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        count = share_per_rank(input_size, tp.size, "input size of a row-parallel layer")
        first = tp.rank * count

        def load(weight: Tensor, loaded: Loaded, shard_id: str | None) -> None:
            weight.copy_(loaded[:, first : first + count])

        shapes: Shards = {None: (output_size, input_size)}
        self.weight = new_weight((output_size, count), dtype, device, load, shapes)
        self.bias = None
        if bias:
            bias_shapes: Shards = {None: (output_size,)}
            self.bias = new_weight((output_size,), dtype, device, load_replicated, bias_shapes)

    def forward(
        self,
        x: Tensor,  # [N, this rank's inputs]
    ) -> Tensor:  # [N, outputs]
        """Project and sum over ranks; only rank 0 adds the bias, so that the sum has it once."""
        out = F.linear(x, self.weight, self.bias if self.tp.rank == 0 else None)
        return self.tp.all_reduce(out) if self.tp.size > 1 else out
