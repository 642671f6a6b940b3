"""A StepPlan as tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import Int32Array, StepPlan
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.state_pool import StateBatch


class Bucket(NamedTuple):
    """A captured step of rows of all kinds: its tokens, and at most so many rows of one token and of more each."""

    tokens: int
    rows: int


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of one forward pass: T tokens of n rows, row after row. SGLang's ForwardBatch.

    token_ids: int64[T].
    positions: int64[T].
    slots: int64[T], where the KV of each token is written.
    pool_rows: int64[T], the pool row of each token.
    logit_tokens: int64[m], indices in T of the tokens whose logits are computed, in order of rows and positions.
    starts: int64[n] on the host, the first position of each row.
    counts: int64[n] on the host, the tokens of each row.
    decode_rows: how many rows at the front decode; each has one token.
    attention: metadata that the attention backend prepares for the step, by window.
    hidden: [T, hidden], the output of the previous pipeline stage; None in the first stage.
    states: the recurrent states of the rows; None for a model without.
    captured: the rows of the captured decode step that this batch is recorded for; 0 for any other batch.
    bucket: the captured step of rows of all kinds that this batch is recorded for; None for any other batch.
    shared_kv: keys and values of the batch's tokens that later layers read too, by their layer.
    aux_hidden_states: [T, layers * hidden], what an EAGLE-3 head reads (see Decoder.aux_layers); None without one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pool_rows: torch.Tensor
    logit_tokens: torch.Tensor
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    decode_rows: int
    attention: dict[int, Any] = field(default_factory=dict)
    hidden: torch.Tensor | None = None
    states: StateBatch | None = None
    captured: int = 0
    bucket: Bucket | None = None
    shared_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    aux_hidden_states: torch.Tensor | None = None


class PageTable:
    """int32[pool row, column] on the device: the page that holds the row's tokens from column * page_size on.

    vLLM's block table; SGLang's req_to_token, with pages instead of tokens. windows: the page table of the layers with
    a sliding window, where these have their own pool; else None.
    """

    def __init__(
        self, max_pool_rows: int, context_length: int, page_size: int, device: torch.device, *, windows: bool = False
    ) -> None:
        self.page_size = page_size
        self.windows = PageTable(max_pool_rows, context_length, page_size, device) if windows else None
        self.tensor = torch.zeros(max_pool_rows, -(-context_length // page_size), dtype=torch.int32, device=device)
        # The same memory; numpy costs a small step on a CPU much less than torch.
        self.host = self.tensor.numpy() if device.type == "cpu" else None

    def write(self, plan: StepPlan) -> None:
        """Apply the page writes of a plan."""
        if not len(plan.page_ids):
            return
        self._write(plan, plan.page_ids)
        if self.windows is not None:
            self.windows._write(plan, plan.window_ids)

    def _write(self, plan: StepPlan, page_ids: Int32Array) -> None:
        if self.host is not None:
            self.host[plan.page_rows, plan.page_columns] = page_ids
        else:
            columns = upload((plan.page_rows, plan.page_columns, page_ids), self.tensor.device)
            self.tensor[columns[0], columns[1]] = columns[2].to(torch.int32)

    def slots(self, pool_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots (int32) of positions of rows. Both arguments are int64 and must broadcast."""
        found: torch.Tensor = self._slots_in(self.tensor, pool_rows, positions)
        return found

    def host_slots(self, pool_rows: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`slots` as int64 where the table is on the CPU; numpy costs a small step much less than torch."""
        found: npt.NDArray[np.int64] = self._slots_in(self.host, pool_rows, positions).astype(np.int64, copy=False)
        return found

    def _slots_in(self, table: Any, pool_rows: Any, positions: Any) -> Any:
        """The slots by torch or by numpy, whichever the arguments are of."""
        if self.page_size == 1:
            return table[pool_rows, positions]
        return table[pool_rows, positions // self.page_size] * self.page_size + positions % self.page_size


def upload(columns: Sequence[npt.NDArray[Any]], device: torch.device) -> torch.Tensor:
    """Send columns of one length to the device in one copy: int64[columns, length]."""
    # Not np.stack, which takes several times as long for the few rows of a decode.
    block = np.empty((len(columns), len(columns[0])), dtype=np.int64)
    for row, column in zip(block, columns, strict=True):
        row[:] = column
    return to_device(block, device)


def samples_of(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Return int64[n]: at how many of its last positions each row of a plan samples."""
    return plan.samples.astype(np.int64)


def sampled_tokens(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Return int64[m]: which of a plan's tokens are sampled after, in order of rows and positions."""
    samples = samples_of(plan)
    ends = np.cumsum(plan.counts, dtype=np.int64)
    if plan.decode_rows == len(samples):
        return ends - 1
    # A row's samples run up to its last token: index among all samples plus a constant per row.
    return np.arange(samples.sum()) + np.repeat(ends - np.cumsum(samples), samples)


def build_batch(plan: StepPlan, pages: PageTable) -> ForwardBatch:
    """Lay out a plan's tokens; token ids may still hold LAST_SAMPLED. The plan's page writes must be applied."""
    device = pages.tensor.device
    starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
    positions, pool_rows = plan.positions, np.repeat(plan.pool_rows, counts)
    columns = upload((plan.tokens, positions, pool_rows), device)
    if pages.host is None:
        slots = pages.slots(columns[2], columns[1]).to(torch.int64)
    else:
        slots = torch.from_numpy(pages.host_slots(pool_rows, positions))
    return ForwardBatch(
        token_ids=columns[0],
        positions=columns[1],
        slots=slots,
        pool_rows=columns[2],
        logit_tokens=upload((sampled_tokens(plan),), device)[0],
        starts=starts,
        counts=counts,
        decode_rows=plan.decode_rows,
    )
