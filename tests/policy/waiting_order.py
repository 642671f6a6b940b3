"""Looks at the order in which a scheduler would take its waiting requests, and at the order in which it took them."""

import numpy as np

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SchedulerSettings
from tokenyard.scheduler import RowState


def make_yard(pages=4096, page_size=1, rows=8, context=512, answer_tokens=None, windows=None, **settings):
    chosen = SchedulerSettings(
        context_length=context,
        page_size=page_size,
        max_running_requests=rows,
        **{"prefill_max_requests": 1, "schedule_conservativeness": 0.01, **settings},
    )
    return Yard(chosen, make_info(pages, page_size, rows, context, windows), answer_tokens=answer_tokens)


def line(yard, now=None):
    """Numbers of the waiting requests, in the order of the policy."""
    state = yard.scheduler.state
    views = state.views(yard.now if now is None else now)
    state.policy.begin_step(views)
    started = set(views.prefilling.tolist())
    return [int(state.table.number[row]) for row in state.policy.candidates(views) if row not in started]


def row(yard, number):
    return yard.scheduler.state.table.row_of(number)


def admissions(yard):
    """Numbers of the finished requests, in the order in which they were first admitted."""
    return sorted(yard.finished, key=lambda number: yard.finished[number].admitted_ns)


def put_into_tree(yard, tokens, namespace=""):
    memory = yard.scheduler.state.memory
    pages = memory.allocator.alloc(len(tokens) // memory.page_size)
    key = np.array(tokens[: len(pages) * memory.page_size], np.int32).tobytes()
    inserted = memory.tree.insert(key, pages, namespace)
    memory.allocator.free(pages[: inserted.present_tokens // memory.page_size])


def watch_admissions(yard, look):
    """Call look(row, hit, earlier) at each admission; `earlier`: rows that came before it and still wait."""
    state = yard.scheduler.state
    table, admit = state.table, state.admit

    def watched(row, hit, now):
        waiting = state.waiting.rows
        waits = (table.state[waiting] == RowState.WAITING) & (table.gates[waiting] == 0)
        look(row, hit, waiting[waits & (table.seq[waiting] < table.seq[row])].tolist())
        admit(row, hit, now)

    state.admit = watched
