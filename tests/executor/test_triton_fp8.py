"""Triton's rounding to fp8 against torch's."""

import pytest
import torch

from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.fp8_kernels import quantize_rows  # noqa: E402
from tokenyard.executor.formats import cuda_products  # noqa: E402


@pytest.mark.parametrize(("rows", "inputs", "block"), [(1, 256, 128), (37, 384, 128), (5, 200, 200), (16, 1024, 1024)])
def test_numbers_and_scales(rows, inputs, block):
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    x[0] *= 1000
    wide = torch.cat((x, x), dim=1)[:, :inputs]
    for given in (x, wide):
        numbers, scales = quantize_rows(given, block)
        expected, expected_scales = cuda_products.quantize_rows(x, block)
        assert scales.stride() == expected_scales.stride() or 1 in scales.shape
        torch.testing.assert_close(scales, expected_scales)
        # The interpreter drops the carry of a number that is rounded up to a power of two.
        found, wanted = numbers.float(), expected.float()
        halved = (found * 2 == wanted) & (found != 0)
        assert halved.float().mean() < 0.05
        torch.testing.assert_close(found[~halved], wanted[~halved], rtol=0.13, atol=0.01)


def test_a_nan_stays_one():
    """The sampler ends a row that has one; without it the row would go on with other numbers."""
    x = torch.ones(3, 256)
    x[1, 130] = torch.nan
    numbers, scales = quantize_rows(x.to(DEVICE), 128)
    found = (numbers.float().view(-1, 2, 128) * scales[:, :, None])[:3].isnan()
    assert found.any(dim=-1).flatten().tolist() == [False, False, False, True, False, False]
