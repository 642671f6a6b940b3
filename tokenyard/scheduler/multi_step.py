"""Multi-step decode: several decode steps in one plan, for drivers that know in advance when the next row ends.

The idea of vLLM V0's multi-step scheduling (`num_scheduler_steps`).

If no request waits, or prefill is paused for decodes (`policy.decode_share`), a step that only decodes is followed by
the same step one position further. The functions here merge such steps into one plan and one result, and leave the same
state as the single steps (tests/contract/test_multi_step.py checks this).
"""

import numpy as np

from tokenyard.base import Int32Array, StepPlan
from tokenyard.scheduler.memory import KvMemory
from tokenyard.scheduler.scheduler_state import SchedulerState


def possible_steps(
    state: SchedulerState, plan: StepPlan, rows: Int32Array, max_steps: int, decodes_until_ns: int | None
) -> int:
    """To how many steps, at most `max_steps`, `extend_plan` would extend `plan`. Changes nothing."""
    if not _same_again(state, plan, decodes_until_ns):
        return 1
    further = _further(state, plan, rows, max_steps)
    return 1 + (further if _surely_fit(state.memory, plan, further) else _fitting(state.memory, plan, further))


def extend_plan(
    state: SchedulerState, plan: StepPlan, rows: Int32Array, max_steps: int, decodes_until_ns: int | None
) -> None:
    """Extend `plan`, the newest one, to up to `max_steps` steps; its columns belong to table `rows` (int32[n]).

    decodes_until_ns: `Planner.decodes_until_ns`.
    """
    if not _same_again(state, plan, decodes_until_ns):
        return
    further = _take_pages(state.memory, plan, _further(state, plan, rows, max_steps))
    if not further:
        return
    plan.num_steps += further
    state.table.planned[rows] += further
    state.table.held[rows] += further
    state.table.last_step[rows] += further
    state.observer.counters.steps += further
    state.observer.counters.decode_steps += further
    state.charge_decode(rows, further)


def append_earlier_steps(state: SchedulerState, plan: StepPlan, rows: Int32Array, tokens: Int32Array) -> None:
    """Append what `rows` sampled in all steps of a multi-step plan but the last; `tokens` is int32[num_steps - 1,
    rows].

    Raises ValueError for a row that stopped before the last step, which the driver must rule out.
    """
    table, further = state.table, len(tokens)
    pool_rows, known = table.pool_row[rows], table.known[rows]
    if state.stop_tokens.hit(pool_rows, tokens).any():
        raise ValueError(f"a row stopped before the last of the {plan.num_steps} steps of plan {plan.step}")
    state.memory.pool.token_ids[pool_rows, known + _column(0, further)] = tokens
    table.known[rows] = known + further
    table.computed[rows] += further
    numbers = table.number[rows][None].repeat(further, axis=0).ravel()
    state.outbox.tokens(numbers, tokens.ravel(), table.hit[rows][None].repeat(further, axis=0).ravel())
    state.observer.counters.generated_tokens += len(numbers)


def _same_again(state: SchedulerState, plan: StepPlan, decodes_until_ns: int | None) -> bool:
    """Whether the steps after `plan` depend only on what its decoding rows sample, until the next event.

    This is False with overlap, where a step is planned before the last result is known, and with a cost model that
    learns, which does so step by step.
    """
    return (
        state.settings.max_in_flight == 1
        and not state.drafting
        # Pages that leave the sliding window are freed after each single step.
        and state.memory.windows is None
        and not len(plan.state_saves)
        and plan.decode_rows == len(plan.pool_rows)
        and (decodes_until_ns is None or decodes_until_ns > 0)
        and not (state.cost is not None and state.cost.learns)
    )


def _further(state: SchedulerState, plan: StepPlan, rows: Int32Array, max_steps: int) -> int:
    """How many steps after the first stay within `max_steps` and the rows' limits."""
    # A row computes its last token at position limit - 1.
    further = max(min(max_steps, int((state.table.limit[rows] - plan.starts).min())) - 1, 0)
    states = state.memory.states
    if states is not None and state.memory.tree.enabled:
        # The step that computes the last token of an interval saves its state, and is a plan of its own.
        further = min(further, states.interval - 1 - int(((plan.starts + 1) % states.interval).max()))
    return further


def _surely_fit(memory: KvMemory, plan: StepPlan, further: int) -> bool:
    """Whether there are free pages for `further` more steps wherever in a page its rows are."""
    return len(plan.starts) * (further // memory.page_size + 1) <= memory.allocator.available


def _fitting(memory: KvMemory, plan: StepPlan, further: int) -> int:
    """For how many of `further` more steps enough pages are free."""
    # A row takes a page whenever it begins one, which is every `page_size` steps.
    period = np.bincount(memory.page_size - 1 - plan.starts % memory.page_size, minlength=memory.page_size)
    # With eviction policy "reuse" it depends on the time which pages are evicted.
    evictable = 0 if memory.evicts_by_time else memory.tree.evictable_pages
    free = memory.allocator.available + evictable
    return int(np.searchsorted(np.cumsum(np.resize(period, further)), free, side="right"))


def _take_pages(memory: KvMemory, plan: StepPlan, further: int) -> int:
    """Take the pages of up to `further` more steps, in the order of the single steps; returns the number of steps."""
    if not _surely_fit(memory, plan, further):
        further = _fitting(memory, plan, further)
    starts = plan.starts + _column(1, further)
    steps, columns = np.nonzero(starts % memory.page_size == 0)
    if not len(steps):
        return further
    pages = memory.take_pages_per_step(np.bincount(steps).tolist())
    owners, places = plan.pool_rows[columns], starts[steps, columns] // memory.page_size
    memory.pool.page_table[owners, places] = pages
    plan.page_rows = np.concatenate((plan.page_rows, owners))
    plan.page_columns = np.concatenate((plan.page_columns, places))
    plan.page_ids = np.concatenate((plan.page_ids, pages))
    return further


def _column(first: int, count: int) -> Int32Array:
    """`count` numbers from `first` on, int32[count, 1], to broadcast over columns of rows."""
    return np.arange(first, first + count, dtype=np.int32)[:, None]
