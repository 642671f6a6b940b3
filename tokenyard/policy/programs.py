"""Orders by session from the literature on agents' programs, to compare with `hits-first` and `session`.

A request without a session is a session of one turn.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from tokenyard.base import Int64Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.views import Views

MAX_PROGRAMS = 4096
"""Sessions that are remembered: those with the latest turns. A forgotten one starts over."""

NONE = -1


class ProgramOrder(Policy):
    """The waiting row whose session has the smallest figure first, among equals by arrival.

    Each session that is remembered has a slot in a column of figures. A row's slot is looked up once.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._slots: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._figures: Int64Array = np.zeros(MAX_PROGRAMS, np.int64)
        self._seen: Int64Array = np.zeros(0, np.int64)
        self._slot_of: Int64Array = np.zeros(0, np.int64)

    def first_figures(self, seq: Int64Array) -> Int64Array:
        """The figures of sessions whose first turn is the `seq`-th request, int64[n]."""
        return np.zeros(len(seq), np.int64)

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        seq, waiting = views.columns.seq, views.waiting
        more = len(seq) - len(self._seen)
        if more:
            self._seen = np.concatenate((self._seen, np.full(more, NONE)))
            self._slot_of = np.concatenate((self._slot_of, np.full(more, NONE)))
        for row in waiting[self._seen[waiting] != seq[waiting]].tolist():
            self._seen[row] = seq[row]
            self._slot_of[row] = self._slot(views, row)

    @override
    def order(self, views: Views) -> Iterator[int]:
        waiting = views.waiting
        slots = self._slot_of[waiting]
        own = self.first_figures(views.columns.seq[waiting])
        return best_first(waiting, np.where(slots == NONE, own, self._figures[slots]))

    def add(self, row: int, amount: int) -> None:
        """Add to the figure of the session of `row`, if it has one."""
        assert self.views is not None
        if row < len(self._seen) and self._seen[row] == self.views.columns.seq[row] and self._slot_of[row] != NONE:
            self._figures[self._slot_of[row]] += amount

    def _slot(self, views: Views, row: int) -> int:
        request = views.columns.request(row)
        if not request.session:
            return NONE
        key = request.tenant, request.session
        if key not in self._slots:
            full = len(self._slots) == MAX_PROGRAMS
            self._slots[key] = slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
            self._figures[slot] = self.first_figures(views.columns.seq[[row]])[0]
        self._slots.move_to_end(key)
        return self._slots[key]


class ProgramFcfs(ProgramOrder):
    """Turns in the order in which their sessions began: the order below the pins of Continuum (arXiv 2511.02230)."""

    name = "program-fcfs"
    overtaking = "turns of sessions that began earlier, as long as these keep coming"

    @override
    def first_figures(self, seq: Int64Array) -> Int64Array:
        return seq


class LeastAttainedService(ProgramOrder):
    """The session that has had the least service first: tokens computed of its prompts, and written of its answers.

    This is PLAS of Autellix (Luo et al. 2025, arXiv 2502.13965), with tokens in place of time.
    """

    name = "plas"
    overtaking = "none: a turn of a long session can wait as long as shorter ones keep coming"

    @override
    def charge(self, row: int, prefill_tokens: int) -> None:
        self.add(row, prefill_tokens)

    @override
    def finished(self, row: int) -> None:
        if self.views is not None:
            columns = self.views.columns
            self.add(row, int(columns.known[row] - columns.prompt_tokens[row]))


POLICIES: list[type[Policy]] = [ProgramFcfs, LeastAttainedService]
