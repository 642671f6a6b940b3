"""Counters and gauges of the scheduler, for metrics, logs and load reports."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens: prompt (submitted), hit (found in the tree at first admission), prefill (computed
    in chunks), recomputed (computed again after a retraction), generated (sampled and kept), draft (verified), accepted
    draft. verify_rows: rows that verified drafts, counted in each step. adapter_loads: LoRA adapters brought to slots.
    """

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    submitted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    verify_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adapter_loads: int = 0


@dataclass(slots=True)
class Snapshot:
    """The state at one moment. used_tokens: KV held by rows and locked prefixes; cached_tokens: evictable KV.
    held_tokens: KV held for a reader or writer outside. queued_tokens: of prompts, still to be computed, as if nothing
    of those that wait were cached; queued_s: seconds that this takes by the cost model.
    unstored_tokens: KV evicted before it went to the store below; waiting_stores: prefixes that wait for that.

    step_time_error: running mean of |predicted - measured| / measured, None if no cost model learns. measures: figures
    of the policy and of the limits of tenants, by metric name (`Policy.measures`). overtaking: the policy's stated
    bound. policy_note: why another policy than the configured one is in use; "" if it is not. policy_failure: why a
    policy of the user's own was given up; "" if it was not.
    """

    now: int
    waiting: int
    loading: int
    prefilling: int
    running: int
    in_flight: int
    used_tokens: int
    cached_tokens: int
    held_tokens: int
    total_tokens: int
    evicted_tokens: int
    queued_tokens: int
    queued_s: float
    new_token_ratio: float
    step_time_error: float | None
    measures: dict[str, float]
    policy: str
    policy_options: dict[str, float | int | str | bool]
    overtaking: str
    policy_note: str
    paused: bool
    counters: Counters
    policy_failure: str = ""
    unstored_tokens: int = 0
    waiting_stores: int = 0
