"""The fused decode attention against torch: norm, rotation, cache store, softmax, merged pieces."""

import functools

import pytest
import torch
from paged_steps import assert_heads_close

triton = pytest.importorskip("triton")

from nanovllm.kernels import decode_attention as module  # noqa: E402
from nanovllm.kernels.decode_attention import (  # noqa: E402
    AttentionPlan,
    fused_decode_attention,
    plan_attention,
)
from nanovllm.layers.attention.reference import ReferenceAttention  # noqa: E402
from nanovllm.layers.rotary_embedding import cos_sin_table, qk_norm_rope_store  # noqa: E402
from nanovllm.utils.context import AttentionMetadata, LayerKV  # noqa: E402

EPS = 1e-6

CUDA_CORES = AttentionPlan("cuda_core", split=64, num_splits=5)
ONE_TILE = AttentionPlan("one_tile", split=64, num_splits=4)
ONE_TILE_LONG = AttentionPlan("one_tile", split=64, num_splits=2, is_long=True)
PIPELINED = AttentionPlan("pipelined", split=128, num_splits=2, stages=2)
PIPELINED_WHOLE = AttentionPlan("pipelined", split=1024, num_splits=1, stages=3)
PIPELINED_LONG = AttentionPlan("pipelined", split=64, num_splits=2, is_long=True, stages=2)
PIPELINED_SMALL = AttentionPlan(
    "pipelined", split=128, num_splits=2, stages=4, tile=32, num_warps=2
)
PLANS = [
    CUDA_CORES,
    ONE_TILE,
    ONE_TILE_LONG,
    PIPELINED,
    PIPELINED_WHOLE,
    PIPELINED_LONG,
    PIPELINED_SMALL,
]

LENGTHS = [1, 0, 64, 65, 197, 256]  # 0: a padded row


