"""A simulated KV pool that records whose history each slot holds, to detect a page with two owners."""

import zlib

import numpy as np
import numpy.typing as npt

from tokenyard.base import LAST_SAMPLED, ExecutorInfo, Int32Array, KvPieces, RowStart, StepPlan, TokenyardError

UInt64Array = npt.NDArray[np.uint64]


class KvMismatchError(TokenyardError):
    """A plan reads or writes KV that is not its row's own."""

    code = "kv_mismatch"


def mix(values: UInt64Array) -> UInt64Array:
    """Scramble 64-bit numbers (the finalizer of splitmix64, Steele et al. 2014); element-wise, any shape."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_MASK = 2**64 - 1


def mix_one(value: int) -> int:
    """`mix` of one number; for one, ints are ten times as fast as arrays."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def history_marks(tokens: Int32Array, first_position: int = 0, before: int = 0, adapter: str = "") -> UInt64Array:
    """Return uint64[n]: one mark per token that depends on it, its position and everything before it.

    `before` is the mark of the position before `first_position`; at the very beginning it is 0, or depends on the
    `adapter`.
    """
    if adapter:
        before += zlib.crc32(adapter.encode())
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    return np.uint64(before) + np.cumsum(mix(tokens.astype(np.uint64) + (positions << np.uint64(32))), dtype=np.uint64)


class _Row:
    """Tokens and marks of one pool row, in arrays that grow by doubling."""

    def __init__(self, start: RowStart, weights: str) -> None:
        self.prompt_tokens = start.prompt_tokens
        self.length = len(start.known_ids)
        self.tokens: Int32Array = np.array(start.known_ids, dtype=np.int32)
        self.marks = history_marks(self.tokens, adapter=start.lora + weights)

    def append(self, token: int) -> None:
        if self.length == len(self.tokens):
            self.tokens = np.resize(self.tokens, max(16, 2 * self.length))
            self.marks = np.resize(self.marks, max(16, 2 * self.length))
        before = int(self.marks[self.length - 1]) if self.length else 0
        self.tokens[self.length] = token
        self.marks[self.length] = (before + mix_one(token + (self.length << 32))) & _MASK
        self.length += 1


