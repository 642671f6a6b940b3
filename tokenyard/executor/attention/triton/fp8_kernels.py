"""Rounding of a product's inputs to fp8, each row or each block of one with a scale of its own."""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

ROWS, FP8_MAX = 16, 448.0
"""See formats/cuda_products.py."""


@triton.jit
def _quantize_kernel(numbers, scales, x, stride, rows, padded, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row, group, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + row * stride + group * size + i, inside & (row < rows), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
    # A maximum drops a NaN, with which the row has to end.
    scale += tl.sum(tl.where(value != value, value, 0.0), 0)
    rounded = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    width = tl.num_programs(1) * size
    tl.store(numbers + row * width + group * size + i, rounded.to(numbers.dtype.element_ty), inside)
    # Columns lie one after the other.
    tl.store(scales + group * padded + row, scale)


def quantize_rows(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [rows, inputs] to fp8; see cuda_products.quantize_rows."""
    if x.stride(1) != 1:
        x = x.contiguous()
    padded, groups = -(-len(x) // ROWS) * ROWS, x.shape[1] // block
    numbers = torch.empty(padded, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    _quantize_kernel[(padded, groups)](
        *(numbers, scales, x, x.stride(0), len(x), padded, block),
        LARGEST=FP8_MAX,
        BLOCK=triton.next_power_of_2(block),
        num_warps=1 if block <= 128 else 8,
    )
    return numbers, scales.T
