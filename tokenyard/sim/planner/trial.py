"""Trials of the planner: the share of requests that a fleet serves within their targets, and the fleet size needed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor

import numpy as np

from tokenyard.base import ConfigError, Float64Array
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.outcome import Setup
from tokenyard.sim.traces.prompt_ids import UniqueContent
from tokenyard.sim.traces.workload import Workload

CHECK_REQUESTS = 128
MAX_DOUBLINGS = 12
MIN_PART_REQUESTS = 1500
"""Requests of the shortest part of a trace that tells anything."""

QUICK = 8
"""A size is sought on the busiest eighth of the traffic first."""
MINUTE_S = 60.0
USUAL_BATCH = 32
"""Rows that share the reading of the weights, for a first guess at the size of a fleet."""
TARGET_UTILIZATION = 0.85
"""How busy the devices of a fleet are when it is just large enough, for the same guess."""


@dataclass(frozen=True)
class FleetOption:
    """A fleet without its number of replicas.

    setup: setup of one replica.
    policy: name of the schedule policy, with a suffix for prefill engines and KV store.
    price: price of one device per hour, None if not given.
    max_replicas: number of available replicas.
    prefill_share: with `setup.disagg`, the share of engines that only prefill, rounded to whole engines; a fleet of one
        engine has none.
    """

    setup: Setup
    policy: str
    price: float | None
    max_replicas: int
    prefill_share: float = 0.0

    @property
    def name(self) -> str:
        """A name that distinguishes it from the other options."""
        ranks = f" x {self.setup.dp_size} ranks" if self.setup.dp_size > 1 else ""
        return f"{self.setup.profile.name}{ranks}, {self.setup.router}, {self.policy}"

    def devices(self, replicas: int) -> int:
        """Number of devices of `replicas` replicas."""
        return replicas * self.setup.dp_size * self.setup.profile.tp

    def cost(self, replicas: int) -> float:
        """Price of `replicas` replicas per hour, or without prices their number of devices."""
        return self.devices(replicas) * (1.0 if self.price is None else self.price)

    def fleet(self, replicas: int, slower: float = 1.0) -> Setup:
        """The setup of `replicas` replicas, with true and predicted times of all devices scaled by `slower`."""
        profile = self.setup.profile
        if slower != 1.0:
            profile = profile.scaled(slower)
        setup = replace(self.setup, profile=profile, replicas=replicas)
        if self.setup.disagg is None:
            return setup
        prefill = min(max(round(self.prefill_share * replicas), 1), replicas - 1)
        disagg = replace(self.setup.disagg, prefill_replicas=prefill) if prefill else None
        return replace(setup, replicas=replicas - prefill, disagg=disagg)


@dataclass(frozen=True)
class TrialTraffic:
    """The requests `begin` to `end` of the trace, at `rate` times its speed, with arrivals drawn by `seed` (0:
    recorded).
    """

    begin: int
    end: int
    seed: int = 0
    rate: float = 1.0

    @property
    def requests(self) -> int:
        """Number of requests."""
        return self.end - self.begin

    def of(self, workload: Workload) -> Workload:
        """The whole trace with these arrivals."""
        return reseeded(workload, self.seed).scaled(self.rate)


@dataclass(frozen=True)
class Trial:
    """One simulation.

    option: the fleet's kind.
    replicas: its size.
    traffic: what it serves.
    slower: factor on the profile's step times.
    """

    option: FleetOption
    replicas: int
    traffic: TrialTraffic
    slower: float = 1.0


@dataclass(frozen=True)
class Sizing:
    """A search for the fewest replicas of an option that serve `target` of the requests in time.

    Results of other trials are not simulated again.

    start: first number of replicas to try, 0 for a guess.
    too_few: replicas known to miss the target, 0 for none.
    enough: replicas known to meet the target.
    """

    option: FleetOption
    traffic: TrialTraffic
    target: float
    start: int = 0
    slower: float = 1.0
    too_few: int = 0
    enough: int | None = None


@dataclass(frozen=True)
class SizingResult:
    """The result of a search.

    replicas: the fewest that meet the target, None if `option.max_replicas` do not.
    attainment: a lower bound on the attainment of `replicas`, or an upper bound on that of `option.max_replicas`.
    trials: number of simulations that the search ran.
    """

    sizing: Sizing
    replicas: int | None
    attainment: float
    trials: int

    @property
    def cost(self) -> float:
        """Price of the fleet, or its number of devices; infinite for none."""
        return float("inf") if self.replicas is None else self.sizing.option.cost(self.replicas)

    @property
    def devices(self) -> float:
        """Number of devices; infinite for none."""
        return float("inf") if self.replicas is None else self.sizing.option.devices(self.replicas)


def attained(workload: Workload, trial: Trial, target: float = 0.0) -> float:
    """The share of requests that meet their targets; once it must be below `target`, an upper bound on it."""
    traffic = trial.traffic
    served, setup = traffic.of(workload), trial.option.fleet(trial.replicas, trial.slower)
    window = slice(traffic.begin, traffic.end)
    count = traffic.end - traffic.begin
    allowed = floor((1.0 - target) * count + 1e-9)
    run = Simulation(served, setup, window=window)
    for popped in run.until_end():
        if popped % CHECK_REQUESTS == 0 and (misses := run.misses(window)) > allowed:
            return 1.0 - misses / count
    run.check_policy()
    return float(run.so_far.met[window].mean())


def answered(workload: Workload, job: Sizing | Trial) -> SizingResult | float:
    """The result of a search, or the share of a trial that runs to its end."""
    return sized(workload, job) if isinstance(job, Sizing) else attained(workload, job)


def sized(workload: Workload, sizing: Sizing) -> SizingResult:
    """Find the fewest replicas.

    A number of replicas is too few if the busiest part alone misses more requests than the whole traffic may miss: a
        fleet that starts with that part is idle before it. With a start that is not a guess, each number has to pass
        that part first; without one, the search runs there and continues from its result. Only a cache filled by
        earlier requests makes the part easier; where prompts share prefixes, the number below is tried too.
    """
    quick = _quick_part(workload, sizing)
    if quick is None:
        return _searched(workload, sizing)
    shares = not (isinstance(workload.content, UniqueContent) or sizing.option.setup.settings.disable_radix_cache)
    if sizing.start and not shares:
        return _searched(workload, sizing, quick)
    least = _searched(workload, quick)
    if least.replicas is None:
        return replace(least, sizing=sizing)
    too_few = sizing.too_few
    if not shares:
        known = least.replicas - 1 if sizing.enough is None else min(least.replicas, sizing.enough) - 1
        too_few = max(too_few, known)
    found = _searched(workload, replace(sizing, start=least.replicas, too_few=too_few))
    return replace(found, sizing=sizing, trials=found.trials + least.trials)


def _quick_part(workload: Workload, sizing: Sizing) -> Sizing | None:
    """The same search in the busiest part of the traffic, which may miss as many requests as all of it may.

    None where the traffic is short, or the part could miss all.
    """
    begin, end = sizing.traffic.begin, sizing.traffic.end
    count = max(ceil((end - begin) / QUICK), MIN_PART_REQUESTS)
    allowed = floor((1.0 - sizing.target) * (end - begin) + 1e-9)
    if 2 * count > end - begin or 2 * allowed > count:
        return None
    first, last = busiest(workload, count, begin, end)
    return replace(sizing, traffic=replace(sizing.traffic, begin=first, end=last), target=1.0 - allowed / count)


def _searched(workload: Workload, sizing: Sizing, sieve: Sizing | None = None) -> SizingResult:
    """Search by trials. A number that fails in the smaller search `sieve` is not tried."""
    found: dict[int, float] = {}
    trials = 0

    def meets(replicas: int) -> bool:
        nonlocal trials
        trial = Trial(sizing.option, replicas, sizing.traffic, sizing.slower)
        trials += 1
        if sieve is not None:
            share = attained(workload, replace(trial, traffic=sieve.traffic), sieve.target)
            trials += share >= sieve.target
            if share < sieve.target:
                found[replicas] = 1.0 - (1.0 - share) * sieve.traffic.requests / sizing.traffic.requests
                return False
        found[replicas] = attained(workload, trial, sizing.target)
        return found[replicas] >= sizing.target

    start = sizing.start or guess(workload, sizing)
    replicas = smallest(meets, start, sizing.option.max_replicas, sizing.too_few, sizing.enough)
    unseen = 0.0 if replicas is None else sizing.target
    return SizingResult(sizing, replicas, found.get(replicas or sizing.option.max_replicas, unseen), trials)


def smallest(
    meets: Callable[[int], bool], start: int, most: int, too_few: int = 0, enough: int | None = None
) -> int | None:
    """The least number from 1 to `most` for which `meets` holds, None for none; `meets` must hold from some number on.

    It is bracketed by doubling steps from `start`, then bisected. `meets` is known to fail for `too_few` (0: for none)
    and to hold for `enough`.
    """
    low, high, step, tried_low = too_few, enough, max(start // 8, 1), too_few > 0
    probe = start
    while high is None or high - low > 1:
        if low >= most:
            return None
        probe = min(max(probe, low + 1), most if high is None else high - 1)
        if meets(probe):
            high, probe = probe, probe - step
        else:
            low, probe, tried_low = probe, probe + step, True
        if high is not None and tried_low:
            probe = (low + high) // 2
        step *= 2
    return high


def largest_scale(meets: Callable[[float], bool], start: float = 1.0, tolerance: float = 0.01) -> float:
    """The largest rate scale for which `meets` holds, within a relative `tolerance`; 0 if not even a tiny one does.

    `meets` must hold below the answer and fail above it. First the answer is bracketed by doubling or halving `start`,
    then bisected. Raises ConfigError if no bracket is found within `MAX_DOUBLINGS` doublings upwards.
    """
    low, high = 0.0, start
    if meets(start):
        low, high = _double(meets, start)
    else:
        for _ in range(MAX_DOUBLINGS):
            if meets(high / 2):
                low = high / 2
                break
            high /= 2
        if low == 0.0:
            return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _double(meets: Callable[[float], bool], start: float) -> tuple[float, float]:
    scale = start
    for _ in range(MAX_DOUBLINGS):
        if not meets(2 * scale):
            return scale, 2 * scale
        scale *= 2
    raise ConfigError(f"the target is met even at {scale:g} times the trace's rate; is the trace long enough to tell?")


def guess(workload: Workload, sizing: Sizing) -> int:
    """Estimate the replicas that the traffic needs: device time over the time in which it arrives."""
    traffic, setup = sizing.traffic, sizing.option.setup
    here = slice(traffic.begin, traffic.end)
    terms, arrivals = setup.profile.terms, workload.arrival_s[here]
    prompts, outputs = workload.prompt_tokens[here].astype(float), workload.output_tokens[here].astype(float)
    shared_ms = (terms.step_ms + max(terms.floor_ms, terms.dense_ms) + terms.tp_step_ms) / USUAL_BATCH
    prefill_ms = prompts * (terms.token_ms + terms.tp_token_ms + terms.area_ms * prompts / 2)
    decode_ms = outputs * (shared_ms + terms.row_ms + terms.context_ms * (prompts + outputs / 2))
    span_s = max(float(arrivals[-1] - arrivals[0]), 1.0) / traffic.rate
    busy = float((prefill_ms + decode_ms).sum()) * sizing.slower / 1e3 / span_s
    return max(ceil(busy / TARGET_UTILIZATION / setup.dp_size), 1)


def busiest(workload: Workload, count: int, first: int = 0, last: int | None = None) -> tuple[int, int]:
    """Begin and end of the `count` consecutive requests with the highest token rate, from `first` up to `last` (None:
    all).
    """
    last = len(workload) if last is None else last
    count = min(count, last - first)
    tokens = np.concatenate(([0], np.cumsum(workload.prompt_tokens.astype(np.int64) + workload.output_tokens)))
    begins = np.arange(first, last - count + 1, max(count // 8, 1))
    spans: Float64Array = workload.arrival_s[begins + count - 1] - workload.arrival_s[begins]
    rates = (tokens[begins + count] - tokens[begins]) / np.maximum(spans, 1e-9)
    begin = int(begins[int(np.argmax(rates))])
    return begin, begin + count


def reseeded(workload: Workload, seed: int) -> Workload:
    """The same requests in the same order, with the gaps between arrivals of the same minute shuffled: other bursts at
    the same rates. Seed 0 leaves them as they are.
    """
    if seed == 0:
        return workload
    rng, times = np.random.default_rng(seed), workload.arrival_s
    minute = np.floor(times / MINUTE_S).astype(np.int64)
    gaps = np.diff(times, prepend=0.0)
    order = np.lexsort((rng.random(len(times)), minute))
    return replace(workload, arrival_s=np.maximum.accumulate(np.cumsum(gaps[order])))
