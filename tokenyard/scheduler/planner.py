"""Makes the next plan: prefill in the policy's order, decode for whoever runs, and way given when pages run out."""

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.policy import Views
from tokenyard.scheduler.admission import PrefillAdder
from tokenyard.scheduler.memory import NO_PAGES
from tokenyard.scheduler.plan_builder import PlanBuilder
from tokenyard.scheduler.state import SchedulerState

NO_ROWS = NO_PAGES


class Planner:
    """Turns the state's state into plans. Holds nothing but pages that the tree deduplicated in since the last plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._deduplicated: list[tuple[int, int, int, Int32Array]] = []

    def plan(self, now: int, in_flight: int) -> PlanBuilder | None:
        """What the next step does, or None if there is nothing to do before the next event or commit.

        `in_flight` plans wait for their commit; only with none of them can nothing to do mean a deadlock.
        """
        while True:
            builder = self._new_builder()
            gave_way = self._state.gave_way
            refused = self._fill(builder, now)
            if not builder.empty:
                self._deduplicated.clear()
                return builder
            if in_flight:
                return None
            # Without the row that gave way the next try finds another state.
            if self._state.gave_way == gave_way and not self._break_deadlock(refused, now):
                return None

    def _fill(self, builder: PlanBuilder, now: int) -> int | None:
        """Fill the builder; returns the newcomer, if any, that memory had no room for."""
        state = self._state
        decoding, refused = state.running.rows.copy(), None
        if len(state.waiting) or len(state.prefilling):
            views = self._begin_step(now)
            budget = state.policy.budget()
            if budget.prefill:
                adder = PrefillAdder(state, views, budget, builder)
                adder.fill()
                refused = adder.refused
                if builder.chunks or len(state.loading):
                    state.sweep()
            decoding = views.running if budget.with_decode or builder.empty else NO_ROWS
        if len(decoding):
            self._decode(builder, decoding, now)
        return refused

    def _begin_step(self, now: int) -> Views:
        """Let the policy look at the state, after ending the requests that it gives up."""
        state = self._state
        views = self._views(now)
        state.policy.begin_step(views)
        overdue = state.policy.overdue()
        if overdue:
            for row in overdue:
                message = "the request cannot be served by its deadline; try again later"
                state.end(row, "abort", now, message=message, cause="overdue")
            state.sweep()
            views = self._views(now)
            state.policy.begin_step(views)
        return views

    def _views(self, now: int) -> Views:
        """What the policy may see: without the waiting rows whose tenants are at a limit."""
        views = self._state.views(now)
        self._state.limits.begin_step(views)
        return views

    def deduplicated(self, row: int, first_page: int, pages: Int32Array) -> None:
        """The tree's `pages` stand in the row's page table from `first_page` on; the executor hears of it next."""
        self._deduplicated.append((row, int(self._state.table.epoch[row]), first_page, pages))

    def _new_builder(self) -> PlanBuilder:
        """An empty builder, but for pages that the tree deduplicated in rows since the last plan."""
        table = self._state.table
        builder = PlanBuilder(table, self._state.memory)
        for row, epoch, first, pages in self._deduplicated:
            if table.epoch[row] == epoch:
                builder.write_page_run(int(table.pool_row[row]), first, pages)
        return builder

    def _decode(self, builder: PlanBuilder, rows: Int32Array, now: int) -> None:
        """Let every row that may still grow compute one token, if the pages for all of them can be had.

        Rows with drafts verify as many as their limit and the pages allow. They wait while a step of theirs is in
        flight, as only its commit says where the drafts stand.
        """
        table, memory = self._state.table, self._state.memory
        starts = table.planned[rows]
        ready = starts < table.limit[rows]
        if self._state.drafting:
            ready &= (table.drafts[rows] == 0) | (starts < table.known[rows])
        if not ready.all():
            rows, starts = rows[ready], starts[ready]
            if not len(rows):
                return
        if self._state.drafting and self._verify(builder, rows, starts):
            return
        crossing = self._state.crossing(rows, starts)
        pages = memory.take_pages(int(np.count_nonzero(crossing)))
        if pages is None:
            survivors = self._make_room(rows, now)
            if len(survivors):
                self._decode(builder, survivors, now)
            return
        if len(pages):
            owners, columns = table.pool_row[rows[crossing]], starts[crossing] // memory.page_size
            memory.pool.page_table[owners, columns] = pages
            builder.write_pages(owners, columns, pages)
        ends = starts + 1
        table.planned[rows] = ends
        table.held[rows] = np.maximum(table.held[rows], ends) if self._state.drafting else ends
        builder.decode(rows, starts)
        self._state.charge_decode(rows)

    def _verify(self, builder: PlanBuilder, rows: Int32Array, starts: Int32Array) -> bool:
        """Let `rows`, which start at `starts` (int32[n]), verify their drafts; False, and nothing done, if none has any
        or the pages for all of them are not to be had: drafts are worth no retraction.
        """
        table, memory = self._state.table, self._state.memory
        drafts = np.minimum(table.drafts[rows], table.limit[rows] - starts - 1)
        verify = drafts > 0
        if not verify.any():
            return False
        ends, held = starts + 1 + drafts, table.held[rows]
        size = memory.page_size
        wanted = np.maximum(-(-ends // size) - -(-held // size), 0)
        pages = memory.take_pages(int(wanted.sum()))
        if pages is None:
            return False
        if len(pages):
            owners = np.repeat(table.pool_row[rows], wanted)
            firsts = np.repeat(-(-held // size) - np.cumsum(wanted) + wanted, wanted)
            columns = (firsts + np.arange(len(pages))).astype(np.int32)
            memory.pool.page_table[owners, columns] = pages
            builder.write_pages(owners, columns, pages)
        table.planned[rows] = ends
        table.held[rows] = np.maximum(held, ends)
        builder.decode(rows[~verify], starts[~verify])
        builder.verify(rows[verify], starts[verify], drafts[verify])
        self._state.charge_decode(np.repeat(rows, drafts + 1))
        return True

    def _make_room(self, rows: Int32Array, now: int) -> Int32Array:
        """Retract victims until the others of `rows` can take one more token each; return those that can do so now.

        Pages that come back with a commit in flight count as free: then nobody may go on now, and nobody is retracted.
        """
        state, memory = self._state, self._state.memory
        views = state.views(now)
        views.running = rows
        before = len(rows)
        for victim in state.limits.borrowers_first(views, list(state.policy.victims(views))):
            if memory.page_size * self._state.pages_to_decode(rows) <= memory.free_tokens:
                break
            state.retract(victim, "out of pages", now)
            rows = rows[rows != victim]
        if len(rows) < before:
            state.policy.headroom.retracted(state.table, rows)
        fits = self._state.pages_to_decode(rows) <= memory.allocator.available + memory.tree.evictable_pages
        return rows if fits else NO_ROWS

    def _break_deadlock(self, refused: int | None, now: int) -> bool:
        """With nothing planned and nothing in flight, let someone give way; False if all is well or idle.

        Prefills that together hold all pages let the newest start over; a request that does not fit alone is ended.
        """
        state = self._state
        if len(state.prefilling) > 1:
            state.retract(int(state.prefilling.rows[-1]), "out of pages", now)
            return True
        if len(state.prefilling):
            refused = int(state.prefilling.rows[0])
        if refused is None or len(state.running) or len(state.loading):
            return False
        message = "the request needs more KV than the pool has"
        state.end(refused, "abort", now, message=message, cause="no_memory")
        state.sweep()
        return True
