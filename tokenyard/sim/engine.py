"""Running a workload through one engine, or through several behind a router, in virtual time."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    BoolArray,
    ConfigError,
    ExecutorInfo,
    Finish,
    Float64Array,
    Int32Array,
    Int64Array,
    SchedulerSettings,
)
from tokenyard.base.version import __version__
from tokenyard.cost import LinearCost, Profile, unloaded_prefill_s
from tokenyard.policy.adaptive import Adaptive, Switch
from tokenyard.sim.adaptive import Adapter
from tokenyard.sim.content import EOS_TOKEN, VOCAB_SIZE, BlankContent, Content
from tokenyard.sim.replica import NEVER_NS, Replica, SimExecutor, StepObserver
from tokenyard.sim.router import Fault, Fleet, Routing, make_routing
from tokenyard.sim.workload import Workload, to_ns
from tokenyard.tape.codec import Origin
from tokenyard.tape.recorder import Recorder, Sink

UNFINISHED, FINISHED, REJECTED = 0, 1, 2
PROGRESS_REQUESTS = 256

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The targets by which a request counts as met: TTFT at most max(`ttft_s`, `ttft_scale` x its unloaded prefill),
    and the mean time per output token at most `tpot_s`.

    A request's own targets come before these; a deadline replaces the first token's target (as in `base.SloTargets`).
    """

    ttft_s: float = 1.0
    ttft_scale: float = 5.0
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        """Raise ConfigError for a target that no request can meet."""
        if not (self.ttft_s >= 0.0 and self.ttft_scale >= 0.0 and self.tpot_s > 0.0):
            raise ConfigError("SLO targets must not be negative, and the time per output token above 0")
        if max(self.ttft_s, self.ttft_scale) == 0.0:
            raise ConfigError("--slo-ttft-ms and --slo-ttft-scale are both 0; no request could meet that")

    def first_token_s(self, workload: Workload, unloaded_s: Float64Array) -> Float64Array:
        """float64[n], the target for each request's first token; infinite if only the end has a deadline."""
        common = np.maximum(self.ttft_s, self.ttft_scale * unloaded_s)
        none_given = np.where(np.isnan(workload.deadline_s), common, np.inf)
        return np.where(np.isnan(workload.slo_ttft_s), none_given, workload.slo_ttft_s)

    def per_token_s(self, workload: Workload) -> Float64Array:
        """float64[n], the target for each request's mean time per output token."""
        return np.where(np.isnan(workload.slo_tpot_s), self.tpot_s, workload.slo_tpot_s)


@dataclass(frozen=True)
class Setup:
    """What is simulated: the engine's settings, the device's true costs, and around it the router and its replicas.

    `belief_scale` is the factor by which the scheduler's first cost model is too slow, `learn` whether measured steps
    correct it. `host_s` is CPU time per step; overlap is `settings.max_in_flight` 2. `kv_pool_tokens` None takes the
    profile's pool. With `oracle` each request asks for as many tokens as it will get.
    """

    profile: Profile
    settings: SchedulerSettings
    replicas: int = 1
    router: str = "round_robin"
    seed: int = 0
    host_s: float = 0.0
    kv_pool_tokens: int | None = None
    belief_scale: float = 1.0
    learn: bool = False
    oracle: bool = False
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def slo(self) -> SloTargets:
        """The targets of requests without their own, from the scheduler's settings."""
        settings = self.settings
        return SloTargets(settings.slo_ttft_ms / 1e3, settings.slo_ttft_scale, settings.slo_tpot_ms / 1e3)

    def belief(self) -> LinearCost:
        """The first cost model of the scheduler."""
        truth = self.profile.cost()
        return truth if self.belief_scale == 1.0 else LinearCost(truth.terms.scaled(self.belief_scale), truth.links)


