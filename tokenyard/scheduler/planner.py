"""Makes the next plan: prefill in the policy's order, decode for running rows, and retraction when pages run out."""

import numpy as np

from tokenyard.base import BoolArray, CostModel, Int32Array, StepWork
from tokenyard.cache.state_checkpoints import ANSWER
from tokenyard.policy import Views
from tokenyard.policy.speculation import drafts_to_verify
from tokenyard.scheduler.memory import NO_PAGES
from tokenyard.scheduler.plan_builder import PlanBuilder, StateSave
from tokenyard.scheduler.prefill_adder import PrefillAdder
from tokenyard.scheduler.scheduler_state import SchedulerState

NO_ROWS = NO_PAGES

VERIFY_TOGETHER_SHARE = 0.8
"""Two groups of rows verify together if that takes less than this share of the time of both alone.

The device then waits for the host, whose time the cost model does not include.
"""


class Planner:
    """Makes plans from the scheduler's state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._decodes_until_ns = 0
        self._decodes_while: tuple[int, ...] = ()

    @property
    def decodes_until_ns(self) -> int | None:
        """Steps that begin before this time (ns) only decode, while no request joins or leaves; None if none waits."""
        state = self._state
        if not len(state.waiting) and not len(state.prefilling) and not len(state.loading):
            return None
        return self._decodes_until_ns if self._decodes_while == state.membership() else 0

    def plan(self, now: int, in_flight: int) -> PlanBuilder | None:
        """The next step, or None if there is nothing to do before the next event or commit.

        `in_flight` plans wait for their commit; a deadlock is possible only if there are none.
        """
        while True:
            builder = self._new_builder()
            retraction_count = self._state.retraction_count
            refused = self._fill(builder, now)
            if not builder.empty:
                self._state.deduplicated.clear()
                return builder
            if in_flight:
                return None
            # A retraction changed the state, so another try may succeed.
            if self._state.retraction_count == retraction_count and not self._break_deadlock(refused, now):
                return None

    def _fill(self, builder: PlanBuilder, now: int) -> int | None:
        """Fill the builder; returns the newcomer that did not fit in memory, if any."""
        state = self._state
        decoding, refused = state.running.rows.copy(), None
        if (len(state.waiting) or len(state.prefilling)) and now >= (self.decodes_until_ns or 0):
            views = self._begin_step(now)
            budget = state.policy.budget()
            if budget.prefill:
                adder = PrefillAdder(state, views, budget, builder)
                adder.fill()
                state.adapters.end_step()
                refused = adder.refused
                if builder.chunks or len(state.loading):
                    state.sweep()
            decoding = views.running if budget.with_decode or builder.empty else NO_ROWS
            self._decodes_until_ns = 0
            if len(decoding) and not builder.chunks:
                policy = state.policy
                self._decodes_until_ns = now + policy.retry_ns if budget.prefill else policy.budget_rule.resume_ns
                self._decodes_while = state.membership()
        if len(decoding):
            self._decode(builder, decoding, now)
        return refused

    def _begin_step(self, now: int) -> Views:
        """End the requests that the policy calls overdue, and begin its step."""
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
        """The views for the policy, without waiting rows that a limit of their tenant holds back."""
        views = self._state.views(now)
        self._state.limits.begin_step(views)
        self._state.adapters.begin_step(views)
        return views

    def _new_builder(self) -> PlanBuilder:
        """A builder without rows, with the pages that the tree deduplicated since the last plan."""
        table = self._state.table
        builder = PlanBuilder(table, self._state.memory)
        for one in self._state.deduplicated:
            if table.epoch[one.row] == one.epoch:
                builder.write_page_run(int(table.pool_row[one.row]), one.first_page, one.pages)
        return builder

    def _decode(self, builder: PlanBuilder, rows: Int32Array, now: int) -> None:
        """Let every row below its limit compute one token, and verify drafts where that pays, if there are pages.

        A row whose drafts pay waits while one of its steps is in flight, because the commit determines their position.
        """
        table, memory = self._state.table, self._state.memory
        starts = table.planned[rows]
        ready = starts < table.limit[rows]
        if not ready.all():
            rows, starts = rows[ready], starts[ready]
        if not len(rows):
            return
        if self._state.drafting:
            drafts = self._drafts_to_verify(builder, rows, starts, now)
            # One token in flight is on the device already. Of drafts in flight, the number accepted is unknown.
            known = table.known[rows]
            ready = (starts < known) | (starts == known) & (drafts == 0)
            if self.should_wait_to_verify(drafts, ready, starts):
                return
            rows, starts, drafts = rows[ready], starts[ready], drafts[ready]
            if not len(rows) or (drafts.any() and self._verify(builder, rows, starts, drafts)):
                return
        needs_page = starts % memory.page_size == 0
        pages = memory.take_pages(int(np.count_nonzero(needs_page)))
        if pages is None:
            survivors = self._retract_decode(rows, now)
            if len(survivors):
                self._decode(builder, survivors, now)
            return
        if len(pages):
            owners, columns = table.pool_row[rows[needs_page]], starts[needs_page] // memory.page_size
            memory.pool.page_table[owners, columns] = pages
            builder.write_pages(owners, columns, pages)
        table.planned[rows] = table.held[rows] = starts + 1
        builder.decode(rows, starts)
        if memory.states is not None and memory.tree.enabled:
            self._track_states(builder, rows, starts + 1)
        self._state.charge_decode(rows)

    def _track_states(self, builder: PlanBuilder, rows: Int32Array, ends: Int32Array) -> None:
        """Save the recurrent states of `rows` after their last known tokens, at every interval. ends: int32[n]."""
        memory, states, table = self._state.memory, self._state.memory.states, self._state.table
        assert states is not None
        due = ends % states.interval == 0
        for row, end in zip(rows[due].tolist(), ends[due].tolist(), strict=True):
            pool_row = int(table.pool_row[row])
            page = int(memory.pool.page_table[pool_row, end // memory.page_size - 1])
            # Without it the next turn would begin at the end of the prompt.
            column = (int(table.target[row]) - 1) // states.unit * states.unit // memory.page_size
            prompt = int(memory.pool.page_table[pool_row, column - 1]) if column else 0
            builder.save_state(StateSave(pool_row, end, page, ANSWER, end - column * memory.page_size, prompt))

    def should_wait_to_verify(self, drafts: Int32Array, ready: BoolArray, starts: Int32Array) -> bool:
        """Whether rows that are ready to verify should wait for the others, whose last step is in flight.

        Otherwise two groups of rows would alternate permanently. Where the time to read the weights dominates, each of
        their steps takes as long as one step of all rows. drafts, starts: int32[n]; ready: bool[n].
        """
        cost, waiting = self._state.cost, ~ready & (drafts > 0)
        if cost is None or not ready.any() or not waiting.any() or not drafts[ready].all():
            return False
        alone, others, all_s = (_verify_s(cost, drafts[one], starts[one]) for one in (ready, waiting, ready | waiting))
        return all_s < VERIFY_TOGETHER_SHARE * (alone + others)

    def _drafts_to_verify(self, builder: PlanBuilder, rows: Int32Array, starts: Int32Array, now: int) -> Int32Array:
        """How many drafts `rows`, which start at `starts` (int32[n]), should verify: int32[n].

        Without a cost model, as many as they have.
        """
        table, cost = self._state.table, self._state.cost
        most: Int32Array = np.minimum(table.drafts[rows], table.limit[rows] - starts - 1)
        states = self._state.memory.states
        if states is not None and self._state.memory.tree.enabled:
            # The state at the end of an interval is saved, so it must not be one after drafts.
            most = np.minimum(most, states.interval - 1 - (starts + 1) % states.interval)
        most = np.maximum(most, 0)
        if cost is None or not most.any():
            return most
        chunks = StepWork()
        for chunk in builder.chunks:
            chunks.add_chunk(chunk.start, chunk.count)
        pace = self._state.policy.pace(table, rows, now)
        return drafts_to_verify(cost, chunks, starts + 1, most, table.acceptance_rate[rows], pace)

    def _verify(self, builder: PlanBuilder, rows: Int32Array, starts: Int32Array, drafts: Int32Array) -> bool:
        """Let `rows`, which start at `starts`, verify `drafts` drafts each (all int32[n]), of which some are above 0.

        False, and nothing done, if there are not enough pages: drafts never cause a retraction.
        """
        table, memory, verify = self._state.table, self._state.memory, drafts > 0
        ends, size = starts + 1 + drafts, memory.page_size
        held = -(-starts // size)
        wanted = -(-ends // size) - held
        pages = memory.take_pages(int(wanted.sum()))
        if pages is None:
            return False
        if len(pages):
            owners = np.repeat(table.pool_row[rows], wanted)
            firsts = np.repeat(held - np.cumsum(wanted) + wanted, wanted)
            columns = (firsts + np.arange(len(pages))).astype(np.int32)
            memory.pool.page_table[owners, columns] = pages
            builder.write_pages(owners, columns, pages)
        self._state.verify(rows, ends, drafts)
        builder.decode(rows[~verify], starts[~verify])
        builder.verify(rows[verify], starts[verify], drafts[verify])
        if memory.states is not None and memory.tree.enabled:
            self._track_states(builder, rows, starts + 1)
        self._state.charge_decode(rows)
        return True

    def _retract_decode(self, rows: Int32Array, now: int) -> Int32Array:
        """Retract victims until each of the other `rows` can take one more token; return those that can do so now.

        Pages that a plan in flight will free count as free. If they are needed, no row decodes now, and none is
        retracted for them.
        """
        state, memory = self._state, self._state.memory
        views = state.views(now)
        views.running = rows
        before = len(rows)
        for victim in state.limits.borrowers_first(views, list(state.policy.victims(views))):
            growth = memory.page_size * self._state.pages_to_decode(rows)
            if growth <= min(memory.free_tokens, memory.free_window_tokens):
                break
            state.retract(victim, "out of pages", now)
            rows = rows[rows != victim]
        if len(rows) < before:
            state.policy.headroom.retracted(state.table, rows)
        fits = self._state.pages_to_decode(rows) <= memory.available_pages
        return rows if fits else NO_ROWS

    def _break_deadlock(self, refused: int | None, now: int) -> bool:
        """Break a deadlock, with nothing planned and nothing in flight; False if there is none.

        If prefills together hold all pages, the newest is retracted; a request that does not fit alone is ended.
        """
        state = self._state
        if len(state.prefilling) > 1:
            state.retract(int(state.prefilling.rows[-1]), "out of pages", now)
            return True
        if len(state.prefilling):
            refused = int(state.prefilling.rows[0])
        if refused is None or len(state.running) or len(state.loading) or state.memory.holds:
            # Rows that run or load, and holds, free their pages eventually.
            return False
        message = "the request needs more KV than the pool has"
        state.end(refused, "abort", now, message=message, cause="no_memory")
        state.sweep()
        return True


def _verify_s(cost: CostModel, drafts: Int32Array, starts: Int32Array) -> float:
    """Seconds of a step over rows at `starts` that verify `drafts` drafts (int32[n] both)."""
    rows, verified = len(drafts), int(drafts.sum()) + len(drafts)
    context = int(starts.sum(dtype=np.int64)) + verified
    return cost.step(StepWork(verified, rows, rows, context, verify_tokens=verified))