class _Group:
    """The pool of one group of layers: which page holds what of a row, and the mark in each slot.

    window: how many tokens back a token sees, 0 for all.
    """

    def __init__(self, info: ExecutorInfo, num_pages: int, window: int) -> None:
        self._num_pages, self._page_size, self._window = num_pages, info.page_size, window
        pages_per_row = -(-info.context_length // info.page_size)
        self._page_table = np.zeros((info.max_pool_rows, pages_per_row), dtype=np.int32)
        self.slots = np.zeros((num_pages + 1) * info.page_size, dtype=np.uint64)

    def write_pages(self, plan: StepPlan, ids: Int32Array) -> None:
        # A page that has left the window is 0.
        if len(ids) and (ids.min() < (0 if self._window else 1) or ids.max() > self._num_pages):
            raise KvMismatchError(f"step {plan.step}: page ids must lie in 1..{self._num_pages}")
        self._page_table[plan.page_rows, plan.page_columns] = ids

    def first_slots(self, pages: Int32Array) -> UInt64Array:
        """The mark in the first slot of each page."""
        found: UInt64Array = self.slots[pages.astype(np.int64) * self._page_size]
        return found

    def fill(self, pages: Int32Array, mark: np.uint64) -> None:
        """Overwrite all slots of pages."""
        self.slots.reshape(-1, self._page_size)[pages] = mark

    def seen_from(self, start: int) -> int:
        """The first position that a token at `start` sees."""
        return max(start - self._window + 1, 0) if self._window else 0

    def slots_of(self, step: int, pool_row: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The slots of a row's positions from `begin` to `end`."""
        size, positions = self._page_size, np.arange(begin, end)
        columns = positions // size
        if end > self._page_table.shape[1] * size or not self._page_table[pool_row, columns].all():
            raise KvMismatchError(f"step {step}: row {pool_row} has no page for some of its {end} tokens")
        slots: npt.NDArray[np.int64] = self._page_table[pool_row, columns].astype(np.int64) * size + positions % size
        return slots


_IN_PAGES = np.uint64(0x5555555555555555)
"""Marks of KV and of checkpoints differ by this."""


class _States:
    """The slots of recurrent states: each holds the mark of the last token of the prefix that made it."""

    def __init__(self, info: ExecutorInfo, slots: int) -> None:
        self._pool_rows = info.max_pool_rows
        self._marks = np.zeros(info.max_pool_rows + slots, dtype=np.uint64)

    def copy(self, plan: StepPlan, kv: _Group) -> None:
        """Apply the copies before the step. Where checkpoints are in pages of `kv`, these must hold them still."""
        sources, targets = plan.state_copies.T
        self._marks[targets] = self._marks[sources]
        for source, pages in zip(sources.tolist(), plan.state_pages, strict=False):
            if (kv.first_slots(pages) != self._marks[source] ^ _IN_PAGES).any():
                raise KvMismatchError(f"step {plan.step}: the pages of checkpoint {source} hold something else")

    def keep(self, plan: StepPlan, kv: _Group) -> None:
        """Write the checkpoints that the step saved to their pages of `kv`, if they have some."""
        pages = plan.state_pages[len(plan.state_copies) :]
        for (_, _, slot), own in zip(plan.state_saves.tolist(), pages, strict=False):
            kv.fill(own, self._marks[slot] ^ _IN_PAGES)

    def compute(self, plan: StepPlan, rows: dict[int, _Row]) -> None:
        """Each row continues from its own state; its saves hold the state in between. Drafts are not in it yet."""
        ends = plan.starts + plan.counts
        verified = slice(plan.decode_rows, plan.chunks_from)
        ends[verified] = plan.starts[verified] + 1
        ends = ends.tolist()
        spans = dict(zip(plan.pool_rows.tolist(), zip(plan.starts.tolist(), ends, strict=True), strict=True))
        for pool_row, (start, _) in spans.items():
            if start and self._marks[pool_row] != rows[pool_row].marks[start - 1]:
                raise KvMismatchError(
                    f"step {plan.step}: row {pool_row} continues at position {start} from another state"
                )
        saves = plan.state_saves.tolist()
        if len({slot for _, _, slot in saves}) < len(saves):
            raise KvMismatchError(f"step {plan.step}: two states are saved to one slot")
        for pool_row, position, slot in saves:
            start, end = spans.get(pool_row, (0, 0))
            if not start < position <= end or not self._pool_rows <= slot < len(self._marks):
                raise KvMismatchError(f"step {plan.step}: row {pool_row} cannot save position {position} to {slot}")
            self._marks[slot] = rows[pool_row].marks[position - 1]
        for pool_row, (_, end) in spans.items():
            self._marks[pool_row] = rows[pool_row].marks[end - 1]

    def pieces(self, slots: Int32Array) -> KvPieces:
        """Return where the marks in slots lie."""
        size = self._marks.itemsize
        return KvPieces(self._marks.ctypes.data + slots.astype(np.int64)[:, None] * size, size, "cpu")

    def confirm(self, pool_row: int, mark: np.uint64) -> None:
        """Take the drafts into a row's state that were right; `mark` is that of the last of them."""
        self._marks[pool_row] = mark


class KvCheck:
    """Simulates the KV pool for plans whose drafts have ids. Call `apply` before a step and `sampled` after it.

    Each slot keeps the mark of the history that was written to it last. After a step's writes, all slots of a row up
    to its last computed position that its first token sees must hold the marks of that row's own history, and so must
    the recurrent state that it continues from.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info
        self._groups = [_Group(info, info.num_pages, 0)]
        if info.windows is not None:
            self._groups.append(_Group(info, info.windows.num_pages, info.windows.window))
        self._states = _States(info, info.states.num_slots) if info.states is not None else None
        self._rows: dict[int, _Row] = {}

    def apply(self, plan: StepPlan, weights: str = "") -> None:
        """Take over new rows and pages, write the step's tokens and verify every row. Raises KvMismatchError.

        weights: a name of those in use. Rows that start never continue from KV of others.
        """
        for start in plan.row_starts:
            self._rows[start.pool_row] = _Row(start, weights)
        for group, ids in zip(self._groups, (plan.page_ids, plan.window_ids), strict=False):
            group.write_pages(plan, ids)
        if self._states is not None:
            self._states.copy(plan, self._groups[0])
        offset = 0
        slots_of_rows = []
        columns = zip(plan.pool_rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        for i, (pool_row, start, count) in enumerate(columns):
            tokens = plan.tokens[offset : offset + count]
            offset += count
            verifies = plan.decode_rows <= i < plan.chunks_from
            self._check_tokens(plan.step, pool_row, start, tokens[:1] if verifies else tokens)
            marks = self._rows[pool_row].marks
            for group in self._groups:
                begin = group.seen_from(start)
                slots = group.slots_of(plan.step, pool_row, begin, start + count)
                own = start - begin
                if verifies:
                    group.slots[slots[own + 1 :]] = history_marks(tokens[1:], start + 1, int(marks[start]))
                    slots = slots[: own + 1]
                group.slots[slots[own:]] = marks[start : begin + len(slots)]
                slots_of_rows.append((group, pool_row, begin, slots))
        if self._states is not None:
            self._states.compute(plan, self._rows)
        for group, pool_row, begin, slots in slots_of_rows:
            self._verify(plan.step, group, pool_row, begin, slots)
        if self._states is not None:
            self._states.keep(plan, self._groups[0])

    def sampled(self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array) -> None:
        """Record the tokens that a step yields: `accepted[i]` of `tokens` for each row, row after row."""
        ends = np.cumsum(accepted)
        for i in np.flatnonzero(accepted).tolist():
            row = self._rows[int(plan.pool_rows[i])]
            position = int(plan.starts[i] + plan.counts[i] - plan.samples[i] + 1)
            if position != row.length:
                raise KvMismatchError(
                    f"step {plan.step}: row {plan.pool_rows[i]} samples position {position}, but {row.length} of its"
                    " tokens are known"
                )
            for token in tokens[ends[i] - accepted[i] : ends[i]].tolist():
                row.append(token)
            if self._states is not None and plan.decode_rows <= i < plan.chunks_from:
                self._states.confirm(int(plan.pool_rows[i]), row.marks[plan.starts[i] + accepted[i] - 1])

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Return where the marks of pages lie: one piece for each page."""
        slots = self._groups[0].slots
        page_bytes = self._info.page_size * slots.itemsize
        return KvPieces(slots.ctypes.data + pages.astype(np.int64)[:, None] * page_bytes, page_bytes, "cpu")

    def state_pieces(self, slots: Int32Array) -> KvPieces:
        """Return where the marks of states lie."""
        if self._states is None:
            return KvPieces(np.zeros((len(slots), 0), np.int64), 0, "cpu")
        return self._states.pieces(slots)

    def _check_tokens(self, step: int, pool_row: int, start: int, tokens: Int32Array) -> None:
        row = self._rows.get(pool_row)
        if row is None:
            raise KvMismatchError(f"step {step}: row {pool_row} is used before any RowStart gave it an owner")
        if start + len(tokens) > row.length:
            raise KvMismatchError(
                f"step {step}: row {pool_row} computes up to {start + len(tokens)}, but only {row.length} of its tokens"
                " are known"
            )
        own = row.tokens[start : start + len(tokens)]
        if tokens.tobytes() == own.tobytes():
            return
        wrong = (tokens != own) & (tokens != LAST_SAMPLED)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise KvMismatchError(
                f"step {step}: row {pool_row} is given token {tokens[at]} at position {start + at}; its history has"
                f" {own[at]}"
            )
        if (tokens == LAST_SAMPLED).any() and (len(tokens) != 1 or start != row.length - 1):
            raise KvMismatchError(f"step {step}: row {pool_row} asks for its last sampled token at position {start}")

    def _verify(self, step: int, group: _Group, pool_row: int, begin: int, slots: npt.NDArray[np.int64]) -> None:
        wrong = group.slots[slots] != self._rows[pool_row].marks[begin : begin + len(slots)]
        if wrong.any():
            at = int(np.argmax(wrong))
            raise KvMismatchError(
                f"step {step}: row {pool_row} finds another history at position {begin + at} (slot {slots[at]}):"
                f" {int(wrong.sum())} of {len(slots)} slots are not its own"
            )


class AdapterCheck:
    """Simulates the adapter slots for plans: at every step, the slot of each row must hold the row's adapter."""

    def __init__(self) -> None:
        self._holders: dict[int, str] = {}
        self._rows: dict[int, RowStart] = {}
        self._next_step = 0

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start, and check all. Raises KvMismatchError for a row whose slot has another adapter.

        The plan's number of loads is checked until a step is lost before it fills the slots that it counts.
        """
        loads = 0
        self._next_step = plan.step + 1 if plan.step == self._next_step else -1
        for start in plan.row_starts:
            self._rows.pop(start.pool_row, None)
            if start.slot:
                self._rows[start.pool_row] = start
                loads += self._holders.get(start.slot) != start.lora
                self._holders[start.slot] = start.lora
        if loads > plan.adapter_loads and self._next_step > 0:
            raise KvMismatchError(f"step {plan.step}: {loads} adapters are brought to slots, not {plan.adapter_loads}")
        if not self._rows:
            return
        for pool_row in plan.pool_rows.tolist():
            owner = self._rows.get(pool_row)
            if owner is not None and self._holders[owner.slot] != owner.lora:
                raise KvMismatchError(
                    f"step {plan.step}: row {pool_row} has adapter {owner.lora!r}, and slot {owner.slot} holds"
                    f" {self._holders[owner.slot]!r}"
                )