@dataclass
class Outcome:
    """The outcome of each request, as columns by request number, and of the whole run.

    status: int32[n], UNFINISHED, FINISHED or REJECTED. Times in ns from the start of the trace, 0 where a stage was
    never reached. unloaded_s: float64[n], see `unloaded_prefill_s`. replica: int32[n], the replica that served it.
    policy_note: why another policy than the configured one decided; "" if it did not.
    """

    workload: Workload
    setup: Setup
    status: Int32Array
    admitted_ns: Int64Array
    first_token_ns: Int64Array
    finished_ns: Int64Array
    completion_tokens: Int32Array
    cached_tokens: Int32Array
    retractions: Int32Array
    replica: Int32Array
    unloaded_s: Float64Array
    counters: dict[str, int] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    policy_note: str = ""
    sim_seconds: float = 0.0
    busy_seconds: float = 0.0
    wall_seconds: float = 0.0
    decision_hash: str = ""
    predicted_cached_tokens: int = 0

    @property
    def arrival_ns(self) -> Int64Array:
        """int64[n], when each request arrived."""
        arrivals: Int64Array = np.round(self.workload.arrival_s * NS_PER_S).astype(np.int64)
        return arrivals

    @property
    def served(self) -> BoolArray:
        """bool[n], which requests ran to their end."""
        served: BoolArray = self.status == FINISHED
        return served

    @property
    def ttft_s(self) -> Float64Array:
        """float64[n], arrival to first token; NaN where there was none."""
        return self._seconds(self.first_token_ns - self.arrival_ns)

    @property
    def e2e_s(self) -> Float64Array:
        """float64[n], arrival to end; NaN for requests that did not finish."""
        return self._seconds(self.finished_ns - self.arrival_ns)

    @property
    def tpot_s(self) -> Float64Array:
        """float64[n], mean time per output token after the first; 0 for answers of one token, NaN if unfinished."""
        gaps = np.maximum(self.completion_tokens - 1, 1)
        return self._seconds(self.finished_ns - self.first_token_ns) / gaps

    @property
    def ttft_slo_s(self) -> Float64Array:
        """float64[n], the first-token target of each request; infinite where only the end has a deadline."""
        return self.setup.slo.first_token_s(self.workload, self.unloaded_s)

    @property
    def late_s(self) -> Float64Array:
        """float64[n], how far each request's first token or end was beyond its target; NaN if unfinished."""
        late: Float64Array = np.maximum(self.ttft_s - self.ttft_slo_s, self._overdue_s)
        return np.maximum(late, 0.0)

    @property
    def _overdue_s(self) -> Float64Array:
        """float64[n], how far each end was beyond its deadline, far below 0 where there is none."""
        overdue: Float64Array = self.e2e_s - np.where(
            np.isnan(self.workload.deadline_s), np.inf, self.workload.deadline_s
        )
        return overdue

    @property
    def met(self) -> BoolArray:
        """bool[n], whether each request met its own targets or the run's; rejected and unfinished ones did not."""
        with np.errstate(invalid="ignore"):
            fast = self.tpot_s <= self.setup.slo.per_token_s(self.workload)
            met: BoolArray = self.served & (self.late_s <= 0.0) & fast
        return met

    def _seconds(self, spans: Int64Array) -> Float64Array:
        seconds: Float64Array = np.where(self.served, spans / NS_PER_S, np.nan)
        return seconds


def simulate(
    workload: Workload,
    setup: Setup,
    observer: StepObserver | None = None,
    progress: Progress | None = None,
    tape: Sink | None = None,
) -> Outcome:
    """Serve `workload` with `setup` and return the outcome.

    `observer` sees every step of the first replica and `tape` records its scheduler; `progress` is called with
    (submitted, all) at intervals. Raises ConfigError for settings that cannot work, and, with its file and line, for a
    policy of the user's own that fails: the numbers would be those of fcfs.
    """
    begin = time.perf_counter()
    run = _Run(workload, setup, observer, tape)
    for index in range(len(workload)):
        run.submit(index)
        if index % PROGRESS_REQUESTS == 0:
            run.check_policy()
            if progress is not None:
                progress(index, len(workload))
    outcome = run.finish()
    outcome.wall_seconds = time.perf_counter() - begin
    if progress is not None:
        progress(len(workload), len(workload))
    return outcome


def executor_info(workload: Workload, setup: Setup) -> ExecutorInfo:
    """The simulated device: a context that holds the workload's longest request, the profile's KV pool."""
    page = setup.settings.page_size
    pool_tokens = setup.kv_pool_tokens if setup.kv_pool_tokens is not None else setup.profile.kv_pool_tokens
    if pool_tokens < page:
        raise ConfigError(f"a KV pool of {pool_tokens} tokens does not hold one page of {page}")
    return ExecutorInfo(
        model=setup.profile.model,
        device=setup.profile.device,
        dtype="none",
        vocab_size=VOCAB_SIZE,
        context_length=setup.settings.context_length,
        eos_token_ids=(EOS_TOKEN,),
        page_size=page,
        num_pages=pool_tokens // page,
        max_pool_rows=setup.settings.max_running_requests,
        kv_bytes_per_token=setup.profile.kv_bytes_per_token,
    )


