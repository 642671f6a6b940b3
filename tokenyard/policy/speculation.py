"""How many drafts a step verifies (speculative decoding): as many as are expected to bring more than they cost.

A draft that is verified costs time whether it is right or not. The drafts of a step are taken in order of their chance
to be accepted while the step's expected tokens per second grow. With many rows, where each further token costs time,
no draft is worth it, and the step is the one without speculation. A draft whose chance is 0 is never verified. The
idea of a budget per step follows SmartSpec (Liu et al. 2024, arXiv 2406.14066); the chances come from the drafter's
own record (`StepResult.chances`).

Under a policy with targets, rows that a plain step leaves behind their target time per token come first, each with the
drafts that it needs to be in time again, as in AdaServe (Li et al. 2025, arXiv 2501.12162). Such drafts may make the
step longer than the most tokens per second would have it, but only by what the other rows can spare.
"""

from dataclasses import dataclass

import numpy as np

from tokenyard.base import CostModel, Float64Array, Int32Array, StepWork

ACCEPTANCE_RATE_UNIT = 1000
"""Chances are integers in thousandths, so that a tape replays alike anywhere."""


@dataclass(frozen=True, slots=True)
class TpotSlack:
    """How decoding rows stand against their target time per token: float64[n], both in seconds.

    slack_s: how long each row's next token may take, below 0 if it is late already. tpot_s: its target per token.
    """

    slack_s: Float64Array
    tpot_s: Float64Array


def drafts_to_verify(
    cost: CostModel,
    chunks: StepWork,
    contexts: Int32Array,
    max_drafts: Int32Array,
    chances: Int32Array,
    pace: TpotSlack | None = None,
) -> Int32Array:
    """How many drafts each decoding row verifies: int32[n], at most `max_drafts`, and 0 where the chance is 0.

    chunks: the prefill that the step does besides. contexts: int32[n], KV tokens that each row reads. most: int32[n],
    drafts that a row has ready. chances: int32[n], in thousandths, of each next draft if those before it are right.
    pace: how the rows stand against their targets, None where targets do not count.
    """
    none = np.zeros(len(max_drafts), np.int32)
    ready = (max_drafts > 0) & (chances > 0)
    if not ready.any():
        return none
    rows, context = len(max_drafts), int(contexts.sum(dtype=np.int64))
    time = _StepTime(cost, chunks, rows, context)
    if pace is not None:
        late_s = time.begun - pace.slack_s
        if (late_s[ready] > 0.0).any():
            return _by_tpot_slack(time, max_drafts, chances, late_s, pace.tpot_s)
    best = float(chances[ready].max()) / ACCEPTANCE_RATE_UNIT
    if best * time.without <= rows * time.extra(1):
        # The first draft is the likeliest and no later one is cheaper.
        return none
    gains = _gains(max_drafts, chances)
    # Drafts that a row does not have gain 0, so they come last and are cut off.
    order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains)]
    expected = rows + np.cumsum(gains.ravel()[order])
    taken = _best_count(expected, time)
    return np.bincount(order[:taken] % rows, minlength=rows).astype(np.int32)


class _StepTime:
    """Seconds of the step by the number of drafts. The time of chunks is not the drafts' to share: `without` is the
    time of the decoding rows alone, `begun` that of the step before it takes any draft.
    """

    def __init__(self, cost: CostModel, chunks: StepWork, rows: int, context: int) -> None:
        self._cost, self._chunks, self._rows, self._context = cost, chunks, rows, context
        self.without = cost.step(StepWork(rows, rows, rows, context))
        self.begun = cost.step(self._work(0)) if chunks.rows else self.without

    def extra(self, drafts: int) -> float:
        """Seconds that `drafts` drafts add to the step."""
        return self._cost.step(self._work(drafts)) - self.begun

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


def _gains(max_drafts: Int32Array, chances: Int32Array) -> Float64Array:
    """float64[drafts, rows]: the chance that a row's draft is accepted, with all before it; 0 where it has none."""
    places = np.arange(int(max_drafts.max()))[:, None]
    each: Float64Array = np.where(places < max_drafts, chances / ACCEPTANCE_RATE_UNIT, 0.0)
    return each.cumprod(axis=0)


def _by_tpot_slack(
    time: _StepTime, max_drafts: Int32Array, chances: Int32Array, late_s: Float64Array, tpot_s: Float64Array
) -> Int32Array:
    """`drafts_to_verify` where some rows will be late by `late_s` (float64[n], below 0 for rows in time): first what
    these need, likeliest first, then the others as in the rule without targets.
    """
    rows, behind = len(max_drafts), late_s > 0.0
    gains = _gains(max_drafts, chances)
    # A late row needs further tokens until it has one for each target time that has passed.
    had = np.cumsum(gains, axis=0) - gains
    needed = behind & (had < np.ceil(late_s / tpot_s)) & (gains > 0.0)
    order = np.lexsort((-gains.ravel(), ~needed.ravel()))[: np.count_nonzero(gains)]
    chosen = gains.ravel()[order]
    taken = _best_count(rows + np.cumsum(chosen), time)
    if (rows + chosen[:taken].sum()) * time.without <= rows * (time.without + time.extra(taken)):
        taken = 0
    urgent = int(needed.sum())
    if urgent > taken:
        spare_s = float(-late_s[~behind].max()) if not behind.all() else np.inf
        taken = max(taken, _count_in_time(int(behind.sum()), chosen[:urgent].cumsum(), time, spare_s))
    return np.bincount(order[:taken] % rows, minlength=rows).astype(np.int32)


def _counts(max_drafts: int) -> list[int]:
    """The numbers of drafts that are tried: 1, 2, 4, ... and `max_drafts`."""
    return [1 << power for power in range((max_drafts - 1).bit_length())] + [max_drafts]


def _count_in_time(rows: int, further: Float64Array, time: _StepTime, spare_s: float) -> int:
    """How many drafts give the late `rows` the most tokens per second, without making the step longer by more than
    `spare_s`; 0 if none does. `further[k]` are expected of k + 1 drafts.
    """
    best, best_rate = 0, rows / time.begun
    for count in _counts(len(further)):
        extra = time.extra(count)
        rate = (rows + float(further[count - 1])) / (time.begun + extra)
        if extra <= spare_s and rate > best_rate:
            best, best_rate = count, rate
    return best


def _best_count(expected: Float64Array, time: _StepTime) -> int:
    """How many drafts give the most tokens per second, of 1, 2, 4, ... and all; `expected[k]` belongs to k + 1."""
    best, best_rate = 0, 0.0
    for count in _counts(len(expected)):
        rate = float(expected[count - 1]) / (time.without + time.extra(count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best
