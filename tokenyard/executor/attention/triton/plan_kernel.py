"""The kernel before a captured step: the page writes of a plan, and the inputs of its rows; see plan_inputs.py."""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.future_map import FutureMap
from tokenyard.executor.plan_inputs import UploadedPlan

LANES = 256


@triton.jit(do_not_specialize=("rows", "writes", "size"))
def _prepare_kernel(
    columns,
    block,
    table,
    windows,
    last_tokens,
    rows,
    writes,
    size,
    column_stride,
    table_stride,
    padding_row,
    PAGE: tl.constexpr,
    WINDOWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program, as the slots of a row may be on a page that the plan writes."""
    lane, pages = tl.arange(0, LANES), block + 3 * rows
    for begin in range(0, writes, LANES):
        i = begin + lane
        there = i < writes
        place = tl.load(pages + i, there, other=0) * table_stride + tl.load(pages + writes + i, there, other=0)
        tl.store(table + place, tl.load(pages + 2 * writes + i, there, other=0).to(tl.int32), there)
        if WINDOWS:
            tl.store(windows + place, tl.load(pages + 3 * writes + i, there, other=0).to(tl.int32), there)
    tl.debug_barrier()
    for begin in range(0, size, LANES):
        i = begin + lane
        real, inside = i < rows, i < size
        token, position = tl.load(block + i, real, other=0), tl.load(block + rows + i, real, other=0)
        row = tl.load(block + 2 * rows + i, real, other=0)
        # A token below 0 is the last one that the row has sampled.
        token = tl.where(token < 0, tl.load(last_tokens + row, real, other=0), token)
        page = tl.load(table + row * table_stride + position // PAGE, real, other=0).to(tl.int64)
        slot = tl.where(real, page * PAGE + position % PAGE, 0)
        tl.store(columns + i, token, inside)
        tl.store(columns + column_stride + i, position, inside)
        tl.store(columns + 2 * column_stride + i, slot, inside)
        tl.store(columns + 3 * column_stride + i, row, inside)
        tl.store(columns + 4 * column_stride + i, tl.where(real, row, padding_row), inside)


def prepare_by_triton(plan: UploadedPlan, columns: torch.Tensor, pages: PageTable, future: FutureMap) -> None:
    """A Prepare in one launch."""
    windows = pages.windows
    _prepare_kernel[1,](
        *(columns, plan.block, pages.tensor, pages.tensor if windows is None else windows.tensor, future.last_tokens),
        *(plan.rows, plan.writes, columns.shape[1]),
        *(columns.stride(0), pages.tensor.stride(0), future.padding_row),
        PAGE=pages.page_size,
        WINDOWS=windows is not None,
        LANES=LANES,
    )
