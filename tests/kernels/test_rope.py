import pytest
import torch

from nanovllm.layers import rotary_embedding
from nanovllm.utils.context import LayerKV

EPS = 1e-6


def nan_cache(num_blocks, block_size, num_kv_heads, head_dim, device, dtype):
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    return LayerKV(*torch.full(shape, float("nan"), device=device, dtype=dtype))


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (7, 1, 64), (12, 4, 128)]
)
def test_qk_norm_rope_store_equals_twin(
    device, dtype, randn, tolerance, count_launches, num_heads, num_kv_heads, head_dim, qk_norm
):
    from nanovllm.kernels import rope

    kernel = count_launches(rope, "_qk_norm_rope_store_kernel")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = randn(5, width + 16, dtype=dtype)[:, :width]
    positions = torch.tensor([0, 3, 17, 63, 9], device=device)
    cos_sin = rotary_embedding.cos_sin_table(head_dim, 64, 1e4, device)
    weights = [1 + randn(head_dim, dtype=dtype) / 4 if qk_norm else None for _ in range(2)]
    slots = torch.tensor([5, -1, 40, 0, 63], dtype=torch.int32, device=device)
    caches = [nan_cache(4, 16, num_kv_heads, head_dim, device, dtype) for _ in range(2)]
    expected = rotary_embedding.qk_norm_rope_store(
        qkv.contiguous(), positions, cos_sin, *weights, EPS, caches[0], slots
    )
    q, k, v = rope.qk_norm_rope_store(qkv, positions, cos_sin, *weights, EPS, caches[1], slots)
    for result, reference in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(result, reference, **tolerance)
    assert q.data_ptr() == qkv.data_ptr()
    # Rows that no slot names stay as they were.
    torch.testing.assert_close(caches[1].k, caches[0].k, equal_nan=True, **tolerance)
    torch.testing.assert_close(caches[1].v, caches[0].v, equal_nan=True, **tolerance)
    assert kernel.launches == 1
