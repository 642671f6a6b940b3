"""Step plans as bytes, for the other ranks of a divided model.

The encoding is a header, then the plan's int32 columns in sequence, in the byte order of the machine, which all ranks
share. It leaves out row starts, which state how a row is sampled: only the rank that schedules a row samples it.
"""

import struct
from typing import Any

import numpy as np

from tokenyard.base.step_plan import StepPlan

_HEAD = struct.Struct("=12q")
"""step; numbers of rows, tokens, page writes, window writes, state copies and state saves; pages of a
checkpoint; decode_rows, verify_rows,
num_steps and delay_sampling.
"""

_ROW_COLUMNS = ("pool_rows", "epochs", "starts", "counts", "samples")
_PAGE_COLUMNS = ("page_rows", "page_columns", "page_ids")
_COLUMNS = (*_ROW_COLUMNS, "tokens", *_PAGE_COLUMNS, "window_ids", "state_copies", "state_saves", "state_pages")


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan as bytes, without its row starts."""
    head = _HEAD.pack(
        *(plan.step, len(plan.pool_rows), len(plan.tokens), len(plan.page_ids), len(plan.window_ids)),
        *(len(plan.state_copies), len(plan.state_saves), plan.state_pages.shape[1]),
        *(plan.decode_rows, plan.verify_rows, plan.num_steps, plan.delay_sampling),
    )
    return head + b"".join([getattr(plan, name).tobytes() for name in _COLUMNS])


def decode_plan(data: bytes) -> StepPlan:
    """Return the plan in bytes of `encode_plan`; its columns are read-only views. Raises ValueError for other bytes."""
    if len(data) < _HEAD.size:
        raise ValueError(f"a plan of {len(data)} bytes is truncated")
    head = _HEAD.unpack_from(data)
    step, (rows, tokens, pages, windows, copies, saves, slot_pages) = head[0], head[1:8]
    decode_rows, verify_rows, num_steps, delayed = head[8:]
    sizes = (rows,) * len(_ROW_COLUMNS) + (tokens,) + (pages,) * len(_PAGE_COLUMNS)
    sizes += (windows, 2 * copies, 3 * saves, (copies + saves) * slot_pages)
    if min(head[1:8]) < 0 or len(data) != _HEAD.size + 4 * sum(sizes):
        raise ValueError(f"a plan of {len(data)} bytes does not match its header")
    numbers, begin = np.frombuffer(data, np.int32, offset=_HEAD.size), 0
    columns: dict[str, Any] = {}
    for name, size in zip(_COLUMNS, sizes, strict=True):
        columns[name] = numbers[begin : begin + size]
        begin += size
    columns["state_copies"] = columns["state_copies"].reshape(-1, 2)
    columns["state_saves"] = columns["state_saves"].reshape(-1, 3)
    columns["state_pages"] = columns["state_pages"].reshape(-1 if slot_pages else 0, slot_pages)
    return StepPlan(
        step=step,
        **columns,
        decode_rows=decode_rows,
        verify_rows=verify_rows,
        delay_sampling=bool(delayed),
        num_steps=num_steps,
    )
