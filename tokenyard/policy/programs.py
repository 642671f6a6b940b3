"""Orders by session from the literature on agents' programs, to compare with `hits-first` and `session`.

A request without a session is a session of one turn.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, Int64Array, SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.views import SessionState, Views

MAX_PROGRAMS = 4096
"""Sessions that are remembered: those with the latest turns. A forgotten one starts over."""

NONE = -1

Key = tuple[str, str]
"""Tenant and session."""


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


class Continuum(ProgramFcfs):
    """`program-fcfs`, where newcomers leave the KV of sessions alone for a time to live after each turn.

    After Continuum (arXiv 2511.02230, also CacheTTL). A turn that comes back in time keeps its KV until it starts. With
    `ttl_s` 0 the time is the one that maximises P(back in time) * seconds of recomputing the context
    - share of the pool * E[seconds that it is kept]; the gaps are learned by kind of stop. Any other `ttl_s` holds for
    all sessions. If nothing runs, a newcomer may evict the KV.
    """

    name = "continuum"
    needs_sessions = True
    needs_cost = True
    options: ClassVar[dict[str, Option]] = {"ttl_s": 0.0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"ttl_s": (0.0, 3600.0)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._ttl_s = float(self.chosen["ttl_s"])
        self._ttls: dict[Key, tuple[int, float]] = {}
        self._retained: dict[Key, int] | None = None

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self._retained = None

    @override
    def retains(self, session: SessionState, now: int) -> bool:
        if not session.tokens:
            return False
        key = session.tenant, session.name
        ended_ns, ttl_s = self._ttls.get(key, (0, 0.0))
        if ended_ns != session.idle_ns:
            if len(self._ttls) >= MAX_PROGRAMS:
                self._ttls.clear()
            ttl_s = self._best_ttl_s(session)
            self._ttls[key] = session.idle_ns, ttl_s
        return (session.arrived_ns or now) - session.idle_ns <= ttl_s * NS_PER_S

    @override
    def spared_tokens(self, row: int) -> int:
        views = self.views
        if views is None or views.sessions is None:
            return 0
        if self._retained is None:
            self._retained = views.sessions.retained_tokens(views.now)
        return sum(self._retained.values()) - self._retained.get(_key(views, row), 0)

    @override
    def admitted(self, row: int) -> None:
        super().admitted(row)
        if self.views is not None and self._retained is not None:
            self._retained.pop(_key(self.views, row), None)

    def _best_ttl_s(self, session: SessionState) -> float:
        views = self.views
        if self._ttl_s or views is None or views.sessions is None or views.cost is None:
            return self._ttl_s
        recompute_s = PrefillTime.of(views.cost).chunk_s(0, session.tokens)
        return views.sessions.best_ttl_s(session.kind, recompute_s * views.total_tokens / session.tokens)


@dataclass(slots=True)
class Program:
    """A session that `PauseIdle` lets in.

    tokens: its context: the longest prompt of its requests, and the latest answer.
    idle_ns: when its latest request ended.
    """

    tokens: int
    idle_ns: int = 0


class PauseIdle(Policy):
    """First come, first served, among as many sessions as the KV pool holds.

    A turn starts if its session is active, or if the contexts of the active ones leave room for its own. To make room,
    sessions are paused that have been idle for `idle_s`, or at all while nothing runs, the longest idle ones first. One
    whose requests are all held back (`Pause`, a limit of its tenant) counts as idle since its latest answer.
    Turns of sessions that are not active wait in the order of their own arrival. After the pauses of ThunderAgent
    (arXiv 2602.13692), which lets sessions return in the order of their own.
    """

    name = "pause-idle"
    needs_sessions = True
    overtaking = "turns of active sessions, as long as none of them is idle for `idle_s` seconds; among others none"
    options: ClassVar[dict[str, Option]] = {"idle_s": 30.0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"idle_s": (0.0, 3600.0)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._idle_ns = round(float(self.chosen["idle_s"]) * NS_PER_S)
        self._active: dict[Key, Program] = {}
        self._open: dict[Key, set[int]] = {}
        self._key_of: dict[int, Key] = {}
        self._seen: Int64Array = np.zeros(0, np.int64)

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        seq, waiting = views.columns.seq, views.waiting
        self._seen = np.concatenate((self._seen, np.full(len(seq) - len(self._seen), NONE)))
        for row in waiting[self._seen[waiting] != seq[waiting]].tolist():
            self._seen[row] = seq[row]
            self._key_of[row] = key = _key(views, row)
            self._open.setdefault(key, set()).add(row)

    @override
    def order(self, views: Views) -> Iterator[int]:
        blocked = False
        for row in super().order(views):
            active = self._key_of[row] in self._active
            if active or (not blocked and self._to_pause(int(views.columns.target[row])) is not None):
                yield row
            else:
                blocked = True

    @override
    def admitted(self, row: int) -> None:
        assert self.views is not None
        key, tokens = self._key_of.get(row), int(self.views.columns.target[row])
        if key is None:
            return
        if key not in self._active:
            for paused in self._to_pause(tokens) or ():
                del self._active[paused]
        self._grow(key, tokens)

    @override
    def finished(self, row: int) -> None:
        if self.views is not None and (key := self._key_of.get(row)) in self._active:
            self._grow(key, int(self.views.columns.known[row]))

    @override
    def removed(self, row: int) -> None:
        key = self._key_of.pop(row, None)
        if key is None:
            return
        assert self.views is not None
        self._open[key].discard(row)
        if self._open[key]:
            return
        del self._open[key]
        if key in self._active and key[1]:
            self._active[key].idle_ns = self.views.now
        else:
            self._active.pop(key, None)

    @override
    def retains(self, session: SessionState, now: int) -> bool:
        return (session.tenant, session.name) in self._active

    def _grow(self, key: Key, tokens: int) -> None:
        program = self._active.setdefault(key, Program(tokens))
        program.tokens = max(program.tokens, tokens)

    def _to_pause(self, tokens: int) -> list[Key] | None:
        """The sessions to pause so that one of `tokens` becomes active; None if that is not enough."""
        assert self.views is not None
        views = self.views
        runs = len(views.running) or len(views.prefilling) or len(views.loading)
        least_ns = self._idle_ns if runs else 0
        lacking = tokens + sum(program.tokens for program in self._active.values()) - views.total_tokens
        if lacking <= 0 or not self._active:
            return []
        rows = np.concatenate((views.running, views.prefilling, views.loading, views.waiting))
        busy = {self._key_of.get(row) for row in rows.tolist()}
        idle = [(program.idle_ns, key) for key, program in self._active.items() if key not in busy]
        chosen = []
        for idle_ns, key in sorted(idle):
            if views.now - idle_ns < least_ns:
                break
            chosen.append(key)
            lacking -= self._active[key].tokens
            if lacking <= 0:
                return chosen
        return None


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


def _key(views: Views, row: int) -> Key:
    """Tenant and session of a row; without a session a name that no session has."""
    request = views.columns.request(row)
    return (request.tenant, request.session) if request.session else (f"#{views.columns.seq[row]}", "")


POLICIES: list[type[Policy]] = [ProgramFcfs, LeastAttainedService, Continuum, PauseIdle]
