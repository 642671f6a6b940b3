"""The planner's search: of many kinds of fleets the smallest and the cheapest that serve the traffic in time.

Kinds are thinned out by successive halving (Jamieson and Talwalkar 2016): all are sized on a short, busy part of the
trace, the better half on a longer one, the last ones on all of it, and these with arrivals drawn anew as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import mean, stdev

from tokenyard.sim.trial import Option, Sized, Sizing, Traffic, Trial, busiest
from tokenyard.sim.workload import Workload

SHORTEST_PART = 1500
FINALISTS = 3
MORE_TRAFFIC = 1.5
ASSUMED_ERROR = 0.2
"""What a cost model is taken to be off by where nobody has measured it."""
MOST_CORRECTIONS = 4

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantiles of Student's t for a two-sided interval of 95 %, from one degree of freedom on."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval, None for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return mean(self.values)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Its 95 % interval by Student's t, within 0 and 1."""
        count = len(self.values)
        if count < 2:
            return None
        half = STUDENT_95[min(count - 2, len(STUDENT_95) - 1)] * stdev(self.values) / sqrt(count)
        return max(self.mean - half, 0.0), min(self.mean + half, 1.0)


@dataclass(frozen=True)
class Found:
    """A kind of fleet with the number of replicas that meets the target on average over the seeds."""

    option: Option
    replicas: int
    attainment: Interval

    @property
    def devices(self) -> int:
        """Its devices."""
        return self.option.devices(self.replicas)

    @property
    def cost(self) -> float:
        """Its price for an hour, or its devices."""
        return self.option.cost(self.replicas)


@dataclass(frozen=True)
class WhatIf:
    """What becomes of a fleet when things change. nine_more, at_more_traffic: replicas that are needed, None if there
    are not as many. more_traffic, one_down: the share that meets its targets then, with the fleet as it is.
    """

    nine_more: int | None
    more_traffic: float
    at_more_traffic: int | None
    one_down: float


@dataclass(frozen=True)
class Bounds:
    """The decision again for a cost model that is off by `error`: replicas of each finalist, None for more than may be
    had, on faster and on slower devices than the profiles say, and the finalist that is cheapest then.
    """

    error: float
    measured: bool
    faster: tuple[int | None, ...]
    slower: tuple[int | None, ...]
    cheapest_if_faster: int | None
    cheapest_if_slower: int | None


@dataclass(frozen=True)
class Plan:
    """finalists: the cheapest first. cheapest and smallest: their places there. rejected: kinds that were sized on a
    part of the trace only, or not found, as (name, part of the requests, replicas).
    """

    finalists: tuple[Found, ...]
    cheapest: int
    smallest: int
    rejected: tuple[tuple[str, float, int | None], ...]
    what_if: tuple[WhatIf, ...]
    bounds: Bounds
    trials: int


Size = Callable[[str, Sequence[Sizing]], list[Sized]]
"""Does several sizings, in parallel where it can; with a word for the progress bar."""

Attain = Callable[[str, Sequence[Trial]], list[float]]
"""Runs several trials."""


