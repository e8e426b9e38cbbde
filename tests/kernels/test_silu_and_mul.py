import pytest
import torch

from nanovllm.layers import activation


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 100), (2, 1500)])
def test_silu_and_mul_equals_twin(
    device, dtype, randn, tolerance, count_launches, num_rows, width, interleaved
):
    from nanovllm.kernels import silu_and_mul

    kernel = count_launches(silu_and_mul, "_silu_and_mul_kernel")
    gate_up = 3 * randn(num_rows, 2 * width, dtype=dtype)
    gate_up[0, :4] = torch.tensor([80.0, -80.0, 0.0, -20.0])
    result = silu_and_mul.silu_and_mul(gate_up, interleaved)
    torch.testing.assert_close(result, activation.silu_and_mul(gate_up, interleaved), **tolerance)
    assert kernel.launches == 1


def test_orders_hold_the_same_columns(device, dtype, randn):
    from nanovllm.kernels.silu_and_mul import silu_and_mul

    gate_up = randn(2, 48, dtype=dtype)
    mixed = gate_up.view(2, 2, 24).transpose(1, 2).reshape(2, 48)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul(mixed, interleaved=True))
