"""The steps that a calibration measures, and plans that make an executor run them without a scheduler."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenyard.base import (
    NO_TOKENS,
    Executor,
    ExecutorInfo,
    Int32Array,
    RowStart,
    SamplingParams,
    StepPlan,
    StepWork,
    step_work,
)
from tokenyard.cost.linear import LinearCost
from tokenyard.cost.online import OnlineCost

CHUNK_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREFIX_TOKENS = (0, 512, 2048, 8192)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT_TOKENS = (16, 128, 512, 2048, 8192)
MIXED_ROWS, MIXED_CHUNKS = (8, 64), (64, 512)
MAX_KV_TOKENS = 1 << 19
"""Attention gathers the KV that a step reads; more might not fit in the memory that the pool leaves."""

REPEATS = 5
POINT_S = 1.0
"""A slow step is measured fewer times, but at least twice."""

Measured = tuple[StepWork, float]
"""A step's work and the seconds it took."""

QUICK_S = 0.5
QUICK_ROUNDS = 4
"""Each round decides again, with the latest terms, whether a step is on the floor or on the line."""

PREFIX_WEIGHT = 1 / 512
CONTEXT_WEIGHT = 1 / 64


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """A kind of step: `rows` decodes with `context` tokens each, and a chunk of `chunk` tokens after `prefix`."""

    rows: int = 0
    context: int = 0
    chunk: int = 0
    prefix: int = 0

    @property
    def size(self) -> float:
        """Roughly how much work it is, so that the quick steps come first."""
        return self.rows * (1 + self.context * CONTEXT_WEIGHT) + self.chunk * (1 + self.prefix * PREFIX_WEIGHT)


def points(info: ExecutorInfo) -> list[CalibrationPoint]:
    """What to measure on this device, quick steps first: chunks, decodes and both together, as its memory allows."""
    chunks = [CalibrationPoint(chunk=chunk, prefix=prefix) for chunk in CHUNK_TOKENS for prefix in PREFIX_TOKENS]
    decodes = [CalibrationPoint(rows=rows, context=context) for rows in DECODE_ROWS for context in CONTEXT_TOKENS]
    both = [
        CalibrationPoint(rows, context, chunk)
        for rows in MIXED_ROWS
        for context in (128, 512)
        for chunk in MIXED_CHUNKS
    ]
    found = [point for point in (*chunks, *decodes, *both) if _fits(point, info)]
    return sorted(_thinned(found), key=lambda point: point.size)


QUICK_POINTS = (
    *(CalibrationPoint(rows=1, context=context) for context in (16, 512)),
    *(CalibrationPoint(rows=8, context=context) for context in (16, 512)),
    *(CalibrationPoint(chunk=chunk) for chunk in (16, 64, 128, 256, 512)),
    *(CalibrationPoint(chunk=chunk, prefix=512) for chunk in (16, 128)),
)
"""The steps that determine most of the terms in little time."""


def quick_calibration(executor: Executor, prior: LinearCost, now: Callable[[], float]) -> LinearCost:
    """A cost model of a loaded executor from a few measured steps, which correct the terms of `prior`.

    No step starts later than `QUICK_S` seconds after the first, by the clock `now` (seconds). The executor is left as
    if it had served rows that have ended.
    """
    wanted = sorted((point for point in QUICK_POINTS if _fits(point, executor.info)), key=lambda point: point.size)
    measured = list(measure_all(CalibrationRunner(executor), wanted, now, QUICK_S))
    calibrated = OnlineCost(prior, forgetting=1.0)
    for _ in range(QUICK_ROUNDS):
        for work, seconds in measured:
            calibrated.learn(work, seconds)
        calibrated.refit()
    return LinearCost(calibrated.terms, prior.links)