class _Run:
    """The state of one simulation."""

    def __init__(self, workload: Workload, setup: Setup, observer: StepObserver | None, tape: Sink | None) -> None:
        if setup.replicas < 1:
            raise ConfigError(f"--replicas is {setup.replicas}; it must be at least 1")
        self._workload, self._setup = workload, setup
        self._truth: LinearCost = setup.profile.cost()
        self._content: Content = BlankContent() if setup.settings.disable_radix_cache else workload.content
        self._unloaded_s: dict[int, float] = {}
        self._outcome = _blank_outcome(workload, setup)
        routing = self._make_routing()
        self._routing = routing if setup.replicas > 1 else None
        self._executors: dict[int, SimExecutor] = {}
        self._ended_replicas: list[Replica] = []
        others = [self._replica(number, None, None) for number in range(1, setup.replicas)]
        self._replicas = [self._replica(0, observer, tape), *others]
        adaptive = setup.settings.schedule_policy == Adaptive.name
        self._adapters = [Adapter(setup.settings, replica) for replica in self._replicas] if adaptive else []
        self._described = self._replicas[0].scheduler.snapshot(0).policy

        if self._adapters and setup.fleet.faults:
            raise ConfigError("the policy adaptive cannot be simulated with faults")
        self._faults = sorted(_fault_events(setup.fleet.faults), key=lambda event: event[0])

    def _make_routing(self) -> Routing:
        setup, info = self._setup, executor_info(self._workload, self._setup)
        return make_routing(setup.router, setup.replicas, setup.seed, info.num_pages * info.page_size, setup.fleet)

    def _replica(self, number: int, observer: StepObserver | None, tape: Sink | None) -> Replica:
        setup, info = self._setup, executor_info(self._workload, self._setup)
        distinct = not setup.settings.disable_radix_cache
        executor = SimExecutor(info, self._truth, self._workload.output_tokens, distinct)
        self._executors[number] = executor
        routing, by_events = self._routing, setup.fleet.kv_event_lag_s is not None
        settings = replace(setup.settings, enable_kv_events=True) if by_events else setup.settings
        origin = Origin(settings, info, setup.belief(), setup.learn)
        scheduler = origin.scheduler() if tape is None else Recorder(origin, tape, None, __version__)
        return Replica(
            scheduler,
            executor,
            self._note_finish,
            setup.settings.max_in_flight,
            setup.host_s,
            observer,
            None if routing is None else routing.first_token,
            partial(routing.told, number) if routing is not None and by_events else None,
        )

    def submit(self, index: int) -> None:
        """Bring all replicas to the arrival of request `index` and give it to one of them."""
        arrival_ns = to_ns(float(self._workload.arrival_s[index]))
        while self._faults and self._faults[0][0] <= arrival_ns:
            self._next_fault()
        self._advance(arrival_ns, to_arrival=True)
        self._outcome.unloaded_s[index] = self._unloaded(int(self._workload.prompt_tokens[index]))
        self._send(index, arrival_ns)

    def _send(self, index: int, now: int) -> None:
        """Give request `index` to one of the replicas, which are all at `now`."""
        request = self._workload.request(index, self._content, true_length=self._setup.oracle)
        chosen = 0 if self._routing is None else self._routing.choose(request, now)
        self._outcome.replica[index] = chosen
        self._replicas[chosen].submit(request, now)
        if self._adapters:
            self._adapters[chosen].submitted(request, now)

    def _next_fault(self) -> None:
        """Begin or end the next fault of a replica."""
        at_ns, fault, ends = self._faults.pop(0)
        self._advance(at_ns, to_arrival=True)
        if not fault.deadly:
            self._executors[fault.replica].slow_down(1.0 if ends else fault.factor)
        elif self._routing is not None and ends:
            self._routing.dead.discard(fault.replica)
        elif self._routing is not None:
            self._ended_replicas.append(self._replicas[fault.replica])
            self._replicas[fault.replica] = self._replica(fault.replica, None, None)
            # They start again elsewhere; an engine that continues an answer has to compute all of it again, too.
            for index in self._routing.died(fault.replica):
                self._send(index, at_ns)

    def _advance(self, until: int, *, to_arrival: bool) -> None:
        """Do everything that is due before `until` (ns), in all replicas."""
        for index, replica in enumerate(self._replicas):
            if self._adapters:
                self._adapters[index].advance(until, to_arrival=to_arrival)
            else:
                replica.advance(until, to_arrival=to_arrival)

    def _unloaded(self, prompt_tokens: int) -> float:
        """Seconds of the whole prompt's prefill on the idle device."""
        seconds = self._unloaded_s.get(prompt_tokens)
        if seconds is None:
            seconds = self._unloaded_s[prompt_tokens] = unloaded_prefill_s(self._truth, prompt_tokens)
        return seconds

    def check_policy(self) -> None:
        """Raise ConfigError if a policy of the user's own has failed."""
        if ":" in self._setup.settings.schedule_policy:
            for replica in self._replicas:
                if failure := replica.scheduler.snapshot(replica.now).policy_failure:
                    raise ConfigError(f"the policy {failure}")

    def _policy_note(self, replica: Replica) -> str:
        """Why this replica did not use the configured policy; "" if it did."""
        state = replica.scheduler.snapshot(replica.now)
        if state.policy_note or self._adapters or state.policy == self._described:
            return state.policy_note
        return f"ended as {state.policy}"

    def _note_finish(self, finish: Finish) -> None:
        outcome, number = self._outcome, finish.number
        outcome.status[number] = REJECTED if finish.reason == "abort" else FINISHED
        outcome.admitted_ns[number] = finish.admitted_ns
        outcome.first_token_ns[number] = finish.first_token_ns
        outcome.finished_ns[number] = finish.finished_ns
        outcome.completion_tokens[number] = finish.completion_tokens
        outcome.cached_tokens[number] = finish.cached_tokens
        outcome.retractions[number] = finish.retractions
        replica = int(outcome.replica[number])
        if self._routing is not None:
            self._routing.finished(finish)
            seen_ns = self._routing.first_seen.pop(number, finish.first_token_ns)
            outcome.first_token_ns[number] = min(seen_ns, finish.first_token_ns)
        if self._adapters:
            self._adapters[replica].finished(finish)

    def finish(self) -> Outcome:
        """Run everything to its end and return the outcome."""
        outcome = self._outcome
        while self._faults:
            self._next_fault()
        self._advance(NEVER_NS, to_arrival=False)
        self.check_policy()
        everyone = [*self._replicas, *self._ended_replicas]
        outcome.sim_seconds = max(replica.now for replica in self._replicas) / NS_PER_S
        outcome.busy_seconds = sum(replica.busy_ns for replica in everyone) / NS_PER_S
        if self._routing is not None:
            outcome.predicted_cached_tokens = self._routing.predicted_tokens
        outcome.decision_hash = b"".join(replica.decision_hash() for replica in self._replicas).hex()[:64]
        outcome.counters = _sum_counters(everyone)
        outcome.switches = [switch for adapter in self._adapters for switch in adapter.judge.latest]
        outcome.policy_note = "; ".join(dict.fromkeys(filter(None, map(self._policy_note, self._replicas))))
        return outcome


def _fault_events(faults: tuple[Fault, ...]) -> Iterator[tuple[int, Fault, bool]]:
    """When each fault begins and ends, as (time in ns, fault, whether it ends)."""
    for fault in faults:
        yield to_ns(fault.at_s), fault, False
        yield to_ns(fault.at_s + fault.for_s), fault, True


def _sum_counters(replicas: list[Replica]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for replica in replicas:
        for name, count in asdict(replica.scheduler.snapshot(replica.now).counters).items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _blank_outcome(workload: Workload, setup: Setup) -> Outcome:
    count = len(workload)
    return Outcome(
        workload=workload,
        setup=setup,
        status=np.full(count, UNFINISHED, np.int32),
        admitted_ns=np.zeros(count, np.int64),
        first_token_ns=np.zeros(count, np.int64),
        finished_ns=np.zeros(count, np.int64),
        completion_tokens=np.zeros(count, np.int32),
        cached_tokens=np.zeros(count, np.int32),
        retractions=np.zeros(count, np.int32),
        replica=np.zeros(count, np.int32),
        unloaded_s=np.zeros(count, np.float64),
    )
