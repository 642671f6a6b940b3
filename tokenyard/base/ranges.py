"""Which values numbers in settings may have."""

from dataclasses import dataclass

from tokenyard.base.errors import ConfigError

MOST = 1e12
"""Larger counts and levels are mistakes, and would not fit the columns that they go to."""

MOST_S = 1e9
ABOVE_ZERO = 1e-6
MOST_PRIORITY = 2**31 - 1
LONGEST_MS = 1e10
"""Deadlines and targets beyond are mistakes."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """From `least` to `most`, and `other`, which means what `meaning` says."""

    least: float
    most: float = MOST
    other: float | None = None
    meaning: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Raise ConfigError, naming the setting, for a value that is not allowed. NaN never is, None (not set) is."""
        if value is None or self.least <= value <= self.most or value == self.other:
            return
        rule = "above 0" if self.least == ABOVE_ZERO else f"at least {self.least:g}"
        if self.most != MOST or not value < self.least:
            rule += f" and at most {self.most:.15g}"
        special = "" if self.other is None else f", or {self.other:g} ({self.meaning})"
        raise ConfigError(f"{name} is {value:.15g}; it must be {rule}{special}")


COUNT_OR_NO_LIMIT = Allowed(1, other=-1, meaning="no limit")
SECONDS_OR_FOR_EVER = Allowed(ABOVE_ZERO, MOST_S, other=-1, meaning="for ever")

TENANT_RANGES = {
    "weight": Allowed(ABOVE_ZERO, 1e6),
    "tokens_per_s": Allowed(ABOVE_ZERO, other=0, meaning="no limit"),
    "burst_tokens": Allowed(1),
    "max_running": COUNT_OR_NO_LIMIT,
    "max_queued": COUNT_OR_NO_LIMIT,
    "kv_share": Allowed(0, 1),
}

SCHEDULER_RANGES = {
    "page_size": Allowed(1),
    "max_running_requests": Allowed(1, 1_000_000),
    "max_queued_requests": COUNT_OR_NO_LIMIT,
    "chunked_prefill_size": Allowed(1, other=-1, meaning="no chunking"),
    "max_prefill_tokens": Allowed(1),
    "prefill_max_requests": COUNT_OR_NO_LIMIT,
    "max_partial_prefills": Allowed(1),
    "prefill_decode_interval": Allowed(0),
    "max_in_flight": Allowed(1),
    "lpm_degrade_threshold": Allowed(0),
    "in_batch_prefix_caching_check_threshold": Allowed(0, other=-1, meaning="off"),
    "in_batch_prefix_caching_deprioritize_threshold": Allowed(1),
    "priority_scheduling_preemption_threshold": Allowed(0),
    "default_priority_value": Allowed(-MOST_PRIORITY, MOST_PRIORITY),
    "priority_aging_s": Allowed(ABOVE_ZERO, 1000, other=0, meaning="no aging"),
    "service_level_quantum_tokens": Allowed(1),
    "strict_level_share": Allowed(0.001, 0.999),
    "max_overtaken_tokens": Allowed(0, other=-1, meaning="no limit"),
    "schedule_conservativeness": Allowed(ABOVE_ZERO),
    "init_new_token_ratio": Allowed(0, 1),
    "min_new_token_ratio_factor": Allowed(0, 1),
    "new_token_ratio_decay_steps": Allowed(1),
    "clip_max_new_tokens": Allowed(0),
    "retract_decode_steps": Allowed(0),
    "queue_timeout_s": SECONDS_OR_FOR_EVER,
    "run_timeout_s": SECONDS_OR_FOR_EVER,
    "slo_ttft_ms": Allowed(0),
    "slo_ttft_scale": Allowed(0),
    "slo_tpot_ms": Allowed(ABOVE_ZERO),
    "slo_max_wait_s": Allowed(ABOVE_ZERO, MOST_S, other=-1, meaning="none"),
    "slo_idle_step_ms": Allowed(ABOVE_ZERO),
    "slo_chunk_tokens": Allowed(1),
}
