"""Settings of the scheduler core, each declared once. The server's settings (`tokenyard.config`) contain them."""

from dataclasses import dataclass

from tokenyard.base.blocks import tokens_per_block
from tokenyard.base.declare import check_declared, check_rules, setting
from tokenyard.base.errors import ConfigError
from tokenyard.base.ranges import (
    ABOVE_ZERO,
    ANY_COUNT,
    COUNT_OR_NO_LIMIT,
    MAX_PRIORITY,
    MAX_SECONDS,
    POSITIVE,
    POSITIVE_COUNT,
    SECONDS_OR_NO_LIMIT,
    SHARE,
    NumberRange,
)

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
MAX_WEIGHT = 10**6
PREFERRED_DECODE_SHARES = {"hits-first": 0.4, "session": 0.4}
"""The `decode_share` that policies prefer, by name; 0 for all others."""

ANY_TENANT = "*"
"""The name of the settings for all tenants that are not named."""


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """Share and limits of one tenant. The settings of "*" apply to all tenants that are not named.

    A tenant may borrow more of the KV pool than its `kv_share` while others leave it free; borrowers are preempted when
    the owner needs its share.
    """

    weight: float = setting(
        1.0,
        "tenant",
        "share of the service under vtc and dlpm, relative to other tenants",
        NumberRange(ABOVE_ZERO, 1e6),
    )
    tokens_per_s: float = setting(
        0.0,
        "tenant",
        "rate at which prompt and output tokens may be used; 0 for no limit",
        NumberRange(ABOVE_ZERO, other=0, meaning="no limit"),
    )
    burst_tokens: int = setting(16384, "tenant", "unused tokens of that rate that may be saved up", POSITIVE_COUNT)
    max_running: int = setting(-1, "tenant", "most running requests; -1 for no limit", COUNT_OR_NO_LIMIT)
    max_queued: int = setting(-1, "tenant", "most waiting requests; -1 for no limit", COUNT_OR_NO_LIMIT)
    kv_share: float = setting(0.0, "tenant", "share of the KV pool that is the tenant's own", SHARE)

    def validate(self, name: str) -> None:
        """Raise ConfigError naming the tenant for a value that is not allowed."""
        check_declared(self, f"tenant {name!r}: ")
        if name == ANY_TENANT and self.kv_share:
            raise ConfigError("tenant '*': only tenants that are named can have a kv_share")


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The settings that the command line and the core share. Names and defaults follow SGLang's flags where they exist.

    `policy/` explains headroom (headroom.py), retraction (retraction.py), service levels (service_levels.py) and
    targets (slo_targets.py, deadline.py).
    """

    page_size: int = setting(1, "device", "tokens in one KV page", POSITIVE_COUNT, aliases=("--block-size",))

    max_running_requests: int = setting(
        256, "scheduler", "most requests running at once", NumberRange(1, 1_000_000), aliases=("--max-num-seqs",)
    )
    max_queued_requests: int = setting(
        -1,
        "scheduler",
        "most requests waiting; further ones are refused with status 503; -1 for no limit",
        COUNT_OR_NO_LIMIT,
    )
    chunked_prefill_size: int = setting(
        2048,
        "scheduler",
        "most prefill tokens in one step; -1 for no chunking",
        NumberRange(1, other=-1, meaning="no chunking"),
        aliases=("--max-num-batched-tokens",),
    )
    max_prefill_tokens: int = setting(16384, "scheduler", "most prompt tokens admitted in one step", POSITIVE_COUNT)
    prefill_max_requests: int = setting(
        -1, "scheduler", "most requests in one prefill step; -1 for no limit", COUNT_OR_NO_LIMIT
    )
    max_partial_prefills: int = setting(
        1, "scheduler", "most prompts that may be partly computed at once", POSITIVE_COUNT
    )
    enable_mixed_chunk: bool = setting(False, "scheduler", "put prefill chunks and decodes into the same step")
    prefill_decode_interval: int = setting(
        8, "scheduler", "most prefill steps in a row while requests decode; 0 for no limit", ANY_COUNT
    )
    schedule_policy: str = setting(
        "fcfs",
        "scheduler",
        "order of the queue (docs/policies.md), or your own, as module:name",
        aliases=("--scheduling-policy",),
    )
    policy_options: dict[str, float | int | str | bool] = setting(
        dict, "scheduler", "options of the policy, as name=value,name=value"
    )
    lpm_degrade_threshold: int = setting(
        0, "scheduler", "lpm falls back to fcfs while more requests than this wait; 0 for never", ANY_COUNT
    )
    in_batch_prefix_caching_check_threshold: int = setting(
        32,
        "scheduler",
        "lpm: longest cached prefix of a request that may wait for another one with its prefix; -1 for none",
        NumberRange(0, other=-1, meaning="none"),
        file_only=True,
    )
    in_batch_prefix_caching_deprioritize_threshold: int = setting(
        32,
        "scheduler",
        "lpm: shortest prefix shared with another waiting request that is worth waiting for",
        POSITIVE_COUNT,
        file_only=True,
    )
    enable_dynamic_chunking: bool = setting(False, "scheduler", "size prefill chunks by the time they take")
    step_budget: str = setting(
        "auto",
        "scheduler",
        "what bounds a step: tokens, time, or what the policy prefers",
        choices=("auto", "tokens", "time"),
    )
    decode_share: float = setting(
        -1.0,
        "scheduler",
        "share of the time that decodes keep while prompts are computed and the requests do not fit into the KV pool; "
        "-1 for what the policy prefers",
        NumberRange(0, 0.9, other=-1, meaning="what the policy prefers"),
    )
    session_max_wait_s: float = setting(
        600.0,
        "scheduler",
        "hits-first, session: longest wait in seconds during which later requests may start first",
        NumberRange(0, MAX_SECONDS),
    )
    headroom: str = setting(
        "ratio",
        "scheduler",
        "how much memory admission sets aside for answers",
        choices=("ratio", "history", "past-future", "limit", "none"),
    )
    retraction_policy: str = setting(
        "length",
        "scheduler",
        "which request is retracted when pages run out",
        choices=("length", "newest", "priority", "slack", "fewest-lost"),
    )
    schedule_conservativeness: float = setting(
        1.0, "scheduler", "above 1 admits fewer requests and retracts less often", POSITIVE
    )
    init_new_token_ratio: float = setting(
        0.7, "scheduler", "share of max_new_tokens first set aside for an answer", SHARE, file_only=True
    )
    min_new_token_ratio_factor: float = setting(
        0.14, "scheduler", "lower bound of that share, as a factor of it", SHARE, file_only=True
    )
    new_token_ratio_decay_steps: int = setting(
        600, "scheduler", "decode steps until the lower bound is reached", POSITIVE_COUNT, file_only=True
    )
    clip_max_new_tokens: int = setting(
        4096, "scheduler", "most output tokens set aside for one answer", ANY_COUNT, file_only=True
    )
    retract_decode_steps: int = setting(
        20, "scheduler", "decode steps that a retraction makes room for", ANY_COUNT, file_only=True
    )
    disable_radix_cache: bool = setting(
        False, "scheduler", "do not reuse the KV of common prefixes", negated=("--enable-prefix-caching",)
    )
    radix_eviction_policy: str = setting(
        "lru",
        "scheduler",
        "what a full prefix cache drops first: lru, lfu, fifo, mru, filo, slru, priority, reuse or module:Class",
    )
    mamba_full_memory_ratio: float = setting(
        0.9,
        "device",
        "memory of checkpoints of recurrent states (gated delta nets), as a part of that of the KV pool",
        NumberRange(0, 1000),
    )
    max_mamba_cache_size: int | None = setting(
        None,
        "device",
        "recurrent states in memory, one for each running request and the others as checkpoints; by "
        "--mamba-full-memory-ratio if absent",
        NumberRange(1, 1 << 24),
    )
    mamba_track_interval: int = setting(
        256,
        "device",
        "answer tokens between two checkpoints of a request's recurrent state, rounded up to whole pages",
        NumberRange(1, 1 << 24),
    )
    mamba_retention_policy: str = setting(
        "worth",
        "device",
        "which prefixes keep a recurrent state: those worth most, ends (as vLLM), or a few on each path (as SGLang)",
        choices=("worth", "last", "per-path"),
    )
    mamba_max_states_per_path: int = setting(
        3,
        "device",
        "per-path: most recurrent states on a path of the prefix cache, those at forks not counted; -1 for no limit",
        NumberRange(1, other=-1, meaning="no limit"),
    )
    enable_hierarchical_cache: bool = setting(
        False, "kv_store", "keep KV below the device as well, in the store of --hicache-storage-backend"
    )
    hicache_write_policy: str = setting(
        "write_through",
        "kv_store",
        "when KV is stored: at once, at its first hit (write_through_selective), or before it is evicted (write_back)",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    enable_kv_events: bool = setting(
        False, "scheduler", "publish what enters and leaves the prefix cache, for routers that keep an index of it"
    )
    enable_lora: bool = setting(False, "model", "serve LoRA adapters; implied by --lora-paths")
    max_loras_per_batch: int = setting(
        8,
        "model",
        "most LoRA adapters in one step; further requests wait for a slot",
        NumberRange(1, 1024),
        aliases=("--max-loras",),
    )
    lora_drain_wait_threshold: float = setting(
        1.0,
        "model",
        "seconds that a request may be passed over because its adapter is in no slot; then a slot is emptied for it; "
        "0 for any time",
        ANY_COUNT,
    )
    queue_timeout_s: float = setting(
        -1.0, "scheduler", "longest time in seconds that a request may wait; -1 for no limit", SECONDS_OR_NO_LIMIT
    )
    run_timeout_s: float = setting(
        -1.0, "scheduler", "longest time in seconds that a request may run; -1 for no limit", SECONDS_OR_NO_LIMIT
    )

    enable_priority_scheduling: bool = setting(False, "urgency", "let the priority of requests come before the policy")
    schedule_low_priority_values_first: bool = setting(False, "urgency", "small priority values are the urgent ones")
    priority_scheduling_preemption_threshold: int = setting(
        10, "urgency", "least difference in priority for which a running request is preempted", ANY_COUNT
    )
    disable_priority_preemption: bool = setting(False, "urgency", "never preempt running requests for urgent ones")
    default_priority_value: int | None = setting(
        None,
        "urgency",
        "priority of requests that bring none; without it they rank lowest",
        NumberRange(-MAX_PRIORITY, MAX_PRIORITY),
    )
    abort_on_priority_when_disabled: bool = setting(
        False, "urgency", "refuse requests that bring a priority while priorities do not count"
    )
    priority_aging_s: float = setting(
        5.0,
        "urgency",
        "seconds of waiting worth one level of priority; 0 for no aging",
        NumberRange(ABOVE_ZERO, 1000, other=0, meaning="no aging"),
    )
    enable_service_levels: bool = setting(False, "urgency", "divide the queue by service class (high, normal, low)")
    service_level_weights: tuple[int, ...] = setting((8, 4, 1), "urgency", "shares of the levels high, normal and low")
    service_level_quantum_tokens: int = setting(
        1024, "urgency", "prompt tokens of one turn per unit of weight", POSITIVE_COUNT, file_only=True
    )
    strict_level_share: float = setting(
        0.5, "urgency", "share of the prefill tokens that the strict level may take", NumberRange(0.001, 0.999)
    )
    max_overtaken_tokens: int = setting(
        -1,
        "urgency",
        "prompt tokens of later arrivals that may start before a waiting request; -1 for no limit",
        NumberRange(0, other=-1, meaning="no limit"),
    )
    slo_ttft_ms: float = setting(1000.0, "urgency", "target for the first token of requests that bring none", ANY_COUNT)
    slo_ttft_scale: float = setting(
        5.0,
        "urgency",
        "the same target as a multiple of the time that the prompt's prefill takes alone; the larger one counts",
        ANY_COUNT,
    )
    slo_tpot_ms: float = setting(50.0, "urgency", "target for every further token, on average", POSITIVE)
    slo_max_wait_s: float = setting(
        -1.0,
        "urgency",
        "longest wait that policy slo aims at for requests that missed their target; -1 for none",
        NumberRange(ABOVE_ZERO, MAX_SECONDS, other=-1, meaning="none"),
    )
    slo_reject: bool = setting(False, "urgency", "refuse requests that can no longer meet their target")
    slo_idle_step_ms: float = setting(
        200.0, "urgency", "length of a step under policy slo while no request decodes", POSITIVE, file_only=True
    )
    slo_chunk_tokens: int = setting(
        64,
        "urgency",
        "under policy slo, chunks that do not complete a prompt are multiples of this",
        POSITIVE_COUNT,
        file_only=True,
    )
    tenants: dict[str, TenantSettings] = setting(dict, "urgency", "YAML file with weight and limits of each tenant")

    @property
    def share_of_decodes(self) -> float:
        """The share of the time that decodes keep, with what the policy prefers in place of -1."""
        if self.decode_share >= 0.0:
            return self.decode_share
        return PREFERRED_DECODE_SHARES.get(self.schedule_policy, 0.0)

    @property
    def evicts_by_value(self) -> bool:
        """Whether what a prefix is worth decides what is evicted: "reuse", or a user's `EvictionValue`."""
        return self.radix_eviction_policy == "reuse" or ":" in self.radix_eviction_policy

    @property
    def shares_state_memory(self) -> bool:
        """Whether checkpoints of recurrent states and KV share one pool, divided by worth.

        A KV store copies while steps run: its pages must not be those of a checkpoint that a step may yet write.
        """
        by_worth = self.mamba_retention_policy == "worth" and self.radix_eviction_policy == "lru"
        return by_worth and self.max_mamba_cache_size is None and not self.enable_hierarchical_cache

    @property
    def checkpoint_unit(self) -> int:
        """Checkpoints of recurrent states lie after multiples of this many tokens: a page, or a KV store's block."""
        return tokens_per_block(self.page_size) if self.enable_hierarchical_cache else self.page_size

    @property
    def uses_priorities(self) -> bool:
        """Whether the priority of requests counts."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"


@dataclass(frozen=True, slots=True)
class SchedulerSettings(SharedSettings):
    """The settings of the scheduler core. `context_length` and `max_in_flight` follow from the model and device.

    `dp_size` schedulers share the limits of tenants; all other limits are per scheduler.
    """

    context_length: int = setting(2048, "", "most tokens of prompt and answer together")
    dp_size: int = setting(1, "", "schedulers of the engine", POSITIVE_COUNT)
    max_in_flight: int = setting(1, "", "plans that may be made before the first of them is committed", POSITIVE_COUNT)

    def validate(self) -> None:
        """Raise ConfigError for values out of range or that contradict each other, saying which flag to change."""
        check_declared(self)
        check_rules(self._rules())
        for name, tenant in self.tenants.items():
            tenant.validate(name)
        if sum(tenant.kv_share for tenant in self.tenants.values()) > 1.0:
            raise ConfigError("the kv_share of all tenants together must not exceed 1")

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """Rules between several values, each with its error message."""
        chunk, weights = self.chunked_prefill_size, self.service_level_weights
        return (
            (
                chunk == -1 or not chunk % self.page_size,
                f"--chunked-prefill-size is {chunk}; it must be -1 (off) or a multiple of --page-size {self.page_size}",
            ),
            (
                len(weights) == 3 and all(1 <= weight <= MAX_WEIGHT for weight in weights),
                f"--service-level-weights must be three whole numbers from 1 to {MAX_WEIGHT}",
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
                "--enable-dynamic-chunking needs a --chunked-prefill-size; the time of the first chunk is that of all",
            ),
            (
                not (self.enable_dynamic_chunking and self.step_budget == "time"),
                "--enable-dynamic-chunking and --step-budget time both size chunks; drop one of the two",
            ),
        )
