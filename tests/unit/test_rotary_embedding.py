"""q/k norm, rotation and cache store in torch, against transformers' own functions."""

import pytest
import torch

from nanovllm.layers.rotary_embedding import cos_sin_table, qk_norm_rope_store
from nanovllm.utils.context import LayerKV

N, HQ, HKV, D, EPS = 7, 4, 2, 32, 1e-6
POSITIONS = torch.tensor([0, 1, 5, 63, 64, 400, 1023], dtype=torch.int32)


def run(qkv, slots, q_weight=None, k_weight=None, cache=None):
    """Returns (q, k, v, cache [2, blocks, block_size, HKV, D])."""
    if cache is None:
        cache = torch.full((2, 4, 3, HKV, D), float("nan"), dtype=qkv.dtype)
    table = cos_sin_table(D, 1024, 1e6, torch.device("cpu"))
    layer_kv = LayerKV(cache[0], cache[1])
    slots = torch.tensor(slots, dtype=torch.int32)
    q, k, v = qk_norm_rope_store(
        qkv.clone(), POSITIONS, table, q_weight, k_weight, EPS, layer_kv, slots
    )
    return q, k, v, cache


def expected(qkv, q_weight, k_weight, theta=1e6):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k, v = qkv.view(N, -1, D).split((HQ, HKV, HKV), dim=1)
    if q_weight is not None:
        norm = Qwen3RMSNorm(D, eps=EPS)
        norm.weight.data = q_weight
        q = norm(q)
        norm.weight.data = k_weight
        k = norm(k)
    inverse = 1.0 / theta ** (torch.arange(0, D, 2).float() / D)
    angles = (POSITIONS[:, None].float() * inverse).repeat(1, 2)
    q, k = apply_rotary_pos_emb(q[None], k[None], angles.cos()[None], angles.sin()[None], 2)
    return q[0], k[0], v


@pytest.fixture
def qkv():
    return torch.randn(N, (HQ + 2 * HKV) * D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("with_norm", [True, False])
def test_matches_transformers(with_norm, qkv):
    weights = (torch.rand(D) + 0.5, torch.rand(D) + 0.5) if with_norm else (None, None)
    q, k, v, cache = run(qkv, range(N), *weights)
    for ours, theirs in zip((q, k, v), expected(qkv, *weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache[0].flatten(0, 1)[:N], k)
    assert torch.equal(cache[1].flatten(0, 1)[:N], v)


def test_keys_go_to_their_slots_and_nowhere_else(qkv):
    slots = [11, -1, 0, 5, -1, 3, 6]
    _, k, v, cache = run(qkv, slots)
    for part, stored in ((k, cache[0].flatten(0, 1)), (v, cache[1].flatten(0, 1))):
        for row, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(stored[slot], part[row])
        untouched = sorted(set(range(12)) - set(slots))
        assert stored[untouched].isnan().all()


def test_a_step_of_padding_stores_nothing(qkv):
    cache = run(qkv, [-1] * N)[3]
    assert cache.isnan().all()


def test_bfloat16_is_rotated_in_float32(qkv):
    weights = (torch.ones(D, dtype=torch.bfloat16), torch.ones(D, dtype=torch.bfloat16))
    narrow = qkv.bfloat16()
    q, k, _, _ = run(narrow, range(N), *weights)
    exact = expected(narrow.float(), *(w.float() for w in weights))
    assert q.dtype == torch.bfloat16
    torch.testing.assert_close(q.float(), exact[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(k.float(), exact[1], rtol=0.02, atol=0.02)


def test_scores_depend_on_the_distance_only():
    table = cos_sin_table(D, 512, 1e4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(D, generator=generator)
    other = torch.randn(D, generator=generator)
    scores = []
    for start in (0, 17, 300):
        qkv = torch.cat((head, other, other)).repeat(2, 1)
        cache = torch.zeros(2, 1, 2, 1, D)
        q, k, _ = qk_norm_rope_store(
            qkv,
            torch.tensor([start + 9, start], dtype=torch.int32),
            table,
            None,
            None,
            EPS,
            LayerKV(cache[0], cache[1]),
            torch.tensor([0, 1], dtype=torch.int32),
        )
        scores.append(q[0, 0] @ k[1, 0])
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-4, atol=1e-4)
