"""A step plan in the making: decoding and verifying rows as columns, chunks one by one, a `StepPlan` at the end."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import DRAFT, LAST_SAMPLED, Int32Array, RowStart, StepPlan
from tokenyard.base.protocols import MAX_STATE_SAVES
from tokenyard.base.step_plan import NO_STATE_COPIES, NO_STATE_PAGES, NO_STATE_SAVES
from tokenyard.cache.state_checkpoints import ANSWER, BRANCH, PROMPT, SPACED
from tokenyard.scheduler.memory import NO_PAGES, KvMemory
from tokenyard.scheduler.request_table import RequestTable

_SAVED_FIRST = (ANSWER, BRANCH, PROMPT, SPACED)


@dataclass(slots=True)
class Chunk:
    """`count` tokens of one row's prompt from position `start`; `sampled` if a token follows its last one."""

    row: int
    start: int
    count: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class StateSave:
    """The recurrent states of a pool row after its tokens before `position`, of which `page` is the last.

    kind, saved, after: see `StateCheckpoints.save`.
    """

    pool_row: int
    position: int
    page: int
    kind: int
    saved: int
    after: int


class PlanBuilder:
    """Collects what one step does. Table columns are advanced by the caller; nothing here allocates."""

    def __init__(self, table: RequestTable, memory: KvMemory) -> None:
        self._table = table
        self._memory = memory
        self.decode_rows: Int32Array = NO_PAGES
        self._decode_starts: Int32Array = NO_PAGES
        self.verify_rows: Int32Array = NO_PAGES
        self._verify_starts: Int32Array = NO_PAGES
        self._drafts: Int32Array = NO_PAGES
        self.chunks: list[Chunk] = []
        self.row_starts: list[RowStart] = []
        self.adapter_loads = 0
        self._page_rows: list[Int32Array] = []
        self._page_columns: list[Int32Array] = []
        self._page_ids: list[Int32Array] = []
        self._state_copies: list[tuple[int, int]] = []
        self._state_saves: list[StateSave] = []
        self._loaded_states: list[tuple[int, int, Any]] = []

    @property
    def empty(self) -> bool:
        """Whether the step would do nothing."""
        return not (len(self.decode_rows) or len(self.verify_rows) or self.chunks)

    def decode(self, rows: Int32Array, starts: Int32Array) -> None:
        """Let `rows` (int32[n]) compute one token each at `starts` (int32[n])."""
        self.decode_rows, self._decode_starts = rows, starts

    def verify(self, rows: Int32Array, starts: Int32Array, drafts: Int32Array) -> None:
        """Let `rows` compute their last sampled token at `starts` and then `drafts` drafts each; all int32[n]."""
        self.verify_rows, self._verify_starts, self._drafts = rows, starts, drafts

    def write_pages(self, pool_rows: Int32Array, columns: Int32Array, pages: Int32Array) -> None:
        """page_table[pool_rows[i], columns[i]] = pages[i] before the step; all int32[m]."""
        self._page_rows.append(pool_rows)
        self._page_columns.append(columns)
        self._page_ids.append(pages)

    def write_page_run(self, pool_row: int, first_column: int, pages: Int32Array) -> None:
        """`write_pages` for consecutive columns of one pool row."""
        columns = np.arange(first_column, first_column + len(pages), dtype=np.int32)
        self.write_pages(np.full(len(pages), pool_row, np.int32), columns, pages)

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent states in one slot to another before the step."""
        self._state_copies.append((source, target))

    def save_state(self, save: StateSave) -> None:
        """Keep a checkpoint of states that the step computes, if a slot can be had once all rows have their pages."""
        self._state_saves.append(save)

    def keep_loaded_state(self, pool_row: int, tokens: int, node: Any) -> None:
        """Keep a checkpoint of a working state that was loaded, if a slot can be had, as `save_state` does.

        tokens: of the prefix after which it is. node: where in the tree that prefix ends, or a node below.
        """
        self._loaded_states.append((pool_row, tokens, node))

    def rows(self) -> Int32Array:
        """Table rows of the step, in the plan's order: decoding ones, verifying ones, then chunks."""
        if not self.chunks and not len(self.verify_rows):
            return self.decode_rows
        chunks = np.array([chunk.row for chunk in self.chunks], np.int32)
        return np.concatenate((self.decode_rows, self.verify_rows, chunks))

    def finish(self, step: int) -> StepPlan:
        """The plan; `step` is its number."""
        rows, decoding = self.rows(), len(self.decode_rows)
        starts, counts = self._decode_starts, np.ones(decoding, np.int32)
        samples, tokens = counts, np.full(decoding, LAST_SAMPLED, np.int32)
        if len(self.verify_rows):
            starts = np.concatenate((starts, self._verify_starts))
            counts = samples = np.concatenate((counts, self._drafts + 1))
            tokens = np.full(int(counts.sum()), DRAFT, np.int32)
            tokens[np.cumsum(counts) - counts] = LAST_SAMPLED
        if self.chunks:
            starts = np.concatenate((starts, np.array([chunk.start for chunk in self.chunks], np.int32)))
            counts = np.concatenate((counts, np.array([chunk.count for chunk in self.chunks], np.int32)))
            samples = np.concatenate((samples, np.array([chunk.sampled for chunk in self.chunks], np.int32)))
            tokens = np.concatenate((tokens, *map(self._chunk_tokens, self.chunks)))
        page_ids = _joined(self._page_ids)
        copies = np.array(self._state_copies, np.int32) if self._state_copies else NO_STATE_COPIES
        # The pages of copies first, because a save may take the slot of one.
        copied = self._checkpoint_pages(copies[:, 0])
        kept = self._keep_loaded_states()
        saves = self._saves()
        if kept:
            # All copies read before one writes, so the slot of one that is read may be taken by another.
            copies = np.concatenate((copies, self._copies_of(kept)))
        return StepPlan(
            step=step,
            pool_rows=self._table.pool_row[rows],
            epochs=self._table.epoch[rows],
            starts=starts,
            counts=counts,
            samples=samples,
            tokens=tokens,
            page_rows=_joined(self._page_rows),
            page_columns=_joined(self._page_columns),
            page_ids=page_ids,
            row_starts=self.row_starts,
            decode_rows=decoding,
            delay_sampling=self._table.grammars > 0 and bool(self._table.constrained[rows][samples > 0].any()),
            verify_rows=len(self.verify_rows),
            adapter_loads=self.adapter_loads,
            window_ids=self._memory.window_ids(page_ids),
            state_copies=copies,
            state_saves=saves,
            state_pages=np.concatenate((copied, self._checkpoint_pages(saves[:, 2]))),
        )

    def _checkpoint_pages(self, slots: Int32Array) -> Int32Array:
        states = self._memory.states
        return NO_STATE_PAGES if states is None or not states.slot_tokens else states.pages_of(slots)

    def _keep_loaded_states(self) -> list[tuple[int, int]]:
        """Take a slot for each loaded state that is worth one: (pool row, page)."""
        states, found = self._memory.states, []
        for pool_row, tokens, node in self._loaded_states:
            assert states is not None
            page = int(self._memory.pool.page_table[pool_row, tokens // states.page_size - 1])
            if states.save_cached(page, tokens, node):
                found.append((pool_row, page))
        return found

    def _copies_of(self, kept: list[tuple[int, int]]) -> Int32Array:
        """The copies from working slots to those of `kept` whose slot was not taken since: int32[n, 2]."""
        states = self._memory.states
        assert states is not None
        copies = [(pool_row, states.slot(page)) for pool_row, page in kept if states.of[page]]
        return np.array(copies, np.int32).reshape(-1, 2)

    def _saves(self) -> Int32Array:
        """Take a slot for each state to be saved that is worth one: int32[n, 3], see StepPlan."""
        states, found = self._memory.states, []
        if states is not None and states.slot_tokens and len(self._state_saves) > MAX_STATE_SAVES:
            # Those on the way of a long prompt give way to the ends, and these to what prompts have in common.
            self._state_saves.sort(key=lambda save: _SAVED_FIRST.index(save.kind))
            answers = sum(save.kind == ANSWER for save in self._state_saves)
            del self._state_saves[answers + MAX_STATE_SAVES :]
        for save in self._state_saves:
            assert states is not None
            if save.kind == ANSWER:
                states.track(save.pool_row, save.page, save.position, save.saved, save.after)
            else:
                states.save(save.page, save.position, save.kind, save.saved, save.after)
        # A later one may have taken the slot of an earlier one.
        for save in self._state_saves:
            if states is not None and states.of[save.page]:
                found.append((save.pool_row, save.position, states.slot(save.page)))
        return np.array(found, np.int32) if found else NO_STATE_SAVES

    def _chunk_tokens(self, chunk: Chunk) -> Int32Array:
        pool_row = self._table.pool_row[chunk.row]
        tokens: Int32Array = self._memory.pool.token_ids[pool_row, chunk.start : chunk.start + chunk.count]
        return tokens


def _joined(parts: list[Int32Array]) -> Int32Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES
