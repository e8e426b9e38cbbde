"""A tiny random model and batches of decode rows, for tests of the fast decode step."""

from dataclasses import dataclass

import torch

from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.layers.ops import torch_ops
from nanovllm.models.config import DecoderConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.fast_decode import FastDecode
from nanovllm.utils.context import AttentionMetadata
from nanovllm.utils.distributed import TPGroup

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 200


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
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": True,
        "qk_norm": True,
        "qkv_bias": False,
        "o_bias": False,
        "dtype": torch.bfloat16,
        "eos_token_ids": (),
    }
    return DecoderConfig(**(values | changes))


def random_model(config, tp=None, ops=None):
    generator = torch.Generator().manual_seed(0)
    ops = torch_ops() if ops is None else ops
    model = CausalLM(config, tp or TPGroup(), ops, ReferenceAttention(), DEVICE, torch.bfloat16)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        is_norm = weight.dim() == 1
        scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.data.copy_(1 + 0.3 * values if is_norm else values * scale)
    return model


class Batch:
    """Rows of the given context lengths (0: padding) and a cache that is NaN wherever unused."""

    def __init__(self, model, lengths, page=16):
        generator = torch.Generator().manual_seed(1)
        B, pages = len(lengths), -(-MAX_LEN // page)
        attention = model.model.layers[0].self_attn
        heads, D = attention.num_kv_heads_per_rank, attention.head_dim
        num_blocks = B * pages
        tables = torch.randperm(num_blocks, generator=generator).view(B, pages).int()
        shape = (2, len(model.model.layers), num_blocks, page, heads, D)
        cache = torch.full(shape, torch.nan)
        slots = []
        for table, n in zip(tables.long(), lengths, strict=True):
            rows = (table[:, None] * page + torch.arange(page)).flatten()
            known = rows[: max(n - 1, 0)]
            values = torch.randn(*shape[:2], len(known), heads, D, generator=generator)
            cache.flatten(2, 3)[:, :, known] = values
            slots.append(int(rows[n - 1]) if n else -1)
        self.cache = cache.to(DEVICE, torch.bfloat16)
        self.tables = tables.to(DEVICE)
        self.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        ids = torch.randint(0, model.config.vocab_size, (B,), generator=generator)
        self.input_ids = ids.int().to(DEVICE)
        self.real = self.seqlens_k > 0

    def plain(self, model, cache):
        """Logits by the model's own forward."""
        B = len(self.input_ids)
        ones = torch.arange(B + 1, dtype=torch.int32, device=DEVICE)
        sums = torch.cat((ones[:1], self.seqlens_k.cumsum(0).int()))
        meta = AttentionMetadata(
            self.slots, self.tables, ones, self.seqlens_k, sums, B, 1, MAX_LEN, True
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


def relative_error(out, expected):
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def check(model, lengths, page=16):
    """Plain before, fast, and plain after the weights were prepared: logits and cache agree."""
    batch = Batch(model, lengths, page)
    cache_before, cache_after = batch.cache.clone(), batch.cache.clone()
    before = batch.plain(model, cache_before)
    step = FastDecode(model, batch.cache, max_num_seqs=len(lengths) + 1, max_model_len=MAX_LEN)
    fast = batch.fast(step)
    after = batch.plain(model, cache_after)
    real = batch.real
    assert fast.isfinite().all(), "a padded row's id is looked up in the next step's embedding"
    assert relative_error(fast[real], before[real]) < 0.02
    assert relative_error(after[real], before[real]) < 0.02
    torch.testing.assert_close(batch.cache, cache_before, rtol=0.05, atol=0.05, equal_nan=True)
