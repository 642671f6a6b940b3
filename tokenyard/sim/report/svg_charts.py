"""Charts as inline SVG, so that a report is one file and needs no plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import numpy.typing as npt

_BRIGHT = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_DARK = ("#1e3a8a", "#7f1d1d", "#022c22", "#78350f", "#2e1065", "#164e63", "#500724", "#1a2e05")
COLOURS = _BRIGHT + _DARK
WIDTH, HEIGHT = 620, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 34, 46
MAX_STEPS = 6
LEGEND_ROW = 16
LEGEND_CHAR, LEGEND_KEY = 6.2, 24
MAX_DECADES = 8
STYLE = """
svg text { font: 12px system-ui, sans-serif } svg .title { font-size: 14px; font-weight: 600 }
svg .tick { font-size: 11px; fill: #4b5563 } svg .grid { stroke: #e5e7eb } svg .axis { stroke: #111827 }
"""
"""The style of the charts' classes; the page around them includes it."""


@dataclass
class _Series:
    label: str
    kind: str
    x: npt.NDArray[np.float64]
    y: npt.NDArray[np.float64]
    colour: str


@dataclass
class Chart:
    """One chart: add series, then call `svg()`, or pass it to `page`. A log axis leaves out values of 0 and below.

    empty: the text to show without values.
    group: on a page, charts of one group share their axes.
    """

    title: str
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    y_from_zero: bool = False
    empty: str = "nothing to show"
    group: str = ""
    series: list[_Series] = field(default_factory=list)
    categories: tuple[str, ...] = ()

    def line(self, x: npt.ArrayLike, y: npt.ArrayLike, label: str = "", dashed: bool = False) -> None:
        """A line through the points; a dashed one is grey, for a bound or a target."""
        self._add("dashed" if dashed else "line", x, y, label)

    def area(self, x: npt.ArrayLike, y: npt.ArrayLike, label: str = "") -> None:
        """A line filled down to zero."""
        self._add("area", x, y, label)

    def dots(self, x: npt.ArrayLike, y: npt.ArrayLike, label: str = "") -> None:
        """Single points."""
        self._add("dots", x, y, label)

    def bars(self, categories: Sequence[str], y: npt.ArrayLike, label: str = "") -> None:
        """One bar per category; bars of several calls are side by side."""
        self.categories = tuple(categories)
        self._add("bars", np.arange(len(self.categories)), y, label)

    def _add(self, kind: str, x: npt.ArrayLike, y: npt.ArrayLike, label: str) -> None:
        xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
        keep = np.isfinite(xs) & np.isfinite(ys)
        if self.x_log:
            keep &= xs > 0.0
        if self.y_log:
            keep &= ys > 0.0
        coloured = sum(series.kind != "dashed" for series in self.series)
        colour = "#6b7280" if kind == "dashed" else COLOURS[coloured % len(COLOURS)]
        self.series.append(_Series(label, kind, xs[keep], ys[keep], colour))

    def svg(self) -> str:
        """The chart as an `<svg>` element."""
        legend = [series for series in self.series if series.label]
        per_row = _legend_per_row(legend)
        top = TOP + LEGEND_ROW * (-(-len(legend) // per_row))
        x_axis = self._x_axis()
        y_axis = _Axis.over([series.y for series in self.series], self.y_log, HEIGHT - BOTTOM, top, self.zero_based)
        shown = any(len(series.x) for series in self.series)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            f'<text class="title" x="{LEFT}" y="18">{escape(self.title)}</text>',
            *_legend(legend, per_row),
            *(self._grid(x_axis, y_axis, top) if shown else [self._nothing()]),
            *(mark for index, series in enumerate(self.series) for mark in self._marks(series, index, x_axis, y_axis)),
            "</svg>",
        ]
        return "\n".join(parts)

    def _nothing(self) -> str:
        return f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">{escape(self.empty)}</text>'

    @property
    def zero_based(self) -> bool:
        """Whether the upward axis begins at zero."""
        return self.y_from_zero or any(series.kind in ("area", "bars") for series in self.series)

    def _x_axis(self) -> "_Axis":
        if self.categories:
            return _Axis(-0.5, len(self.categories) - 0.5, False, LEFT, WIDTH - RIGHT)
        return _Axis.over([series.x for series in self.series], self.x_log, LEFT, WIDTH - RIGHT, False)

    def _grid(self, x_axis: "_Axis", y_axis: "_Axis", top: int) -> list[str]:
        base = HEIGHT - BOTTOM
        parts = []
        for value in y_axis.ticks():
            y = y_axis.at(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
        ticks = [(value, _number(value)) for value in x_axis.ticks()]
        named = [(float(place), name) for place, name in enumerate(self.categories)] or ticks
        for value, name in named:
            x = x_axis.at(value)
            if not self.categories:
                parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{base}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 16}" text-anchor="middle">{escape(name)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>')
        turn = (top + base) / 2
        parts.append(
            f'<text transform="translate(14 {turn:.0f}) rotate(-90)" text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return parts

    def _marks(self, series: _Series, index: int, x_axis: "_Axis", y_axis: "_Axis") -> list[str]:
        xs, ys = x_axis.positions(series.x), y_axis.positions(series.y)
        points = list(zip(xs.tolist(), ys.tolist(), strict=True))
        if not points:
            return []
        if series.kind == "bars":
            return self._bars(series, index, points, x_axis, y_axis)
        if series.kind == "dots" or len(points) == 1:
            return [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{series.colour}" opacity=".45"/>' for x, y in points
            ]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if series.kind == "dashed" else ""
        marks = [f'<path d="{path}" fill="none" stroke="{series.colour}" stroke-width="1.6"{dash}/>']
        if series.kind == "area":
            base = HEIGHT - BOTTOM
            closed = f"{path}L{points[-1][0]:.1f} {base}L{points[0][0]:.1f} {base}Z"
            marks.append(f'<path d="{closed}" fill="{series.colour}" opacity=".18"/>')
        return marks

    def _bars(
        self, series: _Series, index: int, points: list[tuple[float, float]], x_axis: "_Axis", y_axis: "_Axis"
    ) -> list[str]:
        groups = sum(other.kind == "bars" for other in self.series)
        width = 0.8 * (x_axis.at(1.0) - x_axis.at(0.0)) / groups
        base = y_axis.at(0.0)
        return [
            f'<rect x="{x + (index - groups / 2) * width:.1f}" y="{y:.1f}" width="{width * 0.92:.1f}" '
            f'height="{max(base - y, 0.0):.1f}" fill="{series.colour}"/>'
            for x, y in points
        ]


def picture(charts: Sequence[Chart]) -> str:
    """The charts side by side as a standalone SVG file, on white."""
    width = WIDTH * len(charts)
    parts = [f'<g transform="translate({WIDTH * place} 0)">{chart.svg()}</g>' for place, chart in enumerate(charts)]
    sized = [part.replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1) for part in parts]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(sized)}</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values from `low` to `high` to pixels from `begin` to `end`."""

    low: float
    high: float
    log: bool
    begin: float
    end: float

    @classmethod
    def over(
        cls, columns: Sequence[npt.NDArray[np.float64]], log: bool, begin: float, end: float, zero: bool
    ) -> "_Axis":
        """An axis that shows all values, with a margin; from 0 if `zero`."""
        values = np.concatenate(columns) if columns else np.empty(0)
        if not len(values):
            return cls(1.0 if log else 0.0, 10.0 if log else 1.0, log, begin, end)
        low, high = float(values.min()), float(values.max())
        if log:
            return cls(low / 1.1, max(high * 1.1, low * 1.3), True, begin, end)
        low = min(low, 0.0) if zero else low
        high = high if high > low else low + 1.0
        air = 0.04 * (high - low)
        return cls(low if low == 0.0 else low - air, high + air, False, begin, end)

    def positions(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Pixels of many values."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        scaled = np.log(values) if self.log else values
        pixels: npt.NDArray[np.float64] = self.begin + (scaled - low) / (high - low) * (self.end - self.begin)
        return pixels

    def at(self, value: float) -> float:
        """Pixels of one value."""
        return float(self.positions(np.array([value]))[0])

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = self.high / self.low > 1e3
            steps = (1.0,) if wide else (1.0, 2.0, 5.0)
            disagg = -(-len(exponents) // MAX_DECADES)
            powers = [10.0**e for e in exponents if e % disagg == 0]
            ticks = [m * power for power in powers for m in steps if self.low <= m * power <= self.high]
            if len(ticks) > 1:
                return ticks
        rough = (self.high - self.low) / MAX_STEPS
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, math.floor(self.high / step) + 1)]


def _legend_per_row(series: Sequence[_Series]) -> int:
    """Number of legend keys per row, so that the longest label fits."""
    longest = max((len(one.label) for one in series), default=0)
    return max(1, min(3, int((WIDTH - LEFT - RIGHT) / (LEGEND_KEY + LEGEND_CHAR * longest))))


def _legend(series: Sequence[_Series], per_row: int) -> list[str]:
    parts = []
    for place, one in enumerate(series):
        x = LEFT + (place % per_row) * (WIDTH - LEFT - RIGHT) / per_row
        y = TOP + LEGEND_ROW * (place // per_row)
        if one.kind == "dashed":
            ends = f'x1="{x:.0f}" x2="{x + 13:.0f}" y1="{y - 4}" y2="{y - 4}"'
            parts.append(f'<line {ends} stroke="{one.colour}" stroke-width="1.6" stroke-dasharray="5 3"/>')
        else:
            parts.append(f'<rect x="{x:.0f}" y="{y - 8}" width="12" height="8" fill="{one.colour}"/>')
        parts.append(f'<text class="tick" x="{x + 17:.0f}" y="{y}">{escape(one.label)}</text>')
    return parts


def _number(value: float) -> str:
    if value == 0.0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:.6g}" if size >= 1.0 else f"{value:.3g}"
