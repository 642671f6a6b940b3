"""The inputs of captured decode steps, made from a plan by one copy to the device and, with Triton, one launch.

Without this a step is some 30 calls of torch on the host, which take longer than the device does for a small model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import StepPlan
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.future_map import FutureMap


@dataclass(frozen=True, slots=True)
class UploadedPlan:
    """A plan of decodes alone on the device.

    block: int64[3 * rows + 3 * writes], or 4 * writes with windows: tokens, positions and pool rows of its rows, then
        rows, columns and ids of its page writes, and their ids in the page table of the layers with a window.
    rows: how many rows it has. writes: how many pages it writes.
    """

    block: torch.Tensor
    rows: int
    writes: int


Prepare = Callable[[UploadedPlan, torch.Tensor, PageTable, FutureMap], None]
"""Applies a plan's page writes, and fills int64[5, size] with its token ids, positions, slots, pool rows, and the rows
of the FutureMap that its tokens go to. Rows behind those of the plan are 0, and FutureMap.padding_row.
"""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """How captured steps begin with a plan and end with tokens.

    likeliest: int64[n], the likeliest tokens of float32[n, vocabulary]; see SamplingBackend.
    """

    pages: PageTable
    future: FutureMap
    likeliest: Callable[[torch.Tensor], torch.Tensor]
    prepare: Prepare

    def fill(self, plan: StepPlan, columns: torch.Tensor) -> None:
        """Apply a plan's page writes and fill the columns of a captured step; see Prepare."""
        self.prepare(upload_plan(plan, self.pages), columns, self.pages, self.future)


def upload_plan(plan: StepPlan, pages: PageTable) -> UploadedPlan:
    """Send what a step of decodes needs to the device in one copy."""
    parts: list[npt.NDArray[Any]] = [
        plan.tokens,
        plan.positions,
        plan.pool_rows,
        plan.page_rows,
        plan.page_columns,
        plan.page_ids,
    ]
    if pages.windows is not None:
        parts.append(plan.window_ids)
    block = to_device(np.concatenate(parts, dtype=np.int64), pages.tensor.device)
    return UploadedPlan(block, len(plan.pool_rows), len(plan.page_ids))


def prepare_by_torch(plan: UploadedPlan, columns: torch.Tensor, pages: PageTable, future: FutureMap) -> None:
    """A Prepare by torch's operations."""
    rows, block = plan.rows, plan.block
    tokens, positions, pool_rows = block[: 3 * rows].view(3, rows)
    if plan.writes:
        writes = block[3 * rows :].view(-1, plan.writes)
        pages.tensor[writes[0], writes[1]] = writes[2].to(torch.int32)
        if pages.windows is not None:
            pages.windows.tensor[writes[0], writes[1]] = writes[3].to(torch.int32)
    columns[0, :rows] = future.resolve(tokens, pool_rows)
    columns[1, :rows] = positions
    columns[2, :rows] = pages.slots(pool_rows, positions)
    columns[3:, :rows] = pool_rows
    columns[:4, rows:].zero_()
    columns[4, rows:].fill_(future.padding_row)
