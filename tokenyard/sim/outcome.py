"""The setup of a simulation and its outcome."""

from dataclasses import dataclass, field, replace

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    BoolArray,
    ConfigError,
    ExecutorInfo,
    Float64Array,
    Int32Array,
    Int64Array,
    SchedulerSettings,
    StateGroup,
)
from tokenyard.cost import LinearCost, Profile
from tokenyard.policy.adaptive import PolicySwitch
from tokenyard.policy.tenant_limits import rank_share
from tokenyard.sim.engine.speculation import Speculation
from tokenyard.sim.fleet.autoscaler import ScalingRun
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.kv.disagg_settings import DisaggSettings, KvStoreSettings
from tokenyard.sim.kv.kv_store import KvStoreTotals
from tokenyard.sim.kv.transfer_figures import TransferTimes
from tokenyard.sim.traces.prompt_ids import EOS_TOKEN, VOCAB_SIZE
from tokenyard.sim.traces.workload import Workload

UNFINISHED, FINISHED, REJECTED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class DefaultSlo:
    """Targets that decide whether a request is met.

    TTFT is at most max(`ttft_s`, `ttft_scale` x the unloaded prefill), and the mean time per output token at most
    `tpot_s`. A request's own targets take precedence; a deadline replaces the target of the first token.
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
        """float64[n], TTFT target of each request; infinite if only the end has a deadline."""
        common = np.maximum(self.ttft_s, self.ttft_scale * unloaded_s)
        none_given = np.where(np.isnan(workload.deadline_s), common, np.inf)
        return np.where(np.isnan(workload.slo_ttft_s), none_given, workload.slo_ttft_s)

    def per_token_s(self, workload: Workload) -> Float64Array:
        """float64[n], target for each request's mean time per output token."""
        return np.where(np.isnan(workload.slo_tpot_s), self.tpot_s, workload.slo_tpot_s)


@dataclass(frozen=True)
class Setup:
    """What is simulated: the engine's settings, the device's true costs, and around it the router and its replicas.

    profile: the device's true costs.
    settings: of an engine; its ranks share them as in a server. `max_in_flight` 2 is overlap scheduling.
    replicas: engines behind the router, without prefill engines.
    dp_size: ranks of each engine; each is a scheduler with its own device.
    router: routing policy.
    seed: of the router's draws and of speculation.
    host_s: CPU time per step, in seconds.
    kv_pool_tokens: KV pool of each scheduler; None takes the profile's.
    prior_scale: factor by which the scheduler's prior cost model is too slow.
    learn: whether measured steps correct the scheduler's cost model.
    oracle: each request's max_new_tokens is its true output length.
    fleet: routers, faults and drains.
    disagg: PD disaggregation, None for none; prefill engines have the numbers after the replicas.
    speculation: speculative decoding, None for none.
    kv_store: the KV store of each scheduler, None for none.
    """

    profile: Profile
    settings: SchedulerSettings
    replicas: int = 1
    dp_size: int = 1
    router: str = "round_robin"
    seed: int = 0
    host_s: float = 0.0
    kv_pool_tokens: int | None = None
    prior_scale: float = 1.0
    learn: bool = False
    oracle: bool = False
    fleet: Fleet = field(default_factory=Fleet)
    disagg: DisaggSettings | None = None
    speculation: Speculation | None = None
    kv_store: KvStoreSettings | None = None

    @property
    def slo(self) -> DefaultSlo:
        """Targets of requests without their own, from the scheduler's settings."""
        settings = self.settings
        return DefaultSlo(settings.slo_ttft_ms / 1e3, settings.slo_ttft_scale, settings.slo_tpot_ms / 1e3)

    @property
    def schedulers(self) -> int:
        """Number of schedulers in all engines."""
        return self.engines * self.dp_size

    @property
    def engines(self) -> int:
        """Number of engines, prefill engines included."""
        return self.replicas + (0 if self.disagg is None else self.disagg.prefill_replicas)

    @property
    def router_policy(self) -> str:
        """How routers choose: with prefill engines that they name, first the policy for those."""
        disagg = self.disagg
        return (
            self.router
            if disagg is None or disagg.mode == "both"
            else f"{disagg.prefill_policy}, {disagg.decode_policy}"
        )

    @property
    def devices(self) -> int:
        """Number of devices in all engines."""
        return sum(self.dp_size * self.profile_of(replica).tp for replica in range(self.engines))

    def settings_of(self, rank: int) -> SchedulerSettings:
        """The settings of one rank: its part of the engine's (as in `engine.processes.engine_config`)."""
        ranks, whole = self.dp_size, self.settings
        if ranks == 1:
            return whole
        running, queued = (
            rank_share(most, rank, ranks) for most in (whole.max_running_requests, whole.max_queued_requests)
        )
        return replace(whole, max_running_requests=running, max_queued_requests=queued, dp_size=ranks)

    def profile_of(self, replica: int) -> Profile:
        """The device of a replica."""
        return self.fleet.profiles.get(replica, self.profile)

    def prior(self, replica: int = 0) -> LinearCost:
        """The first cost model of the schedulers of a replica."""
        truth = self.profile_of(replica).cost()
        if self.disagg is not None:
            truth.links["network"] = self.disagg.link
        return truth if self.prior_scale == 1.0 else truth.scaled(self.prior_scale)


