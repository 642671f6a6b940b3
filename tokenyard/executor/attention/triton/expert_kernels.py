"""Products of experts whose weights are packed: numbers of four bits or of a byte, with a scale for each 32 or 128.

A program takes rows of one expert and some of its outputs. It reads the weights as they are stored, a quarter or half
of their bytes in bfloat16, and makes numbers of them in registers. What they are is exact in bfloat16, and the scale of
a group is applied to the float32 sum of its products. Which expert's rows a program has is read on the device: nothing
about a launch depends on it, so that it can be captured.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenyard.executor.attention.triton.packed_kv import TRITON_KINDS

HALF = tl.constexpr(16)
"""Numbers of four bits that lie in the lower halves of bytes, before as many in the upper ones."""
OUTPUTS = 64
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a program, ..."""
FEW = 256
"""... and the most rows of a product for which they are few. The warm-up has products of more."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights of experts, each of which has a scale for each group of numbers of an output.

    numbers: uint8[experts, outputs, groups, bytes]. Of four bits, byte i of each 16 has the numbers i (the lower bits)
        and 16 + i of 32.
    scales: float32[experts, outputs, groups], or, of mxfp4, uint8 exponents plus 127.
    zeros: uint8[experts, outputs, groups], zero points of integers of four bits, else None.
    kind: of numbers of a byte, torch.int8 or torch.float8_e4m3fn; None for four bits.
    convert: whether the device converts `kind`; else fp8 is taken apart (before compute capability 8.9).
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    kind: torch.dtype | None = None
    convert: bool = True

    @property
    def group(self) -> int:
        """Numbers with one scale."""
        return self.numbers.shape[3] * (2 if self.kind is None else 1)


@triton.jit
def _number(bits):
    """float32 of a sign, two bits of an exponent and one of a mantissa (OCP Microscaling Formats 1.0)."""
    size = (bits & 7).to(tl.int32)
    normal = (((size >> 1) + 126) << 23 | (size & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(size > 1, normal, size.to(tl.float32) * 0.5)
    return tl.where(bits > 7, -value, value)


@triton.jit
def _fp8_number(bits):
    """float32 of the bits of an E4M3 that is a number."""
    size = (bits & 127).to(tl.int32)
    normal = (((size >> 3) + 120) << 23 | (size & 7) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size > 7, normal, size.to(tl.float32) * 0.001953125)
    return tl.where(bits > 127, -value, value)


@triton.jit
def _multiply_kernel(
    out,
    x,
    numbers,
    scales,
    zeros,
    bias,
    ends,
    count,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    CONVERT: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
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
    groups = inputs // GROUP
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        scale_at = weight * groups + group
        at = x + row[:, None] * inputs + group * GROUP
        if KIND is None:
            two = tl.arange(0, GROUP // 2)
            low_at = at + (two // HALF * (2 * HALF) + two % HALF)[None, :]
            low_x = tl.load(low_at, inside[:, None], other=0.0)
            high_x = tl.load(low_at + HALF, inside[:, None], other=0.0)
            byte = tl.load(numbers + scale_at[:, None] * (GROUP // 2) + two[None, :], there[:, None], other=0)
            if ZEROS:
                zero = tl.load(zeros + scale_at, there, other=0).to(tl.float32)[:, None]
                low, high = (byte & 15).to(tl.float32) - zero, (byte >> 4).to(tl.float32) - zero
            else:
                low, high = _number(byte & 15), _number(byte >> 4)
            found = tl.dot(low_x, tl.trans(low.to(x.dtype.element_ty)), input_precision="ieee")
            found = tl.dot(high_x, tl.trans(high.to(x.dtype.element_ty)), found, input_precision="ieee")
        else:
            one = tl.arange(0, GROUP)
            own_x = tl.load(at + one[None, :], inside[:, None], other=0.0)
            byte = tl.load(numbers + scale_at[:, None] * GROUP + one[None, :], there[:, None], other=0)
            whole = byte.to(KIND, bitcast=True) if CONVERT else _fp8_number(byte)
            found = tl.dot(own_x, tl.trans(whole.to(x.dtype.element_ty)), input_precision="ieee")
        scale = tl.load(scales + scale_at, there, other=0)
        if KIND is None and not ZEROS:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        total += found * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + weight, there, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), inside[:, None] & there[None, :])


def multiply_groups(
    x: torch.Tensor, weights: PackedExperts, bias: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts: [rows, outputs].

    x: [rows, inputs]; bias: [experts, outputs] or None; ends: int32[experts], where the rows of each end.
    """
    x = x.contiguous()
    experts, outputs, groups = weights.scales.shape
    rows = FEW_ROWS if len(x) <= FEW else MANY_ROWS
    out = x.new_empty(len(x), outputs)
    none = weights.scales  # a pointer that no kernel follows
    # Each expert with rows has at most one block that is not full.
    blocks = len(x) // rows + min(experts, len(x))
    _multiply_kernel[(blocks, triton.cdiv(outputs, OUTPUTS))](
        *(out, x, weights.numbers, weights.scales, none if weights.zeros is None else weights.zeros),
        *(none if bias is None else bias, ends, experts, outputs, groups * weights.group),
        HAS_BIAS=bias is not None,
        KIND=TRITON_KINDS[weights.kind],
        CONVERT=weights.convert,
        ZEROS=weights.zeros is not None,
        GROUP=weights.group,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=rows,
        OUTPUTS=OUTPUTS,
        # What takes fp8 apart for many rows does not fit the registers of four warps (Triton 3.6).
        num_warps=4 if weights.convert or rows == FEW_ROWS else 8,
    )
    return out
