"""Settings of the scheduler core. The command line's settings object makes one of these."""

from dataclasses import dataclass, field

from tokenyard.base.errors import ConfigError
from tokenyard.base.ranges import SCHEDULER_RANGES, TENANT_RANGES

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
HEADROOMS = ("ratio", "history", "past-future", "limit", "none")
RETRACTION_POLICIES = ("length", "newest", "priority", "slack", "fewest-lost")
STEP_BUDGETS = ("auto", "tokens", "time")
MOST_WEIGHT = 10**6
ANY_TENANT = "*"
"""Stands for all tenants that are not named."""


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What one tenant is promised and where its limits are; the tenant "*" stands for all that are not named.

    weight: share of the service under vtc and dlpm, relative to other tenants. tokens_per_s: rate at which prompt and
    output tokens may be used, 0 for no limit; burst_tokens: how many may be saved up. max_running, max_queued: requests
    at a time, -1 for no limit. kv_share: share of the KV pool that is the tenant's own; it may borrow more while others
    leave it free, and what is borrowed is taken back when an owner needs it.
    """

    weight: float = 1.0
    tokens_per_s: float = 0.0
    burst_tokens: int = 16384
    max_running: int = -1
    max_queued: int = -1
    kv_share: float = 0.0

    def validate(self, name: str) -> None:
        """Raise ConfigError naming the tenant for a value that makes no sense."""
        for setting, allowed in TENANT_RANGES.items():
            allowed.check(f"tenant {name!r}: {setting}", getattr(self, setting))
        if name == ANY_TENANT and self.kv_share:
            raise ConfigError("tenant '*': a kv_share can be promised only to tenants that are named")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the scheduler must know; names and defaults follow SGLang's flags where they exist.

    chunked_prefill_size: tokens of prefill a step computes at most, -1 for no chunking.
    prefill_decode_interval: with running decodes, at most this many prefill steps in a row; 0 for no limit.
    max_queued_requests: -1 for no limit. queue_timeout_s, run_timeout_s: -1 for none.
    lpm_degrade_threshold: with more requests waiting, lpm falls back to fcfs; 0 for never.
    in_batch_prefix_caching_*_threshold: lpm puts a waiting request last whose hit is at most `check` tokens (-1 for
    none) and that shares `deprioritize` tokens with an earlier one, which will bring them into the cache.
    default_priority_value: priority of requests that bring none; None ranks them below all others.
    priority_aging_s: waiting so long is worth one level of priority; 0 for no aging.
    enable_service_levels: part the queue by service class (policy/levels.py). service_level_weights: shares of the
    levels high, normal and low. strict_level_share: part of the prefill tokens that the strict level may take.
    max_overtaken_tokens: prompt tokens of later arrivals that may be started before a waiting request, -1 for no limit.
    enable_priority_scheduling: let the requests' priorities come before the policy's order; by default high values are
    urgent, with schedule_low_priority_values_first low ones.
    headroom: what admission holds back for answers (policy/headroom.py). retraction_policy: who gives way when pages
    run out (policy/victim.py). step_budget: what bounds a step, tokens or time; auto lets the policy choose.
    slo_ttft_ms, slo_ttft_scale, slo_tpot_ms: targets of requests that bring none: the first token within the larger of
    a time and a multiple of the prompt's unloaded prefill, every further one within slo_tpot_ms on average.
    slo_max_wait_s: longest wait that policy slo aims at for requests it has put last, -1 for none. slo_reject: refuse
    those at their deadline instead. slo_idle_step_ms: length of a step while nobody decodes. slo_chunk_tokens: chunks
    that do not complete a prompt are multiples of it. tenants: by name, see TenantSettings.
    enable_kv_events: keep what enters and leaves the prefix cache for `Scheduler.kv_records`.
    """

    page_size: int = 1
    max_running_requests: int = 256
    max_queued_requests: int = -1
    context_length: int = 2048
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    prefill_max_requests: int = -1
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 8
    schedule_policy: str = "fcfs"
    policy_options: dict[str, float | int | str | bool] = field(default_factory=dict)
    lpm_degrade_threshold: int = 0
    in_batch_prefix_caching_check_threshold: int = 32
    in_batch_prefix_caching_deprioritize_threshold: int = 32
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    default_priority_value: int | None = None
    abort_on_priority_when_disabled: bool = False
    priority_aging_s: float = 5.0
    enable_service_levels: bool = False
    service_level_weights: tuple[int, ...] = (8, 4, 1)
    service_level_quantum_tokens: int = 1024
    strict_level_share: float = 0.5
    max_overtaken_tokens: int = -1
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    clip_max_new_tokens: int = 4096
    retract_decode_steps: int = 20
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    queue_timeout_s: float = -1.0
    run_timeout_s: float = -1.0
    max_partial_prefills: int = 1
    enable_dynamic_chunking: bool = False
    headroom: str = "ratio"
    retraction_policy: str = "length"
    step_budget: str = "auto"
    slo_ttft_ms: float = 1000.0
    slo_ttft_scale: float = 5.0
    slo_tpot_ms: float = 50.0
    slo_max_wait_s: float = -1.0
    slo_reject: bool = False
    slo_idle_step_ms: float = 200.0
    slo_chunk_tokens: int = 64
    tenants: dict[str, TenantSettings] = field(default_factory=dict)
    enable_kv_events: bool = False
    max_in_flight: int = 1

    @property
    def uses_priorities(self) -> bool:
        """Whether the priority of requests counts."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    def validate(self) -> None:
        """Raise ConfigError for values out of range or that contradict each other, saying which flag to change."""
        for name, allowed in SCHEDULER_RANGES.items():
            allowed.check("--" + name.replace("_", "-"), getattr(self, name))
        for flag, value, choices in (
            ("--headroom", self.headroom, HEADROOMS),
            ("--retraction-policy", self.retraction_policy, RETRACTION_POLICIES),
            ("--step-budget", self.step_budget, STEP_BUDGETS),
        ):
            if value not in choices:
                raise ConfigError(f"{flag} is {value!r}; choose one of {', '.join(choices)}")
        for holds, rule in self._rules():
            if not holds:
                raise ConfigError(rule)
        for name, tenant in self.tenants.items():
            tenant.validate(name)
        if sum(tenant.kv_share for tenant in self.tenants.values()) > 1.0:
            raise ConfigError("the kv_share of all tenants together must not exceed 1")

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """What must hold between several values, each with the sentence that says so."""
        chunk, weights = self.chunked_prefill_size, self.service_level_weights
        return (
            (
                chunk == -1 or not chunk % self.page_size,
                f"--chunked-prefill-size is {chunk}; it must be -1 (off) or a multiple of --page-size {self.page_size}",
            ),
            (
                len(weights) == 3 and all(1 <= weight <= MOST_WEIGHT for weight in weights),
                f"--service-level-weights must be three whole numbers from 1 to {MOST_WEIGHT}",
            ),
            (
                self.uses_priorities or not self.schedule_low_priority_values_first,
                "--schedule-low-priority-values-first needs --enable-priority-scheduling",
            ),
            (
                not (self.uses_priorities and self.abort_on_priority_when_disabled),
                "--abort-on-priority-when-disabled contradicts --enable-priority-scheduling; drop one of the two",
            ),
            (
                self.slo_ttft_ms + self.slo_ttft_scale > 0.0,
                "--slo-ttft-ms and --slo-ttft-scale must not both be 0",
            ),
            (
                not (self.slo_reject and self.slo_max_wait_s > 0.0),
                "--slo-reject and --slo-max-wait-s contradict each other: refuse late requests or serve them; drop one",
            ),
            (
                not self.enable_dynamic_chunking or chunk != -1,
                "--enable-dynamic-chunking needs a --chunked-prefill-size, the chunk that the others are as long as",
            ),
            (
                not (self.enable_dynamic_chunking and self.step_budget == "time"),
                "--enable-dynamic-chunking and --step-budget time both size chunks; drop one of the two",
            ),
        )
