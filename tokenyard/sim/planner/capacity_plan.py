"""The planner's search: among many fleet options, the smallest and the cheapest fleet that meet the SLO.

Options are eliminated by successive halving (Jamieson and Talwalkar 2016). All are sized on a short, busy part of the
trace, the better half on a longer one, the finalists on the whole trace, and these also with arrivals drawn again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from statistics import mean

from tokenyard.sim.planner.trial import (
    MIN_PART_REQUESTS,
    FleetOption,
    Sizing,
    SizingResult,
    Trial,
    TrialTraffic,
    busiest,
    smallest,
)
from tokenyard.sim.report.intervals import share_bounds
from tokenyard.sim.traces.workload import Workload

FINALISTS = 3
STEP = 4
"""How much more of the trace each round of the halving sees than the one before."""
MORE_TRAFFIC = 1.5
ASSUMED_ERROR = 0.2
"""The assumed error of a cost model whose error was not measured."""
MIN_SPEEDUP = 0.05


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean of shares over seeds with its 95 % interval (`share_bounds`).

    values: one share per seed.
    requests: number of requests behind each share.
    """

    values: tuple[float, ...]
    requests: int

    @property
    def mean(self) -> float:
        """The mean of the shares."""
        return mean(self.values)

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval, within 0 and 1."""
        return share_bounds(self.values, self.requests)


@dataclass(frozen=True)
class SizedFleet:
    """A fleet option with the number of replicas that meets the target on average over the seeds.

    recorded: replicas that meet the target with the recorded arrivals; one fewer does not.
    one_fewer: attainment with one replica fewer, over the same seeds; None if that was not simulated.
    """

    option: FleetOption
    replicas: int
    attainment: ConfidenceInterval
    recorded: int
    one_fewer: ConfidenceInterval | None = None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.option.devices(self.replicas)

    @property
    def cost(self) -> float:
        """Price per hour, or without prices the number of devices."""
        return self.option.cost(self.replicas)


@dataclass(frozen=True)
class WhatIf:
    """How a fleet copes with changes.

    More traffic is simulated on the busiest quarter of a long trace only.

    nine_more, at_more_traffic: replicas needed, None if there are not as many.
    more_traffic: share that meets its targets with the fleet unchanged.
    one_down: the same with one replica down, over all seeds.
    requests: number of requests behind `more_traffic`.
    """

    nine_more: int | None
    more_traffic: float
    at_more_traffic: int | None
    one_down: ConfidenceInterval
    requests: int


@dataclass(frozen=True)
class _PartSizing:
    """The size that a fleet needs for the part of the trace on which changes are simulated.

    replicas: a guess.
    too_few: replicas known to miss the target.
    enough: replicas known to meet it, None if not known.
    """

    replicas: int
    too_few: int
    enough: int | None


@dataclass(frozen=True)
class CostErrorBounds:
    """The decision repeated for a cost model that is off by `error`. A long trace is simulated on its busiest quarter.

    faster, slower: replicas of each finalist on faster and on slower devices, None for more than are available.
    cheapest_if_faster, cheapest_if_slower: the cheapest finalist then.
    """

    error: float
    measured: bool
    faster: tuple[int | None, ...]
    slower: tuple[int | None, ...]
    cheapest_if_faster: int | None
    cheapest_if_slower: int | None


@dataclass(frozen=True)
class EliminatedOption:
    """A fleet option that is not a finalist.

    part: part of the requests that it was sized on.
    replicas: replicas needed for that part, None for more than are available.
    attainment: attainment with `replicas`, or at most with all that are available.
    """

    option: FleetOption
    part: float
    replicas: int | None
    attainment: float


@dataclass(frozen=True)
class CapacityPlan:
    """The result of the search.

    finalists: the cheapest first.
    cheapest, smallest: indices into `finalists`.
    """

    finalists: tuple[SizedFleet, ...]
    cheapest: int
    smallest: int
    eliminated: tuple[EliminatedOption, ...]
    what_if: tuple[WhatIf, ...]
    bounds: CostErrorBounds
    trials: int


Each = Callable[[str, Sequence[Sizing | Trial]], list[SizingResult | float]]
"""Does several searches and trials, in parallel where it can; with a word for the progress bar. See `answered`."""


class CapacityPlanner:
    """One search."""

    def __init__(self, workload: Workload, target: float, seeds: int, each: Each) -> None:
        self._workload, self._target, self._seeds, self._each = workload, target, seeds, each
        self._on_part: dict[str, int | None] = {}
        self._whole = self._part = TrialTraffic(0, len(workload))
        if len(workload) > STEP * MIN_PART_REQUESTS:
            self._part = TrialTraffic(*busiest(workload, ceil(len(workload) / STEP)))
        self._trials = 0
        self.eliminated: list[EliminatedOption] = []

    def plan(self, options: Sequence[FleetOption]) -> CapacityPlan | None:
        """The plan; None if no allowed fleet meets the target. `eliminated` then has the attainment that each option
        reached.
        """
        sizes = self._halve(options)
        found = self._found(sizes)
        if not found:
            return None
        found.sort(key=lambda one: (one.cost, one.devices, -one.attainment.mean))
        smallest = min(range(len(found)), key=lambda place: (found[place].devices, found[place].cost))
        what_if, bounds = self._questions(found, [found[place] for place in dict.fromkeys((0, smallest))])
        return CapacityPlan(tuple(found), 0, smallest, tuple(self.eliminated), what_if, bounds, self._trials)

    def _found(self, sizes: Sequence[SizingResult]) -> list[SizedFleet]:
        """The options that meet the target over all seeds.

        An option that would be dearer and no smaller than one that meets the target even with one replica fewer is
        neither the cheapest nor the smallest, so it is sized with the recorded arrivals only.
        """
        found: list[SizedFleet] = []
        for size in sorted(sizes, key=lambda one: (one.cost, one.devices, -one.attainment)):
            option, replicas = size.sizing.option, size.replicas
            assert replicas is not None
            cost, devices = option.cost(replicas - 1), option.devices(replicas - 1)
            if any(one.cost < cost and one.devices <= devices for one in found):
                share = ConfidenceInterval((size.attainment,), len(self._workload))
                found.append(SizedFleet(option, replicas, share, replicas))
            elif (one := self._confirm(size)) is not None:
                found.append(one)
        return found

    def _halve(self, options: Sequence[FleetOption]) -> list[SizingResult]:
        """The remaining options, sized on the whole trace."""
        parts = self._parts(len(options))
        left = [Sizing(option, self._whole, self._target) for option in options]
        for number, part in enumerate(parts, 1):
            begin, end = busiest(self._workload, ceil(part * len(self._workload)))
            sizings = [replace(one, traffic=TrialTraffic(begin, end)) for one in left]
            sizes = self._do(f"round {number} of {len(parts)}: {len(sizings)} kinds", sizings)
            keep = len(sizes) if part == 1.0 else max(ceil(len(sizes) / 2), FINALISTS)
            best = self._best(sizes, keep)
            self.eliminated += [
                EliminatedOption(one.sizing.option, part, one.replicas, one.attainment)
                for place, one in enumerate(sizes)
                if place not in best
            ]
            left = [replace(sizes[place].sizing, start=sizes[place].replicas or 0) for place in best]
        return [sizes[place] for place in best]

    def _parts(self, count: int) -> list[float]:
        """The parts of the trace for each round."""
        parts = [1.0]
        while count > FINALISTS and parts[0] * len(self._workload) > 2 * MIN_PART_REQUESTS:
            parts.insert(0, max(parts[0] / STEP, MIN_PART_REQUESTS / len(self._workload)))
            count = ceil(count / 2)
        return parts

    def _best(self, sizes: Sequence[SizingResult], keep: int) -> list[int]:
        """Indices of the `keep` best options by price, and as many by devices, among those with an answer."""
        usable = [place for place, one in enumerate(sizes) if one.replicas is not None]
        by_cost = sorted(usable, key=lambda place: (sizes[place].cost, -sizes[place].attainment))[:keep]
        by_size = sorted(usable, key=lambda place: (sizes[place].devices, -sizes[place].attainment))[
            : max(keep // 2, 1)
        ]
        return list(dict.fromkeys([*by_cost, *by_size[: max(keep // 2, 1)]]))

    def _confirm(self, size: SizingResult) -> SizedFleet | None:
        """The fewest replicas of an option that meet the target on average over all seeds."""
        option, recorded = size.sizing.option, size.replicas
        assert recorded is not None
        shares: dict[int, ConfidenceInterval] = {}

        def meets(replicas: int) -> bool:
            known = (size.attainment,) if replicas == recorded else ()
            traffics = [replace(self._whole, seed=seed) for seed in range(len(known), self._seeds)]
            values = self._run(f"seeds: {option.name}", [Trial(option, replicas, traffic) for traffic in traffics])
            shares[replicas] = ConfidenceInterval((*known, *values), len(self._workload))
            return shares[replicas].mean >= self._target

        replicas = smallest(meets, recorded, option.max_replicas)
        if replicas is None:
            self.eliminated.append(EliminatedOption(option, 1.0, None, shares[option.max_replicas].mean))
            return None
        return SizedFleet(option, replicas, shares[replicas], recorded, shares.get(replicas - 1))

    def _questions(
        self, found: Sequence[SizedFleet], asked: Sequence[SizedFleet]
    ) -> tuple[tuple[WhatIf, ...], CostErrorBounds]:
        """Simulate changes for the fleets `asked`, and the decision with an error in the cost model.

        All simulations run in one batch, so that no process is idle.
        """
        known = [one.option.setup.profile.error for one in found]
        errors = [ASSUMED_ERROR if error is None else error for error in known]
        usual = dict(zip(map(id, found), self._usual(found), strict=True))
        sizings = [self._for_one_more_nine(one) for one in asked]
        sizings += [self._for_more_traffic(one, usual[id(one)]) for one in asked]
        sizings += [self._faster(one, usual[id(one)], error) for one, error in zip(found, errors, strict=True)]
        sizings += [self._slower(one, usual[id(one)], error) for one, error in zip(found, errors, strict=True)]
        busier = replace(self._part, rate=MORE_TRAFFIC)
        trials = [Trial(one.option, one.replicas, busier) for one in asked]
        answers, shares = self._ask("what if", sizings, trials)
        sizes = iter(answers)
        nine = [one.replicas for one in islice(sizes, len(asked))]
        more, faster, slower = (
            [_moved(one, usual[id(one)], size) for one, size in zip(those, islice(sizes, len(those)), strict=True)]
            for those in (asked, found, found)
        )
        none = ConfidenceInterval((0.0,), len(self._workload))
        what_if = [
            WhatIf(nine[place], shares[place], more[place].replicas, one.one_fewer or none, self._part.requests)
            for place, one in enumerate(asked)
        ]
        bounds = CostErrorBounds(
            max(errors),
            all(error is not None for error in known),
            tuple(one.replicas for one in faster),
            tuple(one.replicas for one in slower),
            _cheapest(faster),
            _cheapest(slower),
        )
        return tuple(what_if), bounds

    def _usual(self, found: Sequence[SizedFleet]) -> list[_PartSizing]:
        """The size of each fleet on the part of the trace on which changes are simulated."""
        if self._part == self._whole:
            return [_PartSizing(one.recorded, one.recorded - 1, one.recorded) for one in found]
        begin = [Sizing(one.option, self._part, self._target, one.replicas) for one in found]
        missing = [sizing for sizing in begin if sizing.option.name not in self._on_part]
        for size in self._do("the busiest part", missing):
            self._on_part[size.sizing.option.name] = size.replicas
        sizes = [self._on_part[one.option.name] for one in found]
        return [
            _PartSizing(one.replicas, 0, None) if size is None else _PartSizing(size, size - 1, size)
            for one, size in zip(found, sizes, strict=True)
        ]

    def _for_one_more_nine(self, one: SizedFleet) -> Sizing:
        """Size a fleet for one more nine of attainment, on the whole trace."""
        target = 1.0 - (1.0 - self._target) / 10.0
        sizing = Sizing(one.option, self._whole, target, one.replicas + 1, too_few=one.recorded - 1)
        return _knowing(sizing, one.replicas, one.attainment.values[0])

    def _for_more_traffic(self, one: SizedFleet, usual: _PartSizing) -> Sizing:
        traffic, start = replace(self._part, rate=MORE_TRAFFIC), ceil(MORE_TRAFFIC * usual.replicas)
        return Sizing(one.option, traffic, self._target, start, too_few=usual.too_few)

    def _faster(self, one: SizedFleet, usual: _PartSizing, error: float) -> Sizing:
        times = off_by(error)[0]
        start = max(round(usual.replicas * times), 1)
        return Sizing(one.option, self._part, self._target, start, times, enough=usual.enough)

    def _slower(self, one: SizedFleet, usual: _PartSizing, error: float) -> Sizing:
        times = off_by(error)[1]
        start = round(usual.replicas * times)
        return Sizing(one.option, self._part, self._target, start, times, too_few=usual.too_few)

    def _do(self, what: str, sizings: Sequence[Sizing]) -> list[SizingResult]:
        return self._ask(what, sizings, ())[0]

    def _run(self, what: str, trials: Sequence[Trial]) -> list[float]:
        return self._ask(what, (), trials)[1]

    def _ask(
        self, what: str, sizings: Sequence[Sizing], trials: Sequence[Trial]
    ) -> tuple[list[SizingResult], list[float]]:
        answers = self._each(what, [*sizings, *trials])
        sizes = [one for one in answers if isinstance(one, SizingResult)]
        self._trials += sum(one.trials for one in sizes) + len(trials)
        for one in sizes:
            if replace(one.sizing, start=0) == Sizing(one.sizing.option, self._part, self._target):
                self._on_part[one.sizing.option.name] = one.replicas
        return sizes, [one for one in answers if not isinstance(one, SizingResult)]


def off_by(error: float) -> tuple[float, float]:
    """Factors on step times for a cost model that is off by `error`, a share: on faster devices, on slower."""
    return max(1.0 - error, MIN_SPEEDUP), 1.0 + error


def _moved(found: SizedFleet, usual: _PartSizing, other: SizingResult) -> SizingResult:
    """The size of `found` on the whole trace, assuming that it changes there as it does on a part of it."""
    if other.replicas is None or usual.enough is None:
        return other
    replicas = max(found.replicas + other.replicas - usual.replicas, 1)
    return replace(other, replicas=replicas if replicas <= found.option.max_replicas else None)


def _knowing(sizing: Sizing, replicas: int, share: float) -> Sizing:
    """The same search, with the known `share` of requests that `replicas` replicas serve in time."""
    if share >= sizing.target:
        return replace(sizing, enough=replicas)
    return replace(sizing, too_few=replicas)


def _cheapest(sizes: Sequence[SizingResult]) -> int | None:
    usable = [place for place, one in enumerate(sizes) if one.replicas is not None]
    return min(usable, key=lambda place: (sizes[place].cost, sizes[place].devices, place), default=None)
