"""Token embedding and LM head, split over ranks by vocabulary, which is padded so that it divides.

Padding rows are zero. Choosing a token among the shards is `sampler.py`'s and the engine's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import Loaded, Shards, new_weight
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.integers import divide_up


class VocabParallelEmbedding(nn.Module):
    """This rank's rows `[vocab_start, vocab_start + V)` of the embedding matrix."""

    weight: nn.Parameter  # [V, C]
    vocab_start: int
    num_valid: int  # rows that are tokens; the rest, on the last ranks, is padding

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        weight: nn.Parameter | None = None,  # share this one instead of creating one
    ) -> None:
        super().__init__()
        self.tp = tp
        rows = divide_up(vocab_size, tp.size)
        start = tp.rank * rows
        num_valid = min(max(vocab_size - start, 0), rows)
        self.vocab_start, self.num_valid = start, num_valid

        def load(weight: Tensor, loaded: Loaded, shard_id: str | None) -> None:
            if num_valid:  # a rank may hold nothing but padding
                weight[:num_valid].copy_(loaded[start : start + num_valid])

        if weight is None:
            shards: Shards = {None: (vocab_size, hidden_size)}
            weight = new_weight((rows, hidden_size), dtype, device, load, shards)
        self.weight = weight
        self.zero_padding()

    def zero_padding(self) -> None:
        """Set the rows that stand for no token to zero."""
        self.weight.data[self.num_valid :].zero_()

    def forward(
        self,
        input_ids: Tensor,  # int [N]
    ) -> Tensor:  # [N, C]
        """Look up the tokens: each rank contributes its own rows, and zeros for the others'."""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.vocab_start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])  # bool [N]
        out = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(out.masked_fill_(elsewhere.unsqueeze(1), 0))


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection, split like the embedding, whose Parameter it shares if tied."""

    def forward(
        self,
        hidden: Tensor,  # [B, C]
    ) -> Tensor:  # [B, V]
        """Logits of this rank's vocabulary shard, padding columns (zeros) included."""
        return F.linear(hidden, self.weight)
