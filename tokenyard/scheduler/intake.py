"""Accepts new requests: refuses those that can never run, makes room in a full queue, and queues the others."""

from dataclasses import replace

import numpy as np

from tokenyard.base import AbortCause, Request, Submit
from tokenyard.scheduler.row_state import Gate
from tokenyard.scheduler.scheduler_state import SchedulerState

Refusal = tuple[AbortCause, str]
"""Why a request is refused, in one word and in one sentence."""


def accept_request(state: SchedulerState, event: Submit, now: int) -> list[int]:
    """Queue a request, one row per answer. Returns the rows, none for a request that ended immediately.

    Raises ValueError for a number that is in use.
    """
    request, table = event.request, state.table
    if request.weights != state.weights:
        request = replace(request, weights=state.weights)
    refusal = _refusal(state, request)
    rows = [table.add(request, request.number + answer, now) for answer in range(request.sampling.n)]
    table.limit[rows] = np.minimum(table.limit[rows], state.longest - 1)
    state.observer.submitted(len(request.prompt_ids), len(rows))
    if refusal is None and not event.accepted:
        refusal = _make_room(state, rows, now)
    if refusal is not None:
        state.observer.counters.rejected += len(rows)
        for row in rows:
            state.end(row, "abort", now, message=refusal[1], cause=refusal[0])
        return []
    if len(request.output_ids) and _end_whole_answer(state, request, rows[0], now):
        return []
    _close_gates(state, request, rows)
    if request.handover:
        table.limit[rows] = np.minimum(table.limit[rows], table.known[rows])
    for row in rows:
        state.join(row, now)
    return rows


def _close_gates(state: SchedulerState, request: Request, rows: list[int]) -> None:
    """Close the gates of what the rows of a request must wait for."""
    table = state.table
    if len(rows) > 1 and state.memory.tree.enabled:
        table.request_state(rows[0]).sibling_rows = [request.number + answer for answer in range(1, len(rows))]
        table.gates[rows[1:]] |= Gate.GROUP
    if request.grammar:
        table.gates[rows] |= Gate.GRAMMAR
    if request.awaits_adapter:
        table.gates[rows] |= Gate.ADAPTER
    if request.awaits_kv:
        table.gates[rows] |= Gate.KV


def _refusal(state: SchedulerState, request: Request) -> Refusal | None:
    """Why a request is refused, or None."""
    if state.table.row_of(request.number) is not None:
        raise ValueError(f"request number {request.number} is in use")
    prompt, settings = len(request.prompt_ids), state.settings
    if prompt == 0:
        return "invalid", "the prompt is empty"
    if prompt >= state.longest:
        return "too_long", f"the prompt has {prompt} tokens; at most {state.longest - 1} fit here"
    if len(request.output_ids) and request.sampling.n > 1:
        return "invalid", "a request with an answer begun (output_ids) has one answer; send it with n = 1"
    if request.priority is not None and settings.abort_on_priority_when_disabled:
        message = "priorities are off here (see --enable-priority-scheduling); send the request without one"
        return "invalid", message
    return None


def _end_whole_answer(state: SchedulerState, request: Request, row: int, now: int) -> bool:
    """End a request that arrives with a complete answer, as its last token would have; False if it is not."""
    last = int(request.output_ids[-1])
    if last in state.stop_token_ids(request.sampling):
        state.end(row, "stop", now, matched=last)
    elif state.table.known[row] > state.table.limit[row]:
        state.end(row, "length", now)
    else:
        return False
    return True


def _make_room(state: SchedulerState, rows: list[int], now: int) -> Refusal | None:
    """Make room in a full queue for new `rows` by ending requests that the policy displaces.

    Returns why `rows` are refused, or None.
    """
    full = state.settings.max_queued_requests
    tenant = state.table.request(rows[0]).tenant
    if state.limits.queue_is_full(state.table, tenant, state.waiting.rows, rows):
        message = f"tenant {tenant!r} has reached its limit of waiting requests; try again later"
        return "tenant_limit", message
    if full < 0:
        return None
    waiting, leaving = state.waiting.rows.copy(), []
    while len(waiting) + len(rows) > full:
        victim = state.policy.displaced(state.table, waiting, rows[0])
        if victim is None:
            return "queue_full", f"the queue is full ({full} requests wait); try again later"
        leaving.append(victim)
        waiting = waiting[waiting != victim]
    message = "a more urgent request took its place in a full queue"
    for victim in leaving:
        state.end(victim, "abort", now, message=message, cause="displaced")
    state.sweep()
    return None