@dataclass(frozen=True, slots=True)
class SchedulerRun:
    """Totals of one scheduler: device time, counters, and how often it was restarted."""

    busy_s: float
    counters: dict[str, int]
    restarts: int = 0


@dataclass
class Outcome:
    """The outcome of each request, as columns by request number, and of the whole run.

    Times are in ns from the start of the trace, 0 for a stage never reached. Arrivals are those of `workload`.

    status: int32[n], UNFINISHED, FINISHED or REJECTED.
    place: int32[n], scheduler that served the request, -1 for none: rank r of replica e is number e * dp_size + r.
    sent_ns: int64[n], when the request left the router.
    unloaded_s: float64[n], see `unloaded_prefill_s`.
    policy_note: why another policy than the configured one decided, "" if it did not.
    schedulers: totals per scheduler.
    transfers: KV transfers; None without prefill engines.
    kv_store: counters of the KV store; None without one.
    scaling: what the autoscaler did; None without one.
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
    place: Int32Array
    sent_ns: Int64Array
    unloaded_s: Float64Array
    counters: dict[str, int] = field(default_factory=dict)
    switches: list[PolicySwitch] = field(default_factory=list)
    policy_note: str = ""
    sim_seconds: float = 0.0
    schedulers: list[SchedulerRun] = field(default_factory=list)
    wall_seconds: float = 0.0
    decision_hash: str = ""
    predicted_cached_tokens: int = 0
    transfers: TransferTimes | None = None
    kv_store: KvStoreTotals | None = None
    scaling: ScalingRun | None = None

    @property
    def replica(self) -> Int32Array:
        """int32[n], the replica that served each request, -1 for none."""
        replicas: Int32Array = self.place // self.setup.dp_size
        return replicas

    @property
    def busy_seconds(self) -> float:
        """Seconds of work summed over all devices."""
        return sum(run.busy_s for run in self.schedulers)

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
        return self._seconds(self.first_token_ns - self.arrival_ns) + self._outside_s

    @property
    def e2e_s(self) -> Float64Array:
        """float64[n], arrival to end; NaN for requests that did not finish."""
        return self._seconds(self.finished_ns - self.arrival_ns) + self._outside_s

    @property
    def _outside_s(self) -> Float64Array | float:
        """float64[n], what the engine's other processes add to each request, by the first profile; 0 for nothing."""
        profile = self.setup.profile
        if not (profile.request_ms or profile.request_us_per_token):
            return 0.0
        prompts: Float64Array = self.workload.prompt_tokens.astype(np.float64)
        return profile.request_ms / 1e3 + prompts * (profile.request_us_per_token / 1e6)

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
        """float64[n], seconds that each first token or end was beyond its target; NaN if unfinished."""
        late: Float64Array = np.maximum(self.ttft_s - self.ttft_slo_s, self._overdue_s)
        return np.maximum(late, 0.0)

    @property
    def _overdue_s(self) -> Float64Array:
        """float64[n], seconds that each end was beyond its deadline, far below 0 where there is none."""
        overdue: Float64Array = self.e2e_s - np.where(
            np.isnan(self.workload.deadline_s), np.inf, self.workload.deadline_s
        )
        return overdue

    @property
    def met(self) -> BoolArray:
        """bool[n], whether each request met its own targets or the run's; False for rejected and unfinished ones."""
        with np.errstate(invalid="ignore"):
            fast = self.tpot_s <= self.setup.slo.per_token_s(self.workload)
            met: BoolArray = self.served & (self.late_s <= 0.0) & fast
        return met

    def certain_misses(self, window: slice, popped: int, begun: list[int] | None) -> int:
        """Number of requests of `window` that can no longer meet their targets.

        These are the requests that ended late, and those of the first `popped` ones whose first token is overdue.
        `begun`: the open requests with a first token, None if not known.
        """
        status = self.status[window]
        missed = (status == REJECTED) | ((status == FINISHED) & ~self.met[window])
        if begun is None:
            return int(missed.sum())
        numbers = np.arange(window.start, window.start + popped)
        open_ = numbers[(self.status[numbers] == UNFINISHED) & ~np.isin(numbers, begun)]
        age_s = (int(self.arrival_ns[numbers[-1]]) - self.arrival_ns[open_]) / NS_PER_S
        return int(missed.sum()) + int((age_s > self.ttft_slo_s[open_]).sum())

    def _seconds(self, spans: Int64Array) -> Float64Array:
        seconds: Float64Array = np.where(self.served, spans / NS_PER_S, np.nan)
        return seconds