def _fits(point: CalibrationPoint, info: ExecutorInfo) -> bool:
    most = min(info.num_pages * info.page_size // 2, MAX_KV_TOKENS)
    longest = max(point.context + 1, point.prefix + point.chunk)
    pages, seen = _pages(point, info)
    return (
        longest <= info.context_length
        and pages.sum() <= most // info.page_size
        and (info.windows is None or (pages - seen).sum() <= info.windows.num_pages)
        and point.rows + 1 <= info.max_pool_rows
    )


def _pages(point: CalibrationPoint, info: ExecutorInfo) -> tuple[Int32Array, Int32Array]:
    """How many pages each row of a point has, and how many of them lie behind the window of its next token: int32[n]
    twice. Such pages have none in the layers with a window.
    """
    chunks = int(point.chunk > 0)
    starts = _int32([point.context] * point.rows + [point.prefix] * chunks)
    ends = _int32([point.context + 1] * point.rows + [point.prefix + point.chunk] * chunks)
    # Without windows all of a row is seen.
    window = info.context_length if info.windows is None else info.windows.window
    return -(-ends // info.page_size), np.maximum(starts - (window - 1), 0) // info.page_size


def _thinned(found: Sequence[CalibrationPoint]) -> list[CalibrationPoint]:
    """Every second of the chunks after a prefix and of the decodes, whose terms need fewer points than the line."""
    plain = [point for point in found if not point.prefix and not (point.rows and not point.chunk)]
    others = [point for point in found if point not in plain]
    return plain + others[::2]


class CalibrationRunner:
    """Makes plans for points and measures them. Pages are dealt out shuffled, as they are after hours of serving."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self._executor = executor
        self._info = executor.info
        self._rng = np.random.default_rng(seed)
        self._pages = self._shuffled(self._info.num_pages)
        self._window_pages = NO_TOKENS if self._info.windows is None else self._shuffled(self._info.windows.num_pages)
        self._step = 0

    def measure(self, point: CalibrationPoint) -> Measured:
        """The point's work, and the median of its seconds over a few runs after one that does not count."""
        self._run(self._allocate_pages(point))
        plan = self._plan(point)
        self._run(plan)
        times = [self._run(plan)]
        while len(times) < 2 or (len(times) < REPEATS and sum(times) < POINT_S):
            times.append(self._run(plan))
        return step_work(plan), statistics.median(times)

    def _run(self, plan: StepPlan) -> float:
        self._step += 1
        plan.step = self._step
        return self._executor.collect(self._executor.launch(plan)).seconds

    def _allocate_pages(self, point: CalibrationPoint) -> StepPlan:
        """A step without work that gives rows and pages to the point's requests, as if their prompts were computed."""
        lengths = [point.context + 1] * point.rows + [point.prefix + point.chunk] * bool(point.chunk)
        pages, seen = _pages(point, self._info)
        columns = np.concatenate([np.arange(count, dtype=np.int32) for count in pages])
        window_ids = NO_TOKENS
        if self._info.windows is not None:
            inside = columns >= np.repeat(seen, pages)
            window_ids = np.zeros(len(columns), np.int32)
            window_ids[inside] = self._window_pages[: np.count_nonzero(inside)]
        return StepPlan(
            step=0,
            pool_rows=_int32(()),
            epochs=_int32(()),
            starts=_int32(()),
            counts=_int32(()),
            samples=np.zeros(0, np.int32),
            tokens=_int32(()),
            page_rows=np.repeat(np.arange(len(pages), dtype=np.int32), pages),
            page_columns=columns,
            page_ids=self._pages[: len(columns)],
            window_ids=window_ids,
            row_starts=[
                RowStart(row, SamplingParams(temperature=0.0, ignore_eos=True), self._tokens(length), length)
                for row, length in enumerate(lengths)
            ],
        )

    def _plan(self, point: CalibrationPoint) -> StepPlan:
        chunks = int(point.chunk > 0)
        counts = _int32([1] * point.rows + [point.chunk] * chunks)
        total = point.rows + chunks
        return StepPlan(
            step=0,
            pool_rows=np.arange(total, dtype=np.int32),
            epochs=np.zeros(total, np.int32),
            starts=_int32([point.context] * point.rows + [point.prefix] * chunks),
            counts=counts,
            samples=np.ones(total, np.int32),
            tokens=self._tokens(int(counts.sum())),
            page_rows=_int32(()),
            page_columns=_int32(()),
            page_ids=_int32(()),
            decode_rows=point.rows,
        )

    def _shuffled(self, pages: int) -> Int32Array:
        return self._rng.permutation(pages).astype(np.int32) + 1

    def _tokens(self, count: int) -> Int32Array:
        return self._rng.integers(0, self._info.vocab_size, count).astype(np.int32)


def _int32(values: npt.ArrayLike) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def measure_all(
    rig: CalibrationRunner, wanted: Sequence[CalibrationPoint], now: Callable[[], float], budget_s: float
) -> Iterator[Measured]:
    """Measure the points in order until `budget_s` seconds have passed by the clock `now`; the rest is left out."""
    begin = now()
    for point in wanted:
        if now() - begin >= budget_s:
            return
        yield rig.measure(point)