class Case:
    """A cache full of NaN but for the sequences' own tokens, and one new token for each."""

    def __init__(
        self, device, pdl, lengths=LENGTHS, page=16, group=2, num_kv_heads=2, D=64, qk_norm=True
    ):
        self.device, self.pdl = device, pdl
        self.generator = torch.Generator().manual_seed(0)
        self.B, self.group, self.Hkv, self.D = len(lengths), group, num_kv_heads, D
        pages = -(-max(lengths) // page)
        num_blocks = self.B * pages + 1
        order = torch.randperm(num_blocks - 1, generator=self.generator) + 1
        tables = order.view(self.B, pages).int()
        cache = torch.full((2, num_blocks, page, num_kv_heads, D), torch.nan)
        slots = []
        for table, n in zip(tables.long(), lengths, strict=True):
            rows = (table[:, None] * page + torch.arange(page)).flatten()
            cache.flatten(1, 2)[:, rows[: max(n - 1, 0)]] = self.random(
                2, max(n - 1, 0), num_kv_heads, D
            )
            slots.append(int(rows[n - 1]) if n else -1)
        self.tables = tables.to(device)
        self.cache = cache.to(device, torch.bfloat16)
        self.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        self.cos_sin = cos_sin_table(D, 4096, 1e6, device)
        self.qkv = self.random(self.B, (group + 2) * num_kv_heads * D).to(device, torch.bfloat16)
        norms = (1 + 0.2 * self.random(2, D)).to(device, torch.bfloat16)
        self.q_weight, self.k_weight = norms if qk_norm else (None, None)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def expected(self):
        """Output in float32 arithmetic and the cache afterwards, by the layers' torch twins."""
        cache = self.cache.float()
        layer_kv = LayerKV(cache[0], cache[1])
        weights = [w if w is None else w.float() for w in (self.q_weight, self.k_weight)]
        positions = (self.seqlens_k - 1).clamp(min=0)
        q, k, v = qk_norm_rope_store(
            self.qkv.float(),
            positions,
            self.cos_sin,
            *weights,
            EPS,
            layer_kv,
            self.slots,
        )
        ones = torch.arange(self.B + 1, dtype=torch.int32, device=self.device)
        sums = torch.cat((ones[:1], self.seqlens_k.cumsum(0).int()))
        longest = int(self.seqlens_k.max())
        meta = AttentionMetadata(
            self.slots, self.tables, ones, self.seqlens_k, sums, self.B, 1, longest, True
        )
        return ReferenceAttention().attend(q, k, v, layer_kv, meta).flatten(1), cache

    def run(self, plan, rows=slice(None)):
        qkv = self.qkv[rows].contiguous()
        B = qkv.shape[0]
        out = torch.full((B, self.group * self.Hkv * self.D), torch.nan, device=self.device)
        out = out.to(torch.bfloat16)
        pieces = B * self.Hkv * self.group * plan.num_splits
        partials = torch.full((pieces * (self.D + 1),), torch.nan, device=self.device)
        counts = torch.zeros(B * self.Hkv, dtype=torch.int32, device=self.device)
        fused_decode_attention(
            qkv,
            self.cache[0],
            self.cache[1],
            self.tables[rows],
            self.seqlens_k[rows],
            self.slots[rows],
            self.cos_sin,
            self.q_weight,
            self.k_weight,
            out,
            partials,
            counts,
            plan,
            eps=EPS,
            pdl=self.pdl,
        )
        assert not counts.any(), "the next layer would never see its last piece arrive"
        return out

    def check(self, plan):
        expected, cache = self.expected()
        out = self.run(plan)
        real = self.seqlens_k > 0
        heads = (-1, self.group * self.Hkv, self.D)
        assert_heads_close(out[real].view(heads), expected[real].view(heads))
        assert not out[~real].any(), "padded rows come back as zeros"
        torch.testing.assert_close(self.cache.float(), cache, rtol=0.02, atol=0.02, equal_nan=True)


@pytest.fixture
def make_case(device, pdl):
    """make_case(lengths, **shape) -> Case"""
    return functools.partial(Case, device, pdl)


@pytest.fixture
def kernels(count_launches):
    """How often each kernel was launched, by the name that plans give it."""
    names = ("cuda_core", "one_tile", "pipelined")
    return {name: count_launches(module, f"{name}_kernel") for name in names}


@pytest.mark.parametrize("plan", PLANS)
def test_plans(plan, make_case, kernels):
    make_case().check(plan)
    launches = {name: kernel.launches for name, kernel in kernels.items()}
    assert launches == {name: name == plan.kernel for name in kernels}


@pytest.mark.parametrize("plan", [CUDA_CORES, PIPELINED])
def test_pages_larger_than_a_piece(plan, make_case):
    """Pages are looked up once, not for every token or tile."""
    make_case([70, 197], page=256).check(plan)


@pytest.mark.parametrize("plan", [CUDA_CORES, ONE_TILE, PIPELINED])
@pytest.mark.parametrize(("group", "D"), [(1, 64), (5, 128), (16, 64)])
def test_groups_and_head_dims(plan, group, D, make_case):
    make_case([130], group=group, num_kv_heads=1, D=D).check(plan)


@pytest.mark.parametrize("plan", [CUDA_CORES, ONE_TILE, PIPELINED])
def test_without_qk_norm(plan, make_case):
    make_case([70], qk_norm=False).check(plan)


@pytest.mark.parametrize("plan", [ONE_TILE_LONG, PIPELINED])
def test_a_row_does_not_depend_on_its_neighbours(plan, make_case):
    together = make_case().run(plan)
    alone = torch.cat([make_case().run(plan, slice(i, i + 1)) for i in (2, 4)])
    assert torch.equal(together[[2, 4]], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda")], ids=str)
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 20, 64, 130])
def test_long_contexts_as_planned(batch_size, page, make_case):
    """At the shape of real models, with the plan that the batch size gets."""
    lengths = [2500, 2049, 1, 1024, 1537, 0, 255, 256, 257] + [300] * batch_size
    case = make_case(lengths[:batch_size], page, group=2, num_kv_heads=8, D=128)
    case.check(plan_attention(batch_size, 8, 2, 2500))


def test_plan_covers_every_length():
    """Either split times num_splits reaches max_len, or pieces grow with their row."""
    for batch_size in (1, 2, 8, 16, 64, 128, 512):
        for max_len in (16, 512, 4096, 40960):
            plan = plan_attention(batch_size, 8, 2, max_len)
            assert plan.is_long or plan.split * plan.num_splits >= max_len
            assert plan.num_splits * batch_size * 8 <= 16384
    assert not plan_attention(1, 8, 2, 4096).is_long
    assert plan_attention(1, 8, 2, 40960).is_long
