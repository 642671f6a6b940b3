"""Step time from tables: what a roofline or measured kernels say of a deployment, as plain numbers.

A step of B decoding rows with mean context s and of n chunks of N tokens takes

    host + base + rows(B, s) + chunks(n, tokens, area)

`base` is everything but attention: looked up at the number of tokens, in one table for steps that only decode (which
replay captured graphs) and one for steps with chunks. `rows` is the attention of decodes, `chunks` that of prefill
chunks. Tables are linear between their points and go on linearly after the last. Chunks of a step count as equally
long: n times the attention of one, less n - 1 times the time of a kernel that does nothing.

Tables are data: they are part of a profile and of a tape, and need no package to be read.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Self

import numpy as np

from tokenyard.base import ConfigError, Float64Array, Int64Array, StepWork
from tokenyard.cost.linear import MS_PER_S, LinearCost, LinearTerms

MAX_COLUMNS = 4096
"""Columns of a two-dimensional table that are kept for numbers of rows or tokens that were asked for."""

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """Milliseconds at points of two axes.

    first, second: the points, ascending.
    ms: one row per point of `first`, one value per point of `second`.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def column(self, at: float) -> "Column":
        """The values over the second axis where the first is `at`."""
        low = _segment(self.first, at)
        share = (at - self.first[low]) / (self.first[low + 1] - self.first[low])
        pairs = zip(self.ms[low], self.ms[low + 1], strict=True)
        return Column(self.second, tuple(max(a + share * (b - a), 0.0) for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Column:
    """Milliseconds at ascending points of one axis, linear between them and after the last."""

    points: tuple[int, ...]
    ms: tuple[float, ...]

    def at(self, x: float) -> float:
        """The value at `x`."""
        points, values = self.points, self.ms
        low = bisect_right(points, x, 1, len(points) - 1) - 1
        begin = points[low]
        return values[low] + (x - begin) * ((values[low + 1] - values[low]) / (points[low + 1] - begin))


@dataclass(frozen=True, slots=True)
class StepTable:
    """The tables of one deployment, all in milliseconds.

    decode: a step that only decodes, without attention, over its tokens.
    mixed: a step with chunks, without attention, over its tokens.
    rows: attention of decoding rows, over their number and their mean context.
    chunk: attention of one chunk, over its tokens and the tokens before it.
    chunk_floor_ms: attention of the smallest chunk, which is mostly launches.
    host_ms: what the engine adds to every step.
    origin: where the numbers come from.
    error: the mean relative error of a step against that origin, if it was precomputed from it; None if exact.
    """

    decode: Column
    mixed: Column
    rows: Grid
    chunk: Grid
    chunk_floor_ms: float = 0.0
    host_ms: float = 0.0
    origin: str = ""
    error: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for tables that are not well formed, or that make a step take no time."""
        for name, points, values in self._axes():
            if len(points) < MIN_POINTS or any(b <= a for a, b in pairwise(points)):
                raise ConfigError(f"the step table's {name} needs at least two points in ascending order")
            if not all(isfinite(value) and value >= 0.0 for value in values):
                raise ConfigError(f"the step table's {name} has a value that is not a time in milliseconds")
        if min(*self.decode.ms, *self.mixed.ms) <= 0.0:
            raise ConfigError("the step table makes a step take no time")

    def _axes(self) -> list[tuple[str, Sequence[int], list[float]]]:
        axes: list[tuple[str, Sequence[int], list[float]]] = []
        for name, column in (("decode", self.decode), ("mixed", self.mixed)):
            if len(column.ms) != len(column.points):
                raise ConfigError(f"the step table's {name} has as many values as points")
            axes.append((name, column.points, list(column.ms)))
        for name, grid in (("rows", self.rows), ("chunk", self.chunk)):
            if len(grid.ms) != len(grid.first) or any(len(row) != len(grid.second) for row in grid.ms):
                raise ConfigError(f"the step table's {name} needs one row of values per point")
            values = [value for row in grid.ms for value in row]
            axes += [(name, grid.first, values), (name, grid.second, values)]
        return axes

    def scaled(self, factor: float) -> "StepTable":
        """The tables of a device that takes `factor` times as long for everything."""

        def times(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(value * factor for value in values)

        return replace(
            self,
            decode=replace(self.decode, ms=times(self.decode.ms)),
            mixed=replace(self.mixed, ms=times(self.mixed.ms)),
            rows=replace(self.rows, ms=tuple(map(times, self.rows.ms))),
            chunk=replace(self.chunk, ms=tuple(map(times, self.chunk.ms))),
            chunk_floor_ms=self.chunk_floor_ms * factor,
            host_ms=self.host_ms * factor,
        )

    @classmethod
    def from_mapping(cls, document: Mapping[str, object], source: str) -> "StepTable":
        """Tables from a parsed file. Raises ConfigError, naming `source`, for anything that is not one."""
        try:
            values = dict(document)
            for name in ("decode", "mixed"):
                values[name] = Column(**{key: tuple(value) for key, value in values[name].items()})  # type: ignore[attr-defined]
            for name in ("rows", "chunk"):
                axes = dict(values[name])  # type: ignore[call-overload]
                rows = tuple(tuple(row) for row in axes["ms"])
                values[name] = Grid(tuple(axes["first"]), tuple(axes["second"]), rows)
            return cls(**values)  # type: ignore[arg-type]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(f"{source}: the step table does not have the expected fields ({error})") from None

    def document(self) -> dict[str, object]:
        """The tables as a mapping for JSON; `from_mapping` reads it."""
        return asdict(self)


class _Line:
    """A column made ready for many look-ups."""

    __slots__ = ("last", "points", "slopes", "values")

    def __init__(self, column: Column) -> None:
        points, values = column.points, column.ms
        self.points, self.values, self.last = points, values, len(points) - 1
        steps = zip(points, points[1:], values, values[1:], strict=False)
        self.slopes = [(d - c) / (b - a) for a, b, c, d in steps]

    def at(self, x: float) -> float:
        """The value at `x`."""
        low = bisect_right(self.points, x, 1, self.last) - 1
        return self.values[low] + (x - self.points[low]) * self.slopes[low]

    def each(self, x: Float64Array) -> Float64Array:
        """`at` of each `x`, float64[n], bit for bit."""
        points, values = np.array(self.points, np.float64), np.array(self.values)
        low = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
        found: Float64Array = values[low] + (x - points[low]) * np.array(self.slopes)[low]
        return found


@dataclass(slots=True, kw_only=True)
class TableCost(LinearCost):
    """A fixed cost model (see `base.CostModel`) that looks steps up in a `StepTable`.

    `terms` are the closest linear ones, for whoever needs the closed form: learning, lookahead, bounds.
    """

    table: StepTable
    _decode: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _mixed: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rows: dict[int, _Line] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunks: dict[int, _Line] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""
        tokens = work.tokens
        if work.prefill_tokens:
            base = self._mixed.get(tokens) or _kept_ms(self._mixed, tokens, self.table.mixed)
            ms = base + self._chunks_ms(work)
        else:
            ms = self._decode.get(tokens) or _kept_ms(self._decode, tokens, self.table.decode)
        rows = work.decode_rows
        if rows:
            line = self._rows.get(rows) or _kept_line(self._rows, rows, self.table.rows)
            ms += line.at(work.decode_context / rows)
        if work.adapter_loads:
            ms += self.terms.adapter_ms * work.adapter_loads
        return (ms + self.table.host_ms) / MS_PER_S

    def decodes(self, rows: int, contexts: Int64Array) -> Float64Array:
        """`step` for decode steps over `rows` rows that read `contexts` (int64[n]) tokens of KV each: float64[n]."""
        line = self._rows.get(rows) or _kept_line(self._rows, rows, self.table.rows)
        base = self._decode.get(rows) or _kept_ms(self._decode, rows, self.table.decode)
        times: Float64Array = base + line.each(contexts / rows)
        return (times + self.table.host_ms) / MS_PER_S

    def scaled(self, factor: float) -> Self:
        """The cost model of a device that takes `factor` times as long for everything."""
        return type(self)(terms=self.terms.scaled(factor), links=dict(self.links), table=self.table.scaled(factor))

    def _chunks_ms(self, work: StepWork) -> float:
        tokens, area, count = work.prefill_tokens, work.chunk_area, work.chunks
        if count != 1 or tokens > self.table.chunk.first[-1]:
            return self._several_ms(tokens, area, count)
        return self._one_ms(tokens, tokens, area)

    def _one_ms(self, whole: int, tokens: float, area: float) -> float:
        """Attention of a chunk of `tokens`, `whole` of them whole."""
        line = self._chunks.get(whole) or _kept_line(self._chunks, whole, self.table.chunk)
        prefix = area / tokens - tokens / 2
        if prefix >= 0.0:
            return line.at(prefix)
        # Less area than a chunk without a prefix has: its attention in proportion (probes ask for none at all).
        return line.at(0.0) * (2.0 * area / (tokens * tokens))

    def _several_ms(self, tokens: int, area: float, chunks: int) -> float:
        """Attention of several chunks. One beyond the table counts as several: it grows with its square."""
        count = max(chunks, -(-tokens // self.table.chunk.first[-1]))
        one = self._one_ms(tokens // count, tokens / count, area / count)
        return max(count * one - (count - 1) * self.table.chunk_floor_ms, one)


def closest_terms(table: StepTable) -> LinearTerms:
    """The linear terms that come closest to `table` on steps of usual sizes."""
    from tokenyard.cost.fit import fit_terms

    cost = TableCost(terms=LinearTerms(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), table=table)
    return fit_terms([(work, cost.step(work)) for work in usual_steps()])


def lower_terms(terms: LinearTerms, table: StepTable | None) -> LinearTerms:
    """Linear terms by which no step of usual size takes longer than by `table`: what a proof may count on."""
    if table is None:
        return terms
    cost = TableCost(terms=terms, table=table)
    smallest = min(cost.step(work) * MS_PER_S / terms.step(work) for work in usual_steps())
    return terms.scaled(min(smallest, 1.0))


def usual_steps() -> list[StepWork]:
    """Steps of usual sizes: decodes of several batches and contexts, chunks after several prefixes, and both."""
    steps = [
        StepWork(rows, rows, rows, rows * context)
        for rows in (1, 4, 16, 64, 128, 256)
        for context in (256, 2048, 8192, 32768)
    ]
    for tokens in (128, 512, 2048, 8192):
        for prefix in (0, 4096, 16384):
            for rows in (0, 32):
                work = StepWork(rows, rows, rows, rows * 2048)
                work.add_chunk(prefix, tokens)
                steps.append(work)
    return steps


def _kept_ms(kept: dict[int, float], at: int, column: Column) -> float:
    ms = kept[at] = column.at(at)
    return ms


def _kept_line(kept: dict[int, _Line], at: int, grid: Grid) -> _Line:
    """The column of `grid` where its first axis is `at`, kept for the next time."""
    if len(kept) >= MAX_COLUMNS:
        kept.clear()
    line = kept[at] = _Line(grid.column(at))
    return line


def _segment(points: Sequence[int], x: float) -> int:
    return bisect_right(points, x, 1, len(points) - 1) - 1