def executor_info(setup: Setup, replica: int = 0) -> ExecutorInfo:
    """The simulated device: a context that holds the workload's longest request, the profile's KV pool."""
    page, profile = setup.settings.page_size, setup.profile_of(replica)
    pool_tokens, states = _pools(setup, profile)
    if pool_tokens < page:
        raise ConfigError(f"a KV pool of {pool_tokens} tokens does not hold one page of {page}")
    return ExecutorInfo(
        model=profile.model,
        device=profile.device,
        dtype="none",
        vocab_size=VOCAB_SIZE,
        context_length=setup.settings.context_length,
        eos_token_ids=(EOS_TOKEN,),
        page_size=page,
        num_pages=pool_tokens // page,
        max_pool_rows=setup.settings.max_running_requests,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        states=states,
    )


def _pools(setup: Setup, profile: Profile) -> tuple[int, StateGroup | None]:
    """The tokens of the KV pool, and the checkpoints of a model with recurrent states, as a server would have them.

    A pool of given size is for KV alone; that of the profile is what is left for KV and checkpoints.
    """
    settings, given = setup.settings, setup.kv_pool_tokens
    tokens = profile.kv_pool_tokens if given is None else given // setup.dp_size
    if not profile.state_slot_bytes:
        return tokens, None
    ratio = 0.0 if settings.disable_radix_cache else settings.mamba_full_memory_ratio
    if ratio and settings.shares_state_memory and setup.disagg is None:
        together = tokens if given is None else int(tokens * (1.0 + ratio))
        page_bytes = settings.page_size * profile.kv_bytes_per_token
        pages, interval = together // settings.page_size, settings.mamba_track_interval
        shared = StateGroup.sharing(profile.state_slot_bytes, page_bytes, pages, interval)
        if shared is not None:
            return together, shared
    if given is None and settings.max_mamba_cache_size is None:
        tokens = int(tokens / (1.0 + ratio))
    elif given is None and settings.max_mamba_cache_size is not None:
        slots = settings.max_mamba_cache_size - settings.max_running_requests
        tokens -= slots * profile.state_slot_bytes // profile.kv_bytes_per_token
    states = StateGroup.fitting(
        profile.state_slot_bytes,
        tokens * profile.kv_bytes_per_token,
        settings.max_running_requests,
        max_slots=settings.max_mamba_cache_size,
        ratio=ratio,
        track_interval=settings.mamba_track_interval,
    )
    return tokens, states


def blank_outcome(workload: Workload, setup: Setup) -> Outcome:
    """The outcome before the first event."""
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
        place=np.full(count, -1, np.int32),
        sent_ns=np.zeros(count, np.int64),
        unloaded_s=np.zeros(count, np.float64),
    )
