"""Kernels of LoRA: the change of each token by the adapter of its slot, in two launches for a product of the layers.

A token's slot is read on the device, and tokens without an adapter end at once, so that a captured step serves any
mix of adapters (Chen et al. 2023, Punica, arXiv 2310.18547, whose BGMV this is). Each token reads the matrices of its
adapter, which suits steps of few tokens; a prompt's tokens are better multiplied by torch.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

INPUT_SPLITS = 8
"""Parts of the inputs whose products with A are computed at once, and then added in this order."""
RANK_BLOCK, INPUT_BLOCK, OUTPUT_BLOCK = 16, 128, 128


@triton.jit
def _shrink_kernel(partial, x, a, slots, x_stride, inputs, share, rows, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr):
    """partial[token, split, row] = A[slot, row] times a split of x[token]."""
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots + token)
    if slot > 0:
        row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        line = a + ((slot - 1) * rows + row)[:, None] * inputs
        end = tl.minimum((split + 1) * share, inputs)
        total = tl.zeros([BLOCK_R], tl.float32)
        for begin in range(split * share, end, BLOCK_I):
            i = begin + tl.arange(0, BLOCK_I)
            part = tl.load(x + token * x_stride + i, i < end, other=0.0).to(tl.float32)
            weight = tl.load(line + i[None, :], (row < rows)[:, None] & (i < end)[None, :], other=0.0)
            total += tl.sum(weight.to(tl.float32) * part[None, :], 1)
        tl.store(partial + (token * tl.num_programs(2) + split) * rows + row, total, row < rows)


@triton.jit
def _expand_kernel(
    out,
    partial,
    b,
    slots,
    tiles,
    out_stride,
    rank,
    rows,
    outputs,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """out[token, column] += what the token's row of its projection found, times B[slot, :, column]."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot > 0:
        part, first, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        r, column = tl.arange(0, BLOCK_R), first + tl.arange(0, BLOCK_O)
        inner = tl.zeros([BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            line = partial + (token * SPLITS + split) * rows + part * rank
            inner += tl.load(line + r, r < rank, other=0.0)
        there = (r < rank)[:, None] & (column < end)[None, :]
        weight = tl.load(b + ((slot - 1) * rank + r)[:, None] * outputs + column[None, :], there, other=0.0)
        change = tl.sum(weight.to(tl.float32) * inner[:, None], 0)
        place = out + token * out_stride + column
        before = tl.load(place, column < end, other=0.0).to(tl.float32)
        tl.store(place, (before + change).to(out.dtype.element_ty), column < end)


def output_tiles(outputs: Sequence[int], device: torch.device) -> torch.Tensor:
    """Cut the columns of projections, one after the other, into tiles: int32[tiles, (projection, begin, end)]."""
    tiles, begin = [], 0
    for part, size in enumerate(outputs):
        end = begin + size
        tiles += [(part, first, end) for first in range(begin, end, OUTPUT_BLOCK)]
        begin = end
    return torch.tensor(tiles, dtype=torch.int32).to(device)


def add_lora(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, tiles: torch.Tensor
) -> None:
    """Add to out [T, outputs] the change of x [T, inputs] by the adapters of its tokens, computed in float32.

    a: [slots, projections, rank, inputs]; b: [slots, rank, outputs], the projections' columns one after the other.
    slots: int64[T], from 1 on, 0 for no adapter. tiles: see output_tiles.
    """
    if not len(x):
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    _, parts, rank, inputs = a.shape
    rows = parts * rank
    share = triton.cdiv(triton.cdiv(inputs, INPUT_SPLITS), INPUT_BLOCK) * INPUT_BLOCK
    # A part beyond the inputs finds nothing and says so.
    partial = torch.empty(len(x), INPUT_SPLITS, rows, dtype=torch.float32, device=x.device)
    _shrink_kernel[len(x), triton.cdiv(rows, RANK_BLOCK), INPUT_SPLITS](
        *(partial, x, a, slots, x.stride(0), inputs, share, rows), BLOCK_R=RANK_BLOCK, BLOCK_I=INPUT_BLOCK
    )
    _expand_kernel[len(x), len(tiles)](
        *(out, partial, b, slots, tiles, out.stride(0), rank, rows, b.shape[2]),
        SPLITS=INPUT_SPLITS,
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_O=OUTPUT_BLOCK,
    )
