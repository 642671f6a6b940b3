"""Confidence intervals of figures over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from statistics import mean, stdev
from typing import Any

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantiles of Student's t for a two-sided interval of 95 %, from one degree of freedom on."""

NORMAL_95 = 1.96


def student_half(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of `values` (Student's t); NaN for fewer than two."""
    count = len(values)
    if count < 2:
        return nan
    return STUDENT_95[min(count - 2, len(STUDENT_95) - 1)] * stdev(values) / sqrt(count)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval (Wilson 1927) for a share observed among `count` requests."""
    z2 = NORMAL_95 * NORMAL_95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL_95 * sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return middle - half, middle + half


def share_bounds(values: Sequence[float], requests: int) -> tuple[float, float]:
    """The 95 % interval of a mean of shares over seeds, within 0 and 1.

    It is on each side the wider of two: Student's t over the seeds, which shows how the share varies with the arrivals,
    and Wilson's score interval, which accounts for the number of requests behind each share. It is never empty: 1,000
    requests that all meet their targets show that at least 99.6 % do.
    """
    middle = mean(values)
    low, high = wilson(middle, requests)
    if len(values) > 1:
        half = student_half(values)
        low, high = min(low, middle - half), max(high, middle + half)
    return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of a figure over seeds and its 95 % interval (Student's t).

    low, high: NaN for one seed.
    """

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the width."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of `values`, of which there must be at least one."""
    middle, half = mean(values), student_half(values)
    return Interval(middle, middle - half, middle + half)


def figure(numbers: Mapping[str, Any], path: str) -> float | None:
    """The figure at a dotted `path` of a summary, such as `ttft_s.p99`; None where the run has none.

    Raises KeyError, which names the keys there are, for a path that no summary has.
    """
    found: Any = numbers
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            keys = ", ".join(found) if isinstance(found, Mapping) else "a number"
            raise KeyError(f"no figure {path!r}: there is {keys}")
        found = found[key]
    if found is None:
        return None
    if isinstance(found, bool | int | float):
        return float(found)
    raise KeyError(f"{path!r} is not one number; add one of {', '.join(found)}" if found else f"{path!r} is empty")


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summaries of several seeds as one: in place of each number {"mean", "low", "high"}, of the seeds that have it.

    Everything else is left out.
    """
    merged: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run.get(key) for run in runs]
        if isinstance(first, Mapping):
            merged[key] = over_seeds([value for value in values if isinstance(value, Mapping)])
            continue
        known = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if known:
            found = interval(known)
            merged[key] = {"mean": found.mean} | ({} if len(known) == 1 else {"low": found.low, "high": found.high})
    return merged
