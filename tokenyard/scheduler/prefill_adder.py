"""Fills one step with prefill: unfinished prefills and newcomers, in the policy's order, until a budget is used up.

SGLang calls this the PrefillAdder. Admission of one row is: match and lock (tentative), check room, take a pool row and
pages. Any failure unlocks and ends the step's prefill, so a large request is not skipped for smaller ones, unless the
policy lets others pass a request that does not fit (`Policy.passable`).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tokenyard.base import Load, RowStart
from tokenyard.base.blocks import BLOCK_TOKENS, block_digests, link, root_digest
from tokenyard.cache.radix_cache import MatchResult
from tokenyard.cache.windows import WindowPages
from tokenyard.policy import Views
from tokenyard.policy.step_budget import StepBudget
from tokenyard.scheduler.memory import UNLIMITED
from tokenyard.scheduler.plan_builder import Chunk, PlanBuilder, StateSave
from tokenyard.scheduler.row_state import RowState
from tokenyard.scheduler.scheduler_state import SchedulerState

MAX_PASSED = 16
"""Requests that are passed over in one step, so that its cost does not grow with the queue."""


class PrefillAdder:
    """One step's prefill.

    Tokens that are reserved but not yet taken are counted in three sums: `_reserved_running` (the growth that headroom
    predicts for rows that ran before), `_reserved_newcomers` (the same for rows admitted in this step) and
    `_reserved_prompts` (the unplanned rest of prompts that have started).
    """

    def __init__(self, state: SchedulerState, views: Views, budget: StepBudget, builder: PlanBuilder) -> None:
        self._state = state
        self._table = state.table
        self._memory = state.memory
        self._policy = state.policy
        self._limits = state.limits
        self._views = views
        self._budget = budget
        self._builder = builder
        self._requests_left = budget.max_requests
        self._num_prefilling = len(views.prefilling)
        self._free_rows = views.free_rows
        self._reserved_running = self._growth(views)
        self._reserved_newcomers = 0
        self._reserved_prompts = self._unplanned(views)
        self._continued: set[int] = set()
        windows = state.memory.windows
        self._windows = None if windows is None else WindowBudget(state, windows)
        self.refused: int | None = None

    def _unplanned(self, views: Views) -> int:
        """Tokens of started prompts that have not been planned."""
        rows = np.concatenate((views.prefilling, views.loading))
        return int((self._table.target[rows] - self._table.held[rows]).sum())

    def _growth(self, views: Views) -> int:
        """Tokens held back for running rows: the headroom, but at least what their next decode takes.

        With less, a newcomer could take those pages and be retracted immediately.
        """
        growing = self._memory.page_size * self._state.pages_to_decode(views.running)
        return max(self._policy.headroom.running_tokens(views), growing)

    def fill(self) -> None:
        """Draw candidates until the budget is used up or a newcomer does not fit and may not be passed over; then only
        started prefills continue.

        Sets `refused` to the first newcomer that did not fit in memory.
        """
        drawn: set[int] = set()
        passed: list[int] = []
        for row in self._policy.candidates(self._views):
            if self._requests_left <= 0:
                return
            drawn.add(row)
            started = self._table.state[row] == RowState.PREFILL
            if not started and not (self._limits.may_start(row) and self._may_load(row)):
                continue
            if not started and not self._state.adapters.may_start(row):
                continue
            if started and not self._continue(row):
                return
            if not started and not self._admit(row):
                if not self._may_pass(row, len(passed)):
                    break
                passed.append(row)
        else:
            if not passed:
                self._limits.end_step(drawn)
        if passed:
            self.refused = passed[0]
        for row in self._policy.prefilling_order(self._views):
            if row not in self._continued and (self._requests_left <= 0 or not self._continue(row)):
                return

    def _may_pass(self, row: int, passed: int) -> bool:
        """Whether later candidates may start before `row`, which was not admitted, if `passed` were passed over before.

        If the budget or the rows are used up, no candidate can start.
        """
        return self.refused == row and passed < MAX_PASSED and self._policy.passable(row, self._views.now)

    def _continue(self, row: int) -> bool:
        """Plan the next chunk of a prefill that has started."""
        self._continued.add(row)
        table = self._table
        start = int(table.planned[row])
        rest = int(table.target[row]) - start
        count = min(self._budget.chunk(start, rest), self._memory.max_chunk_tokens)
        if count <= 0 or not self._plan_chunk(row, start, count):
            return False
        self._reserved_prompts -= count
        self._num_prefilling -= count == rest
        return True

    def _admit(self, row: int) -> bool:
        """Match, lock, check and take; on any failure unlock and return False."""
        if self._free_rows <= 0 and not self._preemption_candidates(row):
            return False
        match = self._match(row)
        if self._state.holders is not None:
            # Already here, as headroom counts what the row would share.
            self._state.holders.hold(row, match.node)
        self._table.request_state(row).branch_tokens = match.branch_tokens
        take = self._load if self._table.loadable_tokens[row] > match.tokens else self._allocate_row
        if self._fits(row, match.tokens) and take(row, match.node, match.tokens):
            return True
        self._unlock(row, match)
        return False

    def _match(self, row: int) -> MatchResult:
        """The longest usable prefix in the tree, locked."""
        request_state, usable = self._table.request_state(row), self._table.usable_tokens(row)
        return self._memory.match(request_state.known_ids.tobytes(), request_state.request.namespace, usable)

    def _unlock(self, row: int, match: MatchResult) -> None:
        """Undo `_match` and the hold on it: the row was not admitted."""
        if self._state.holders is not None:
            self._state.holders.release(row)
        self._memory.unlock(match)

    def _fits(self, row: int, hit: int) -> bool:
        """Whether there is a free row, and prompt and predicted answer fit on top of all reservations; if not, preempt.

        If nothing runs and nothing is planned, a row may always try, as `submit` refuses requests that can never fit. A
        row that failed while pages were held for a reader outside waits until some are returned. A row is preempted
        only if the budget allows a chunk of the newcomer, so that no preemption is useless.
        """
        views = self._views
        # Rows that began to load in this step are in no view and not in the builder.
        started = len(views.running) or len(views.prefilling) or len(self._state.loading)
        alone = self._builder.empty and not started
        if alone and (not self._memory.holds or self._state.pages_returned_since(row)):
            return True
        if alone:
            self.refused = row
            return False
        extend = self._memory.pages_for(int(self._table.target[row]) - hit) * self._memory.page_size
        growth, returned = self._policy.headroom.newcomer_tokens(self._table, row), self._resume_reserve_tokens(row)
        reserved = self._reserved_running + self._reserved_newcomers + self._reserved_prompts
        spared = self._policy.spared_tokens(row)
        missing = extend + growth + returned + spared - (self._memory.free_tokens - reserved)
        missing_windows = 0
        if self._windows is not None:
            chunk_rows = [chunk.row for chunk in self._builder.chunks]
            missing_windows = returned + self._windows.missing(hit, extend + growth, views, chunk_rows, reserved)
        if max(missing, missing_windows) <= 0 and self._free_rows > 0:
            return True
        # A row that gave its pages to others does not take them back from those by preemption.
        if self._state.pages_returned_since(row) and self._preempt(row, hit, missing, missing_windows):
            return True
        if max(missing, missing_windows) > 0:
            self.refused = row
        return False

    def _resume_reserve_tokens(self, row: int) -> int:
        """Extra room in tokens that a row retracted for lack of pages needs to return: one page for each running row,
        or 0 once another request has ended or was paused. Without it the row would take the same pages that it just
        gave up.
        """
        if self._state.pages_returned_since(row):
            return 0
        return self._memory.page_size * len(self._views.running)

    def _chunk(self, row: int, start: int, prefilling: int) -> int:
        """Tokens of a newcomer's prompt from `start` on that this step may compute next to `prefilling` other
        unfinished prompts; 0 if it has to wait.
        """
        rest = int(self._table.target[row]) - start
        count = min(self._budget.chunk(start, rest), self._memory.max_chunk_tokens)
        return 0 if count < rest and prefilling >= self._budget.max_prefilling else count

    def _allocate_row(self, row: int, node: Any, hit: int) -> bool:
        """Take a pool row and the pages of the first chunk."""
        table, memory = self._table, self._memory
        extend, count = int(table.target[row]) - hit, self._chunk(row, hit, self._num_prefilling)
        if count <= 0:
            return False
        if not memory.pool.available_rows or not self._can_take(hit, count):
            self.refused = row
            return False
        self._reserve(row, node, hit)
        self._state.admit(row, hit, self._views.now)
        self._limits.admitted(row)
        self._policy.admitted(row)
        self._plan_chunk(row, hit, count)
        self._admitted(row, extend - count)
        self._num_prefilling += count < extend
        return True

    def _reserve(self, row: int, node: Any, hit: int) -> None:
        """Take a pool row with the locked prefix of `hit` tokens; no tokens are planned yet."""
        table, request_state = self._table, self._table.request_state(row)
        table.pool_row[row], _ = self._memory.allocate_row(request_state.known_ids, node, hit)
        if self._state.stores is not None:
            self._state.stores.hit(node)
        request_state.node, request_state.fresh, request_state.state_loaded = node, True, False
        self._state.adapters.join(row)
        table.cached[row] = table.computed[row] = table.planned[row] = table.held[row] = hit

    def _start_row(self, row: int) -> None:
        """Send the executor the pool row's new owner and the pages that it has so far."""
        request_state, pool_row = self._table.request_state(row), int(self._table.pool_row[row])
        held = self._memory.pages_for(int(self._table.held[row]))
        pages = self._memory.pool.page_table[pool_row, :held].copy()
        self._builder.write_page_run(pool_row, 0, pages)
        if request_state.state_loaded:
            self._start_from_loaded_state(row)
        elif self._memory.states is not None and held:
            self._builder.copy_state(self._memory.states.slot(int(pages[-1])), pool_row)
            self._memory.states.release(int(pages[-1]))
        self._builder.row_starts.append(self._row_start(row, pool_row))
        self._builder.adapter_loads += self._state.adapters.needs_load(row)
        request_state.fresh = False

    def _start_from_loaded_state(self, row: int) -> None:
        """Keep a checkpoint of what was loaded, for rows with the same prefix; those that waited for it may start."""
        states, table = self._memory.states, self._table
        tokens = int(table.held[row])
        if states is not None and tokens % states.unit == 0 and table.cached[row] == tokens:
            node = table.request_state(row).node
            self._builder.keep_loaded_state(int(table.pool_row[row]), tokens, node)
        self._state.end_load(row)

    def _admitted(self, row: int, reserved_tokens: int) -> None:
        """Reserve what a row admitted in this step will still take: the rest of its prompt, and its answer."""
        self._reserved_prompts += reserved_tokens
        self._reserved_newcomers += self._policy.headroom.newcomer_tokens(self._table, row)
        self._policy.headroom.admitted(self._table, row)
        self._free_rows -= 1

    def _may_load(self, row: int) -> bool:
        """Whether the row may start now; it waits if another row loads the same block, then finds it in the tree."""
        if not self._table.loadable_tokens[row]:
            return True
        return not self._state.is_loading_elsewhere(row, self._load_key(row, self._hit(row)))

    def _hit(self, row: int) -> int:
        """Tokens of a waiting row that the tree holds now."""
        match = self._match(row)
        self._memory.unlock(match)
        return match.tokens

    def _load_key(self, row: int, start: int) -> bytes:
        """The name of the first block of the row's tokens that is not wholly before `start`; it may be the beginning of
        one only.
        """
        request_state, block = self._table.request_state(row), start // BLOCK_TOKENS
        ids, root = request_state.known_ids, root_digest(request_state.request.namespace)
        digests = block_digests(ids[: (block + 1) * BLOCK_TOKENS], root)
        if len(digests) > block:
            return digests[block]
        return link(digests[-1] if digests else root, ids[block * BLOCK_TOKENS :].tobytes())

    def _load(self, row: int, node: Any, hit: int) -> bool:
        """Take a pool row and pages for the KV to load beyond `hit`; the row is planned once it has arrived."""
        table, memory = self._table, self._memory
        loadable_tokens = int(table.loadable_tokens[row])
        if not memory.pool.available_rows or not self._can_take(hit, loadable_tokens - hit):
            self.refused = row
            return False
        self._reserve(row, node, hit)
        first, pool_row = memory.pages_for(hit), int(table.pool_row[row])
        pages = memory.take_pages(memory.pages_for(loadable_tokens) - first)
        assert pages is not None
        memory.pool.page_table[pool_row, first : first + len(pages)] = pages
        table.held[row] = loadable_tokens
        self._state.load(row, hit, self._load_key(row, hit), self._views.now)
        self._limits.admitted(row)
        self._policy.admitted(row)
        self._admitted(row, int(table.target[row]) - loadable_tokens)
        state_slot = -1 if memory.states is None else pool_row
        self._state.outbox.transfer(Load(int(table.number[row]), hit, pages, state_slot))
        return True

    def _can_take(self, start: int, count: int) -> bool:
        pages = self._memory.pages_for(start + count) - self._memory.pages_for(start)
        return bool(pages <= self._memory.available_pages)

    def _plan_chunk(self, row: int, start: int, count: int) -> bool:
        """Take the chunk's pages and add it to the builder; False if there are not enough pages now."""
        table, memory = self._table, self._memory
        first = memory.pages_for(start)
        pages = memory.take_pages(memory.pages_for(start + count) - first)
        if pages is None:
            return False
        if table.request_state(row).fresh:
            self._start_row(row)
        pool_row = int(table.pool_row[row])
        memory.pool.page_table[pool_row, first : first + len(pages)] = pages
        self._builder.write_page_run(pool_row, first, pages)
        if memory.states is not None and memory.tree.enabled:
            self._save_states(row, start, start + count)
        last = start + count == table.target[row]
        sampled = bool(last and table.request(row).sampling.max_new_tokens > 0)
        if last:
            self._state.prompt_planned(row)
        self._builder.chunks.append(Chunk(row, start, count, sampled))
        self._state.observer.chunk_planned(row)
        table.planned[row] = table.held[row] = start + count
        self._budget.spend(start, count)
        self._policy.charge(row, count)
        self._limits.charge(row, count)
        self._requests_left -= 1
        return True

    def _save_states(self, row: int, start: int, end: int) -> None:
        """Save checkpoints of the recurrent states of a prompt whose tokens from `start` to `end` are computed, where
        the retention wants them.

        The last one is at the last page boundary (with a KV store, the last end of a block) before the prompt's last
        token, so that the same prompt hits again.
        """
        states, size = self._memory.states, self._memory.page_size
        assert states is not None
        last = (int(self._table.target[row]) - 1) // states.unit * states.unit
        pool_row, before = int(self._table.pool_row[row]), int(self._table.hit[row])
        branch = self._table.request_state(row).branch_tokens // states.unit * states.unit
        for position, kind in states.retention.positions(start, end, branch, last, states.roomy):
            page = int(self._memory.pool.page_table[pool_row, position // size - 1])
            after = int(self._memory.pool.page_table[pool_row, before // size - 1]) if before else 0
            self._builder.save_state(StateSave(pool_row, position, page, kind, position - before, after))
            before = position

    def _row_start(self, row: int, pool_row: int) -> RowStart:
        table = self._table
        request_state = table.request_state(row)
        request = request_state.request
        sampling, answer = request.sampling, int(table.number[row]) - request.number
        if answer:
            sampling = replace(sampling, seed=sampling.seed + answer)
        prompt_tokens = int(table.prompt_tokens[row])
        return RowStart(
            pool_row,
            sampling,
            request_state.known_ids,
            prompt_tokens,
            request.logprobs,
            request.grammar,
            request.pooling,
            request.prediction,
            request.lora,
            int(table.slot[row]),
        )

    def _preempt(self, row: int, hit: int, missing_tokens: int, missing_windows: int) -> bool:
        """Preempt rows that rank strictly below `row`: all that are needed, or none.

        None is preempted if the budget allows no chunk of `row` after its first `hit` tokens in this step. Pages of
        rows in flight come back when their plans commit; until then the newcomer waits at the front.
        """
        victims = self._preemption_candidates(row)
        victims = victims[: self._victims_needed(row, victims, missing_tokens, missing_windows)]
        if not victims:
            return False
        left = self._without(victims)
        prefilling = self._num_prefilling - len(self._views.prefilling) + len(left.prefilling)
        if not self._chunk(row, hit, prefilling):
            return False
        self._reserved_prompts -= self._unplanned(self._views) - self._unplanned(left)
        self._num_prefilling = prefilling
        for victim in victims:
            self._limits.preempted(victim, row)
            self._state.retract(victim, "preempted", self._views.now)
        self._views.running, self._views.prefilling = left.running, left.prefilling
        self._free_rows += len(victims)
        self._reserved_running = self._growth(left)
        return True

    def _preemption_candidates(self, row: int) -> list[int]:
        """Rows that `row` may preempt: those it outranks, worst first, then those that borrow its tenant's share."""
        victims = self._limits.exclude_protected_rows(row, list(self._policy.outranked(self._views, row)))
        taken = {chunk.row for chunk in self._builder.chunks}
        victims = [victim for victim in victims if victim not in taken]
        taken.update(victims)
        return victims + [victim for victim in self._limits.borrowers(self._views, row) if victim not in taken]

    def _victims_needed(self, row: int, victims: list[int], missing_tokens: int, missing_windows: int) -> int:
        """How many of `victims`, from the first on, to preempt to free the `missing_tokens` of `row`, and
        `missing_windows` in the layers with a window; 0 if all of them are too few.

        Locks in the tree are lifted for a moment, which shows how many pages rows with a common prefix hold together.
        """
        table, memory, needed = self._table, self._memory, 0
        if not victims:
            return 0
        if max(missing_tokens, missing_windows) <= 0:
            return min(len(victims), 1)
        reserved, private = self._growth(self._views) + self._unplanned(self._views), 0
        growth = self._policy.headroom.newcomer_tokens(table, row)
        most = int(table.held[victims].sum()) + memory.page_size * len(victims) + reserved
        if most < missing_tokens:
            return 0
        evictable, lifted = memory.tree.evictable_pages, []
        for victim in victims:
            lifted.append(table.request_state(victim).node)
            memory.tree.unlock(lifted[-1])
            # Pages of drafts in flight count as free already.
            held = int(table.held[victim] - table.verifying[victim])
            private += memory.pages_for(held) - int(table.cached[victim]) // memory.page_size
            gained = memory.page_size * (memory.tree.evictable_pages - evictable + private)
            left = self._without(victims[: len(lifted)])
            gained += reserved - self._growth(left) - self._unplanned(left)
            # What the newcomer adds to a peak depends on the rows that are left.
            gained += growth - self._policy.headroom.newcomer_tokens(table, row)
            if gained >= missing_tokens and self._windows_gained(victims[: len(lifted)]) >= missing_windows:
                needed = len(lifted)
                break
        for node in lifted:
            memory.tree.lock(node)
        return needed

    def _windows_gained(self, victims: list[int]) -> int:
        return UNLIMITED if self._windows is None else self._windows.gained(victims)

    def _without(self, victims: list[int]) -> Views:
        views, gone = self._views, np.array(victims, np.int32)
        return replace(
            views,
            running=views.running[~np.isin(views.running, gone)],
            prefilling=views.prefilling[~np.isin(views.prefilling, gone)],
        )


class WindowBudget:
    """How many window tokens a newcomer lacks in addition to reservations, and how many victims would free."""

    def __init__(self, state: SchedulerState, windows: WindowPages) -> None:
        self._table, self._memory, self._windows = state.table, state.memory, windows
        chunk = state.settings.chunked_prefill_size
        chunk = min(chunk, windows.max_chunk_tokens) if chunk > 0 else windows.max_chunk_tokens
        self._max_chunk_tokens = windows.max_retained_tokens + chunk + 2 * windows.page_size

    def missing(self, hit: int, further: int, views: Views, chunk_rows: list[int], reserved: int) -> int:
        """Tokens of windows that a row lacks which begins behind `hit` tokens and grows by `further`.

        reserved: tokens that the admitted rows, those of `chunk_rows` among them, are expected to grow by.
        """
        seen = hit - self._windows.window_start_page(hit) * self._windows.page_size
        rows = np.unique(np.concatenate((views.running, views.prefilling, np.array(chunk_rows, np.int32))))
        held = self._table.held[rows] - self._table.verifying[rows]
        growing = int(np.maximum(self._max_chunk_tokens - held, 0).sum())
        need = min(seen + further, self._max_chunk_tokens) - seen
        return need - (self._memory.free_window_tokens - min(reserved, growing))

    def gained(self, victims: list[int]) -> int:
        """Tokens of windows that become free or evictable if all `victims` leave, which no two of them count twice."""
        table, windows, pages, shared = self._table, self._windows, 0, [np.empty(0, np.int32)]
        for row in victims:
            pool_row, cached = int(table.pool_row[row]), int(table.cached[row]) // windows.page_size
            tokens = int(table.held[row] - table.verifying[row])
            held = self._memory.pool.page_table[pool_row, : self._memory.pages_for(tokens)]
            pages += int(np.count_nonzero(windows.of[held[cached:]]))
            shared.append(held[int(windows.first[pool_row]) : cached])
        ids, counts = np.unique(np.concatenate(shared), return_counts=True)
        return windows.page_size * (pages + int(np.count_nonzero(windows.users[ids] == counts)))
