"""How many drafts a step verifies (speculative decoding): as many as are expected to bring more than they cost.

A draft that is verified costs time whether it is right or not. The drafts of a step are taken in order of their chance
to be accepted while the step's expected tokens per second grow. With many rows, where each further token costs time,
no draft is worth it, and the step is the one without speculation. The idea of a budget per step follows SmartSpec (Liu
et al. 2024, arXiv 2406.14066); the chances come from the drafter's own record (`StepResult.chances`).
"""

import numpy as np

from tokenyard.base import CostModel, Float64Array, Int32Array, StepWork

CHANCE_UNIT = 1000
"""Chances are integers in thousandths, so that a tape replays alike anywhere."""


def worthwhile_drafts(
    cost: CostModel, chunks: StepWork, contexts: Int32Array, most: Int32Array, chances: Int32Array
) -> Int32Array:
    """How many drafts each decoding row verifies: int32[n], at most `most`.

    chunks: the prefill that the step does besides. contexts: int32[n], KV tokens that each row reads. most: int32[n],
    drafts that a row has ready. chances: int32[n], in thousandths, of each next draft if those before it are right.
    """
    none = np.zeros(len(most), np.int32)
    ready = most > 0
    if not ready.any():
        return none
    rows, context = len(most), int(contexts.sum(dtype=np.int64))
    time = _StepTime(cost, chunks, rows, context)
    best = float(chances[ready].max()) / CHANCE_UNIT
    if best * time.without <= rows * time.extra(1):
        # The first draft is the likeliest and no later one is cheaper.
        return none
    gains = _gains(most, chances)
    order = np.argsort(-gains, axis=None, kind="stable")[: int(most.sum())]
    expected = rows + np.cumsum(gains.ravel()[order])
    taken = _best_count(expected, time)
    return np.bincount(order[:taken] % rows, minlength=rows).astype(np.int32)


class _StepTime:
    """Seconds of the step by the number of drafts. The time of chunks is not the drafts' to share."""

    def __init__(self, cost: CostModel, chunks: StepWork, rows: int, context: int) -> None:
        self._cost, self._chunks, self._rows, self._context = cost, chunks, rows, context
        self.without = cost.step(StepWork(rows, rows, rows, context))
        self._before = cost.step(self._work(0)) if chunks.rows else self.without

    def extra(self, drafts: int) -> float:
        """Seconds that `drafts` drafts add to the step."""
        return self._cost.step(self._work(drafts)) - self._before

    def _work(self, drafts: int) -> StepWork:
        rows, chunks = self._rows, self._chunks
        return StepWork(
            tokens=rows + drafts + chunks.tokens,
            rows=rows + chunks.rows,
            decode_rows=rows,
            decode_context=self._context + drafts,
            prefill_tokens=chunks.prefill_tokens,
            chunk_area=chunks.chunk_area,
            verify_tokens=drafts,
        )


def _gains(most: Int32Array, chances: Int32Array) -> Float64Array:
    """float64[drafts, rows]: the chance that a row's draft is accepted, with all before it; 0 where it has none."""
    places = np.arange(int(most.max()))[:, None]
    each: Float64Array = np.where(places < most, chances / CHANCE_UNIT, 0.0)
    return each.cumprod(axis=0)


def _best_count(expected: Float64Array, time: _StepTime) -> int:
    """How many drafts give the most tokens per second, of 1, 2, 4, ... and all; `expected[k]` belongs to k + 1."""
    best, best_rate = 0, 0.0
    count = 1
    while True:
        count = min(count, len(expected))
        rate = float(expected[count - 1]) / (time.without + time.extra(count))
        if rate > best_rate:
            best, best_rate = count, rate
        if count == len(expected):
            return best
        count *= 2