class Planner:
    """One search."""

    def __init__(self, workload: Workload, target: float, seeds: int, size: Size, attain: Attain) -> None:
        self._workload, self._target, self._seeds = workload, target, seeds
        self._size, self._attain = size, attain
        self._whole = Traffic(0, len(workload))
        self._trials = 0
        self._rejected: list[tuple[str, float, int | None]] = []

    def plan(self, options: Sequence[Option]) -> Plan | None:
        """The plan; None if no fleet that may be had meets the target."""
        sizes = self._halve(options)
        found = [one for one in (self._confirm(size) for size in sizes) if one is not None]
        if not found:
            return None
        found.sort(key=lambda one: (one.cost, one.devices, -one.attainment.mean))
        smallest = min(range(len(found)), key=lambda place: (found[place].devices, found[place].cost))
        what_if = tuple(self._what_if(found[place]) for place in dict.fromkeys((0, smallest)))
        bounds = self._bounds(found)
        return Plan(tuple(found), 0, smallest, tuple(self._rejected), what_if, bounds, self._trials)

    def _halve(self, options: Sequence[Option]) -> list[Sized]:
        """Those that are left, sized on the whole trace."""
        parts = self._parts(len(options))
        left = [Sizing(option, self._whole, self._target) for option in options]
        for number, part in enumerate(parts, 1):
            begin, end = busiest(self._workload, ceil(part * len(self._workload)))
            sizings = [replace(one, traffic=Traffic(begin, end)) for one in left]
            sizes = self._do(f"round {number} of {len(parts)}: {len(sizings)} kinds", sizings)
            keep = len(sizes) if part == 1.0 else max(ceil(len(sizes) / 2), FINALISTS)
            best = self._best(sizes, keep)
            self._rejected += [
                (one.sizing.option.name, part, one.replicas) for place, one in enumerate(sizes) if place not in best
            ]
            left = [replace(sizes[place].sizing, start=sizes[place].replicas or 0) for place in best]
        return [sizes[place] for place in best]

    def _parts(self, count: int) -> list[float]:
        """The parts of the trace that the rounds see."""
        parts = [1.0]
        while count > FINALISTS and parts[0] * len(self._workload) > 2 * SHORTEST_PART:
            parts.insert(0, parts[0] / 2)
            count = ceil(count / 2)
        return parts

    def _best(self, sizes: Sequence[Sized], keep: int) -> list[int]:
        """The places of the `keep` best by price, and as many by devices; those without an answer are left out."""
        usable = [place for place, one in enumerate(sizes) if one.replicas is not None]
        by_cost = sorted(usable, key=lambda place: (sizes[place].cost, -sizes[place].attainment))[:keep]
        by_size = sorted(usable, key=lambda place: (sizes[place].devices, -sizes[place].attainment))[
            : max(keep // 2, 1)
        ]
        return list(dict.fromkeys([*by_cost, *by_size[: max(keep // 2, 1)]]))

    def _confirm(self, size: Sized) -> Found | None:
        """The same over all seeds, with more replicas if the mean misses the target."""
        option, replicas = size.sizing.option, size.replicas
        assert replicas is not None
        first: float | None = size.attainment
        for more in range(MOST_CORRECTIONS):
            if replicas + more > option.most:
                return None
            seeds = range(0 if first is None else 1, self._seeds)
            traffics = [replace(self._whole, seed=seed) for seed in seeds]
            trials = [Trial(option, replicas + more, traffic) for traffic in traffics]
            values = self._run(f"seeds: {option.name}", trials)
            interval = Interval((*([] if first is None else [first]), *values))
            if interval.mean >= self._target:
                return Found(option, replicas + more, interval)
            first = None
        return None

    def _what_if(self, found: Found) -> WhatIf:
        option, replicas = found.option, found.replicas
        busier = replace(self._whole, rate=MORE_TRAFFIC)
        sizes = self._do(
            "what if",
            [
                Sizing(option, self._whole, 1.0 - (1.0 - self._target) / 10.0, replicas + 1),
                Sizing(option, busier, self._target, ceil(MORE_TRAFFIC * replicas)),
            ],
        )
        trials = [Trial(option, replicas, busier)]
        trials += [Trial(option, replicas - 1, self._whole)] if replicas > 1 else []
        shares = self._run("what if", trials)
        return WhatIf(sizes[0].replicas, shares[0], sizes[1].replicas, shares[1] if replicas > 1 else 0.0)

    def _bounds(self, found: Sequence[Found]) -> Bounds:
        known = [one.option.setup.profile.error for one in found]
        errors = [ASSUMED_ERROR if error is None else error for error in known]
        sizings = [
            Sizing(one.option, self._whole, self._target, max(round(one.replicas * factor), 1), factor)
            for one, error in zip(found, errors, strict=True)
            for factor in (max(1.0 - error, 0.05), 1.0 + error)
        ]
        sizes = self._do("if the cost model is off", sizings)
        faster, slower = sizes[::2], sizes[1::2]
        return Bounds(
            max(errors),
            all(error is not None for error in known),
            tuple(one.replicas for one in faster),
            tuple(one.replicas for one in slower),
            _cheapest(faster),
            _cheapest(slower),
        )

    def _do(self, what: str, sizings: Sequence[Sizing]) -> list[Sized]:
        sizes = self._size(what, sizings)
        self._trials += sum(one.trials for one in sizes)
        return sizes

    def _run(self, what: str, trials: Sequence[Trial]) -> list[float]:
        self._trials += len(trials)
        return self._attain(what, trials)


def _cheapest(sizes: Sequence[Sized]) -> int | None:
    usable = [place for place, one in enumerate(sizes) if one.replicas is not None]
    return min(usable, key=lambda place: (sizes[place].cost, sizes[place].devices, place), default=None)
