"""Charts of results with matplotlib, which is optional."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Float64Array


def axes_or_new(ax: Any) -> Any:
    """`ax`, or new axes. Raises ConfigError without matplotlib."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError("plots need matplotlib; pip install 'tokenyard[analysis]', or write_report a page") from None
    return pyplot.subplots(figsize=(7, 4))[1]


def plot_distribution(ax: Any, values: Float64Array, name: str, style: Mapping[str, Any]) -> Any:
    """The share of `values` at or below each value. NaN are requests that have none: the line ends below 1."""
    known = np.sort(values[~np.isnan(values)])
    ax.step(known, np.arange(1, len(known) + 1) / max(len(values), 1), where="post", **style)
    if len(known) and known[0] > 0.0:
        ax.set_xscale("log")
    ax.set(xlabel=name.removesuffix("_s") + (" (s)" if name.endswith("_s") else ""), ylabel="share of the requests")
    ax.set_ylim(0.0, 1.0)
    ax.grid(alpha=0.3)
    ax.legend()
    return ax


def plot_lines(
    ax: Any, lines: Mapping[str, Sequence[tuple[Any, float, float]]], x_name: str, y_name: str, **style: Any
) -> Any:
    """Lines of (x, mean, half of the interval), each with a name, and error bars."""
    for name, points in lines.items():
        xs, means, halves = zip(*points, strict=True)
        bars = None if np.isnan(halves).all() else halves
        ax.errorbar(xs, means, yerr=bars, label=name or None, **{"marker": "o", "capsize": 3, **style})
    ax.set(xlabel=x_name, ylabel=y_name)
    ax.grid(alpha=0.3)
    if any(lines):
        ax.legend()
    return ax
