"""Slots of LoRA adapters on the device: which adapter is in which, which rows may start, and which slot empties next.

At most as many different adapters are in a step as there are slots. A row keeps its adapter in its slot while it has a
place, so a slot takes another adapter only once no row uses it. A request whose adapter is in no slot is passed over
while others, whose adapters are, start. From `lora_drain_wait_threshold` seconds after it was first passed over, it has
a claim: one slot takes no new rows until it is empty, and in the step after that only the adapter of the claim. Claims
are in the order in which requests were first passed over, one for each adapter, so a request waits for a slot at most
for that time and for the answers that run in the slots of the claims before its own.

A claim lasts for one step in which its slot is empty. If none of its requests starts then, for lack of a row, of pages
or of leave by a limit, or because the policy fills the step with others, the slot is open to whichever request the
policy names first. It is claimed again only after it was used: otherwise claims of requests that cannot start would
follow each other and keep an unused slot from a more urgent request.
"""

from collections.abc import Iterator

import numpy as np

from tokenyard.base import NS_PER_S, Int32Array, SchedulerSettings
from tokenyard.policy import Views
from tokenyard.scheduler.request_table import RequestTable

NO_ADAPTER = 0
"""The number of no adapter (`RequestTable.adapter`)."""


class AdapterSlots:
    """The slots, numbered from 1 on. Without slots (`enable_lora` is off) adapters only divide the prefix cache."""

    def __init__(self, settings: SchedulerSettings, table: RequestTable) -> None:
        self._table = table
        self.enabled = settings.enable_lora
        self.count = settings.max_loras_per_batch if settings.enable_lora else 0
        self._drain_wait_ns = round(settings.lora_drain_wait_threshold * NS_PER_S)
        self._holders = [NO_ADAPTER] * (self.count + 1)
        self._users = [0] * (self.count + 1)
        self._used = [0] * (self.count + 1)
        self._loaded = [NO_ADAPTER] * (self.count + 1)
        self._slot_of: dict[int, int] = {}
        self._claims: dict[int, int] = {}
        self._claimed: dict[int, int] = {}
        self._open: set[int] = set()
        self._uses = 0
        self._now = 0

    def begin_step(self, views: Views) -> None:
        """Drop claims that no row waits for any more, and let rows that have waited long enough make new ones."""
        if not self.enabled:
            return
        self._now = views.now
        adapters = self._table.adapter[views.waiting]
        if not adapters.any():
            self._claims.clear()
            self._claimed.clear()
            return
        wanted = {int(adapter) for adapter in np.unique(adapters)}
        self._claims = {adapter: slot for adapter, slot in self._claims.items() if adapter in wanted}
        self._claimed = {slot: adapter for adapter, slot in self._claims.items()}
        if self._drain_wait_ns:
            free = self.count - len(self._claims) - len(self._open)
            for adapter in self._overdue(views.waiting, adapters)[:free]:
                self._claim(adapter)

    def end_step(self) -> None:
        """A step's prefill is planned: claims on slots that were empty in it have had their turn."""
        for adapter, slot in list(self._claims.items()):
            if not self._users[slot]:
                del self._claims[adapter], self._claimed[slot]
                self._open.add(slot)
                self._begin_anew(adapter)

    def may_start(self, row: int) -> bool:
        """Whether a waiting row finds its adapter in a slot, or one for it; if not, its time until a claim begins."""
        table = self._table
        adapter = int(table.adapter[row])
        if not self.enabled or adapter == NO_ADAPTER:
            return True
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._empty_slot(adapter)
        elif slot in self._claimed:
            slot = None
        if slot is None and not table.skipped_since_ns[row]:
            table.skipped_since_ns[row] = self._now
        return slot is not None

    def join(self, row: int) -> None:
        """A row that may start is admitted."""
        table = self._table
        adapter = int(table.adapter[row])
        if not self.enabled or adapter == NO_ADAPTER:
            return
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._empty_slot(adapter)
            assert slot is not None, "the row may not start"
            self._put(adapter, slot)
        self._uses += 1
        self._open.discard(slot)
        self._users[slot] += 1
        self._used[slot] = self._uses
        table.slot[row] = slot

    def needs_load(self, row: int) -> bool:
        """A row starts on the executor; returns whether its adapter must be loaded into its slot."""
        slot, adapter = int(self._table.slot[row]), int(self._table.adapter[row])
        if not slot or self._loaded[slot] == adapter:
            return False
        self._loaded[slot] = adapter
        return True

    def leave(self, row: int) -> None:
        """A row ended or was retracted."""
        slot = int(self._table.slot[row])
        if slot:
            self._users[slot] -= 1
            self._table.slot[row] = 0

    def unload(self, adapter: str) -> None:
        """An adapter was unloaded: its slot is free. Raises ValueError while rows have it."""
        number = self._table.adapter_number(adapter)
        slot = self._slot_of.get(number)
        if slot is not None and self._users[slot]:
            raise ValueError(f"the adapter {adapter!r} is in use")
        if slot is not None:
            self._clear(slot)
            self._used[slot] = 0

    def measures(self) -> dict[str, float]:
        """Figures for metrics, by name."""
        if not self.enabled:
            return {}
        used = sum(users > 0 for users in self._users)
        return {"lora_slots": self.count, "lora_slots_used": used, "lora_slots_claimed": len(self._claims)}

    def _put(self, adapter: int, slot: int) -> None:
        if self._holders[slot]:
            self._clear(slot)
        self._claimed.pop(self._claims.pop(adapter, 0), None)
        self._begin_anew(adapter)
        # The slot counts as a user of the number, so no other adapter gets this number meanwhile.
        self._table.retain_adapter(adapter)
        self._holders[slot], self._slot_of[adapter] = adapter, slot

    def _begin_anew(self, adapter: int) -> None:
        """An adapter had its turn: its requests that wait are behind those that were passed over before."""
        self._table.skipped_since_ns[self._table.adapter == adapter] = 0

    def _clear(self, slot: int) -> None:
        adapter, self._holders[slot], self._loaded[slot] = self._holders[slot], NO_ADAPTER, NO_ADAPTER
        del self._slot_of[adapter]
        self._table.release_adapter(adapter)

    def _empty_slot(self, adapter: int) -> int | None:
        """The slot that an adapter which is in none may have now: its claim's, else the one unused for longest."""
        claimed = self._claims.get(adapter, 0)
        if claimed and not self._users[claimed]:
            return claimed
        empty = [slot for slot in self._slots() if not self._users[slot] and slot not in self._claimed]
        return min(empty, key=lambda slot: self._used[slot], default=None)

    def _overdue(self, waiting: Int32Array, adapters: Int32Array) -> list[int]:
        """Adapters in no slot with a row that has waited long enough since it was passed over, the longest first."""
        since = self._table.skipped_since_ns[waiting]
        rows = waiting[(adapters != NO_ADAPTER) & (since > 0) & (self._now - since >= self._drain_wait_ns)]
        in_order = rows[np.lexsort((self._table.seq[rows], self._table.skipped_since_ns[rows]))]
        found = dict.fromkeys(self._table.adapter[in_order].tolist())
        return [adapter for adapter in found if adapter not in self._slot_of and adapter not in self._claims]

    def _claim(self, adapter: int) -> None:
        """Give an adapter the slot, of those without a claim that are not open, that will be empty first."""
        free = [slot for slot in self._slots() if slot not in self._claimed and slot not in self._open]
        left = self._tokens_left()
        slot = min(free, key=lambda slot: (left[slot], self._used[slot]))
        self._claims[adapter], self._claimed[slot] = slot, adapter

    def _tokens_left(self) -> list[int]:
        """For each slot, the most tokens that any row in it may still compute."""
        table = self._table
        left = [0] * (self.count + 1)
        for row in np.flatnonzero(table.slot).tolist():
            slot = int(table.slot[row])
            left[slot] = max(left[slot], int(table.limit[row] - table.planned[row]))
        return left

    def _slots(self) -> Iterator[int]:
        return iter(range(1, self.count + 1))
