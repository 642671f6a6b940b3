"""What rank 0 sends for each step: the plan, and of which further tokens of it logits are wanted.

Log-probabilities of prompts need logits beside those that are sampled from. Which ones, only rank 0 knows, as it alone
has the requests; every rank that has a part of the head computes along.
"""

import struct
from collections.abc import Sequence

import numpy as np

from tokenyard.base import StepPlan
from tokenyard.base.plan_bytes import decode_plan, encode_plan

Range = tuple[int, int]
"""First and end of some tokens of a plan."""

_COUNT = struct.Struct("=q")


def encode_step(plan: StepPlan, ranges: Sequence[Range]) -> bytes:
    """Return a step as bytes."""
    numbers = np.array(ranges, np.int64).tobytes() if ranges else b""
    return _COUNT.pack(len(ranges)) + numbers + encode_plan(plan)


def decode_step(data: bytes) -> tuple[StepPlan, list[Range]]:
    """Return plan and ranges in bytes of `encode_step`. Raises ValueError for other bytes."""
    count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else -1
    begin = _COUNT.size + 16 * count
    if not 0 <= count <= len(data) // 16:
        raise ValueError(f"a step of {len(data)} bytes is cut off")
    numbers = np.frombuffer(data, np.int64, 2 * count, _COUNT.size).tolist()
    return decode_plan(data[begin:]), list(zip(numbers[::2], numbers[1::2], strict=True))
