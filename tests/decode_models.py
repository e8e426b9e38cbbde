"""A tiny random model and batches of decode rows, for tests of the fast decode step."""

import os
from dataclasses import dataclass

import torch

from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.layers.ops import torch_ops
from nanovllm.models.config import DecoderConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.fast_decode import FastDecode
from nanovllm.utils.context import AttentionMetadata
from nanovllm.utils.distributed import TPGroup

# Longest context: compiled, one that attention splits at every batch size.
MAX_LEN = 200 if os.environ.get("TRITON_INTERPRET") == "1" else 2500


@dataclass(frozen=True, slots=True)
class LonelyRank(TPGroup):
    """A rank whose peers contribute nothing to any sum."""

    def all_reduce(self, x):
        return x


def config(**changes):
    values = {
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 60,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 2500,
        "tie_word_embeddings": True,
        "qk_norm": True,
        "qkv_bias": False,
        "o_bias": False,
        "dtype": torch.bfloat16,
        "eos_token_ids": (),
    }
    return DecoderConfig(**(values | changes))


def random_model(config, device, tp=None, ops=None):
    generator = torch.Generator().manual_seed(0)
    ops = torch_ops() if ops is None else ops
    device = torch.device(device)
    model = CausalLM(config, tp or TPGroup(), ops, ReferenceAttention(), device, torch.bfloat16)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        is_norm = weight.dim() == 1
        scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.data.copy_(1 + 0.3 * values if is_norm else values * scale)
    return model


class Batch:
    """Rows of the given context lengths (0: padding) and a cache that is NaN wherever unused.

    Block tables are wide enough for `max_len` tokens; their unused entries name a block of NaN.
    """

    def __init__(self, model, lengths, page=16, max_len=MAX_LEN):
        self.device = device = model.lm_head.weight.device
        self.max_len = max_len
        generator = torch.Generator().manual_seed(1)
        attention = model.model.layers[0].self_attn
        heads, D = attention.num_kv_heads_per_rank, model.config.head_dim
        num_pages = [-(-n // page) for n in lengths]
        num_blocks = sum(num_pages) + 1
        blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).split(num_pages)
        tables = torch.zeros(len(lengths), -(-max_len // page), dtype=torch.int32)
        shape = (2, len(model.model.layers), num_blocks, page, heads, D)
        self.cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        slots = []
        for i, n in enumerate(lengths):
            tables[i, : num_pages[i]] = blocks[i]
            rows = (blocks[i][:, None] * page + torch.arange(page)).flatten()
            known = rows[: max(n - 1, 0)].to(device)
            values = torch.randn(*shape[:2], len(known), heads, D, generator=generator)
            self.cache.flatten(2, 3)[:, :, known] = values.to(device, torch.bfloat16)
            slots.append(int(rows[n - 1]) if n else -1)
        self.tables = tables.to(device)
        self.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        ids = torch.randint(0, model.config.vocab_size, (len(lengths),), generator=generator)
        self.input_ids = ids.int().to(device)
        self.real = self.seqlens_k > 0

    def plain(self, model, cache):
        """Logits by the model's own forward."""
        B = len(self.input_ids)
        ones = torch.arange(B + 1, dtype=torch.int32, device=self.device)
        sums = torch.cat((ones[:1], self.seqlens_k.cumsum(0).int()))
        longest = int(self.seqlens_k.max())
        meta = AttentionMetadata(
            self.slots, self.tables, ones, self.seqlens_k, sums, B, 1, longest, True
        )
        positions = (self.seqlens_k - 1).clamp(min=0)
        return model.compute_logits(model(self.input_ids, positions, cache, meta))

    def fast(self, step):
        # What is not written must not matter; arrivals are counted from zero, forever.
        scratch = vars(step._scratch)
        for name, buffer in scratch.items():
            if isinstance(buffer, torch.Tensor) and name != "counts":
                buffer.fill_(torch.nan)
        logits = step.forward(self.input_ids, self.seqlens_k, self.tables, self.slots)
        assert not step._scratch.counts.any()
        return logits.clone()


def row_errors(out, expected):
    """Norm of the difference relative to that of what is expected, by row."""
    difference = (out.float() - expected.float()).norm(dim=-1)
    return difference / expected.float().norm(dim=-1).clamp_min(1e-6)  # a row may be all zeros


def check(model, lengths, page=16, max_len=MAX_LEN):
    """Plain before, fast, and plain after the weights were prepared: logits and cache agree."""
    batch = Batch(model, lengths, page, max_len)
    cache_before, cache_after = batch.cache.clone(), batch.cache.clone()
    before = batch.plain(model, cache_before)
    step = FastDecode(model, batch.cache, max_num_seqs=len(lengths) + 1, max_model_len=max_len)
    fast = batch.fast(step)
    after = batch.plain(model, cache_after)
    real = batch.real
    assert fast.isfinite().all(), "a padded row's id is looked up in the next step's embedding"
    assert row_errors(fast[real], before[real]).max() < 0.02
    assert row_errors(after[real], before[real]).max() < 0.02
    torch.testing.assert_close(batch.cache, cache_before, rtol=0.05, atol=0.05, equal_nan=True)
