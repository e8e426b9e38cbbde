import pytest
import torch

from nanovllm.layers import layernorm

EPS = 1e-6


@pytest.fixture
def kernel(count_launches):
    from nanovllm.kernels import rms_norm

    return count_launches(rms_norm, "_rms_norm_kernel")


@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (5, 96), (3, 1000), (2, 4096)])
def test_rms_norm_equals_twin(device, dtype, randn, tolerance, kernel, num_rows, width):
    from nanovllm.kernels.rms_norm import rms_norm

    x = randn(num_rows, width + 8, dtype=dtype)[:, :width]  # rows with a gap between them
    weight = 1 + randn(width, dtype=dtype) / 8
    torch.testing.assert_close(
        rms_norm(x, weight, EPS), layernorm.rms_norm(x, weight, EPS), **tolerance
    )
    assert kernel.launches == 1


@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (5, 96), (3, 1000)])
def test_add_rms_norm_equals_twin(device, dtype, randn, tolerance, kernel, num_rows, width):
    from nanovllm.kernels.rms_norm import add_rms_norm

    x = randn(num_rows, width, dtype=dtype)
    residual = 4 * randn(num_rows, width, dtype=dtype)
    weight = 1 + randn(width, dtype=dtype) / 8
    expected, expected_residual = layernorm.add_rms_norm(x, residual.clone(), weight, EPS)
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(new_residual, expected_residual, **tolerance)
    torch.testing.assert_close(normed, expected, **tolerance)
    assert new_residual.data_ptr() == residual.data_ptr()
    assert kernel.launches == 1


def test_no_rows(device, dtype, randn, kernel):
    from nanovllm.kernels.rms_norm import rms_norm

    assert rms_norm(randn(0, 64, dtype=dtype), randn(64, dtype=dtype), EPS).shape == (0, 64)
    assert kernel.launches == 0
