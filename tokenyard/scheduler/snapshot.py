"""Counters and gauges of the scheduler, for metrics, logs and load reports."""

from dataclasses import dataclass, replace

from tokenyard.scheduler.request_observer import Counters
from tokenyard.scheduler.scheduler_state import SchedulerState


@dataclass(slots=True)
class Snapshot:
    """The state at one moment.

    used_tokens: all KV but free and evictable pages.
    cached_tokens: evictable KV.
    held_tokens: KV on private pages of readers and writers outside.
    queued_tokens: prompt tokens still to be computed, with nothing of waiting prompts counted as cached.
    queued_s: seconds that these take by the cost model.
    step_time_error: running mean of |predicted - measured| / measured; None if no cost model learns.
    measures: gauges by metric name: of the policy (`Policy.measures`), tenants, adapters and windows.
    overtaking: the policy's stated bound.
    policy_note: why a policy other than the configured one is in use; "" if it is not.
    policy_failure: why a user-defined policy was replaced by fcfs; "" if it was not.
    eviction_failure: why eviction by a user's value was replaced by "reuse"; "" if it was not.
    unstored_tokens: KV evicted before it was offered to the KV store.
    waiting_stores: prefixes that wait to be offered.
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
    eviction_failure: str = ""
    unstored_tokens: int = 0
    waiting_stores: int = 0


def take_snapshot(state: SchedulerState, now: int, *, in_flight: int, paused: bool) -> Snapshot:
    """Counters and gauges at `now` (ns). in_flight: plans that wait for their commit."""
    size, tree = state.memory.page_size, state.memory.tree
    failure = "" if state.eviction_value is None else state.eviction_value.failure
    total, stores = state.memory.num_pages * size, state.stores
    cached = (tree.evictable_pages + state.memory.state_pages) * size
    queued_tokens, queued_s = state.queued_work()
    return Snapshot(
        now=now,
        waiting=len(state.waiting),
        loading=len(state.loading),
        prefilling=len(state.prefilling),
        running=len(state.running),
        in_flight=in_flight,
        used_tokens=total - cached - state.memory.allocator.available * size,
        cached_tokens=cached,
        held_tokens=state.memory.held_pages * size,
        unstored_tokens=0 if stores is None else stores.dropped_tokens,
        waiting_stores=0 if stores is None else stores.waiting,
        total_tokens=total,
        evicted_tokens=state.memory.evicted_tokens,
        queued_tokens=queued_tokens,
        queued_s=queued_s,
        new_token_ratio=state.policy.headroom.ratio,
        step_time_error=getattr(state.cost, "relative_error", None),
        measures=state.measures(),
        policy=state.policy.describe(),
        policy_options=dict(state.policy.chosen),
        overtaking=state.policy.overtaking,
        policy_note=state.policy_note or (failure and f"{failure}: evicting as reuse does"),
        eviction_failure=failure,
        policy_failure=state.policy.given_up(),
        paused=paused,
        counters=replace(state.observer.counters),
    )
