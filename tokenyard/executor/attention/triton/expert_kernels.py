"""Products of experts whose weights are mxfp4: numbers of four bits with a scale for each 32 (gpt-oss).

A program takes rows of one expert and some of its outputs. It reads the weights as they are stored, a quarter of their
bytes in bfloat16, and makes numbers of them in registers. What four bits mean is exact in bfloat16, and the scale of 32
numbers is applied to the float32 sum of their products. Which expert's rows a program has is read on the device:
nothing about a launch depends on it, so that it can be captured.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""Numbers with one scale."""
OUTPUTS = 64
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a program, ..."""
FEW = 256
"""... and the most rows of a product for which they are few. The warm-up has products of more."""


@triton.jit
def _number(bits):
    """float32 of a sign, two bits of an exponent and one of a mantissa (OCP Microscaling Formats 1.0)."""
    size = (bits & 7).to(tl.int32)
    normal = (((size >> 1) + 126) << 23 | (size & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(size > 1, normal, size.to(tl.float32) * 0.5)
    return tl.where(bits > 7, -value, value)


@triton.jit
def _multiply_kernel(
    out,
    x,
    numbers,
    scales,
    bias,
    ends,
    count,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    block, each = tl.program_id(0), tl.arange(0, EXPERTS)
    end = tl.load(ends + each, each < count, other=0)
    begin = tl.load(ends + each - 1, (each > 0) & (each < count), other=0)
    blocks = (end - begin + ROWS - 1) // ROWS
    after = tl.cumsum(blocks, 0)
    expert = tl.sum((after <= block).to(tl.int32), 0)
    if expert >= count:
        return
    own = each == expert
    row = tl.sum(tl.where(own, begin + (block - after + blocks) * ROWS, 0), 0) + tl.arange(0, ROWS)
    inside = row < tl.sum(tl.where(own, end, 0), 0)
    row = row.to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < outputs
    weight = expert.to(tl.int64) * outputs + output
    half = tl.arange(0, GROUP // 2)
    groups = inputs // GROUP
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        at = x + row[:, None] * inputs + group * GROUP + half[None, :]
        low_x = tl.load(at, inside[:, None], other=0.0)
        high_x = tl.load(at + GROUP // 2, inside[:, None], other=0.0)
        bytes_at = numbers + (weight[:, None] * groups + group) * (GROUP // 2) + half[None, :]
        byte = tl.load(bytes_at, there[:, None], other=0)
        low, high = _number(byte & 15).to(x.dtype.element_ty), _number(byte >> 4).to(x.dtype.element_ty)
        found = tl.dot(low_x, tl.trans(low), input_precision="ieee")
        found = tl.dot(high_x, tl.trans(high), found, input_precision="ieee")
        exponent = tl.load(scales + weight * groups + group, there, other=0).to(tl.int32)
        total += found * (exponent << 23).to(tl.float32, bitcast=True)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + weight, there, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), inside[:, None] & there[None, :])


def multiply_groups(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts: [rows, outputs].

    x: [rows, inputs]; numbers: uint8[experts, outputs, inputs / 32, 16], byte i of a group has its numbers i (the lower
    four bits) and 16 + i; scales: uint8[experts, outputs, inputs / 32], exponents plus 127; bias: [experts, outputs] or
    None; ends: int32[experts], where the rows of each end.
    """
    x = x.contiguous()
    experts, outputs, groups = scales.shape
    rows = FEW_ROWS if len(x) <= FEW else MANY_ROWS
    out = x.new_empty(len(x), outputs)
    # Each expert with rows has at most one block that is not full.
    blocks = len(x) // rows + min(experts, len(x))
    _multiply_kernel[(blocks, triton.cdiv(outputs, OUTPUTS))](
        *(out, x, numbers, scales, scales if bias is None else bias, ends, experts, outputs, groups * GROUP.value),
        HAS_BIAS=bias is not None,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=rows,
        OUTPUTS=OUTPUTS,
    )
    return out
