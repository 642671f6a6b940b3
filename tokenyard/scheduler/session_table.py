"""Which sessions are idle between two turns, for how long, how much of their KV is in the prefix tree, and what it is
worth to keep it.

A session belongs to its tenant: the same id of another tenant is another session. The table is active while the
policy or the eviction reads it, and in a server from the first request with a session on. It never keeps KV from being
evicted: it counts and ranks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_MS, NS_PER_S, CostModel, PrefixListener, Request, TenantSettings
from tokenyard.policy.eviction_value import CachedPrefix, GuardedValue
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.return_times import KINDS, NO_SESSION, CheckedReturnTimes
from tokenyard.policy.views import IdleSessions, SessionState
from tokenyard.scheduler.request_observer import Counters

MAX_SESSIONS = 4096
MAX_NAME_BYTES = 256
"""Requests with longer session ids count as none, so that the table's memory is bounded."""

MAX_IDLE_NS = 3600 * NS_PER_S
"""KV of a session that has been idle for so long has no value; the session counts as ended."""

RANK_AGAIN_NS = 50 * NS_PER_MS
CHEAP_S = 1.5
WAITING_PER_S, MISS_PER_S = 1.0, 1 / 300
"""Expected uses per second of KV of a session whose turn waits: where little of it was evicted, and else."""

TTL_SHARE = 0.5
"""Share of the pool in which KV with an explicit time to live is kept ahead of all other."""

MAX_TTLS = 256
"""Of so many sessions the time to live counts, as many of each tenant: of those whose turns ended first."""

TTL_VALUE = 1e9
MAX_TIMES = 4096
PRIOR_COST = PrefillTime(1.0, 1.0 / 50_000)
"""Without a cost model: a token behind 50,000 others takes twice the time of the first one."""

Key = tuple[str, str]
"""Tenant and session."""


@dataclass(slots=True)
class Session(SessionState):
    """What the table knows of a session.

    open: the numbers of its requests that wait or run.
    node: the end of its latest prompt in the tree, or of what is left of it; None if it has none there.
    kept_until_ns: the end of an explicit time to live; 0 for none.
    evicted_ns: when KV of its latest prompt was evicted last since that answer ended; 0 for never.
    evicted_from: tokens that were evicted of all KV before the first of that.
    closed: whether it ends with its open requests, unless another turn comes before.
    """

    open: set[int] = field(default_factory=set)
    node: Any = None
    kept_until_ns: int = 0
    evicted_ns: int = 0
    evicted_from: int = 0
    closed: bool = False

    @property
    def missing_tokens(self) -> int:
        """Tokens of its latest prompt that are not in the tree any more."""
        return self.tokens - (0 if self.node is None else int(self.node.depth_tokens))


class AccessTimes:
    """When the ticks of the tree were, to within a second or a small part of the time since."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[int] = []

    def note(self, tick: int, now: int) -> None:
        """`tick` is the latest one at `now` (ns)."""
        if self._times and (tick == self._ticks[-1] or now - self._times[-1] < NS_PER_S):
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > MAX_TIMES:
            half = MAX_TIMES // 2
            self._ticks[:half], self._times[:half] = self._ticks[:half:2], self._times[:half:2]

    def of(self, tick: int) -> int:
        """The time (ns) of a tick; that of the first noted one for older ones."""
        place = bisect_right(self._ticks, tick) - 1
        return self._times[max(place, 0)] if self._times else 0


class SessionTable(IdleSessions, PrefixListener):
    """The sessions with the latest turns, at most `MAX_SESSIONS`, and when such sessions come back.

    It is also the `cache.eviction.Retention` of eviction policy "reuse", and of a user's (`policy.eviction_value`). The
    value of a leaf is the time to recompute a token at its end times the rate of returns (`ReturnTimes.index`) of the
    sessions whose prompts end there, or of requests without a session. A leaf of a session that was idle for
    `MAX_IDLE_NS` has none, whatever was learned.
    """

    def __init__(
        self,
        tree: Any,
        tenants: Mapping[str, TenantSettings] | None = None,
        total_tokens: int = 2**62,
        worth: GuardedValue | None = None,
        counters: Counters | None = None,
        *,
        ranks: bool = True,
    ) -> None:
        self.ranks = ranks
        """Whether the policy or the eviction reads the table. Requests without a session matter to them only."""
        self.retains: Callable[[SessionState, int], bool] | None = None
        """`Policy.retains` of the policy in use; None if it retains nothing."""
        self.returns = CheckedReturnTimes()
        self._tree = tree
        self._tenants = tenants or {}
        self._worth = worth
        self._counters = Counters() if counters is None else counters
        self._total_tokens = total_tokens
        self._sessions: dict[Key, Session] = {}
        self._at: dict[Any, dict[Key, None]] = {}
        self._kept: dict[Key, None] = {}
        self._times = AccessTimes()
        self._now = 0
        self._evicted_tokens = 0
        self._cost: CostModel | None = None
        self._honoured: set[Key] = set()
        tree.listeners.append(self)

    def __len__(self) -> int:
        return len(self._sessions)

    def close(self) -> None:
        """Stop watching the tree."""
        self._tree.listeners.remove(self)
        self._tree.retain_by(None)

    def begin_step(self, cost: CostModel | None, now: int) -> None:
        """The scheduler plans a step at `now` (ns)."""
        self._cost, self._now = cost, now
        self._times.note(self._tree.tick, now)

    def arrived(self, number: int, request: Request, now: int) -> None:
        """The answer `number` of a request joins the queue."""
        key = _key(request)
        if key is None:
            if self.ranks:
                self._learn_from(request, now)
            return
        session = self._sessions.pop(key, None)
        if session is None:
            session = Session(*key)
        elif not session.open:
            self.returns.came_back(session.kind, now - session.idle_ns)
        if not session.open:
            session.arrived_ns = now
        # The order of the dict is that of the latest turns.
        self._sessions[key] = session
        session.open.add(number)
        session.closed = False
        oldest, first = next(iter(self._sessions.items()))
        idle = not first.open and now - first.idle_ns > MAX_IDLE_NS
        if idle or len(self._sessions) > MAX_SESSIONS:
            self._drop(oldest, now)

    def evicted_before(self, request: Request) -> tuple[int, int, int]:
        """How many tokens of the prompt before this one in its session were evicted, when the last of them (ns), and
        how many tokens were evicted in all from the first of them on: in a pool that is larger by these, evictions
        would not have come to it yet.
        """
        key = _key(request)
        session = None if key is None else self._sessions.get(key)
        if session is None or not session.evicted_ns:
            return 0, 0, 0
        return session.missing_tokens, session.evicted_ns, self._evicted_tokens - session.evicted_from

    def measures(self) -> dict[str, float]:
        """How many sessions are active, and how many idle ones are resident, by metric name."""
        idle = [session for session in self._sessions.values() if not session.open]
        resident = sum(session.node is not None and not session.missing_tokens for session in idle)
        return {"active_sessions": len(self._sessions) - len(idle), "resident_sessions": resident}

    def ended(self, number: int, request: Request, node: Any, now: int) -> None:
        """An answer has ended; `node` is the end of its prefix in the tree, None if it has none."""
        key = _key(request)
        session = None if key is None else self._sessions.get(key)
        if key is None or session is None or number not in session.open:
            return
        session.open.discard(number)
        session.idle_ns, session.kind, session.kept_until_ns, session.evicted_ns = now, 0, 0, 0
        self._kept.pop(key, None)
        if session.open:
            return
        session.arrived_ns = 0
        before, node = session.node, None if node is None or node.parent is None else node
        self._move(key, session, node)
        session.tokens = 0 if node is None else node.depth_tokens
        if before is not None and before is not node:
            self._supersede(before, node)
        if session.closed:
            self._drop(key, now)

    def turn_ended(self, tenant: str, name: str, kind: str, ttl_ns: int = -1) -> None:
        """The latest answer of a tenant's session ended with a stop of this kind.

        With `ttl_ns` its KV is kept for so long ahead of KV without, within the bounds that `values` states.
        """
        key = tenant, name
        session = self._sessions.get(key)
        if session is None or session.open:
            return
        session.kind = KINDS[kind]
        if ttl_ns > 0:
            session.kept_until_ns = session.idle_ns + min(ttl_ns, MAX_IDLE_NS)
            self._kept[key] = None

    def session_ended(self, tenant: str, name: str, now: int) -> None:
        """A tenant's session has no further turns; it ends now, or with the last of its answers."""
        session = self._sessions.get((tenant, name))
        if session is None:
            return
        if session.open:
            session.closed = True
        else:
            self._drop((tenant, name), now)

    @override
    def expected_tokens(self, now: int, least_per_s: float) -> int:
        found = (self._sessions[key] for keys in self._at.values() for key in keys)
        idle = [session for session in found if not session.open]
        kinds = np.array([session.kind for session in idle], np.int32)
        idle_ns = now - np.array([session.idle_ns for session in idle], np.int64)
        tokens = np.array([session.node.depth_tokens for session in idle], np.int64)
        return int(tokens[self.returns.index(kinds, idle_ns) >= least_per_s].sum())

    @override
    def retained_tokens(self, now: int) -> dict[Key, int]:
        if self.retains is None:
            return {}
        found, counted = dict[Key, int](), set[Any]()
        for end, keys in self._at.items():
            for key in keys:
                if end.locked or not self.retains(self._sessions[key], now):
                    continue
                # What sessions have in common counts once, and not at all while a started request holds it.
                tokens, node = 0, end
                while node.parent is not None and not node.locked and node not in counted:
                    counted.add(node)
                    tokens += node.depth_tokens - node.parent.depth_tokens
                    node = node.parent
                found[key] = tokens
        return found

    @override
    def best_ttl_s(self, kind: int, worth_s: float) -> float:
        return self.returns.best_ttl_s(kind, worth_s)

    # ---- cache.eviction.Retention ------------------------------------------------------------------------------

    @property
    def stamp(self) -> int:
        """Values hold for `RANK_AGAIN_NS`."""
        return self._now // RANK_AGAIN_NS

    def held(self) -> set[Any]:
        """The ends of prompts with a time to live that is honoured; none for a user's value, which decides alone."""
        self._honoured = self._sessions_kept()
        return set() if self._worth is not None else {self._sessions[key].node for key in self._honoured}

    def values(self, leaves: list[Any]) -> list[float]:
        """What it is worth to keep each leaf.

        KV with a time to live has more value than any other, up to `TTL_SHARE` of the pool, of which a tenant with a
        `kv_share` gets that share; what exceeds it, and what exceeds `MAX_TTLS` sessions, counts as if it had none.
        KV of a session whose turns last came or ended `MAX_IDLE_NS` ago has no value.
        """
        time = PRIOR_COST if self._cost is None else PrefillTime.of(self._cost)
        found = []
        for leaf in leaves:
            keys = self._at.get(leaf) or self._at.get(leaf.parent)
            per_s = self._without_session(leaf) if keys is None else sum(self._uses_per_s(key, time) for key in keys)
            token_s = time.token_s + time.area_s * leaf.depth_tokens
            found.append(per_s * token_s if self._worth is None else self._user_value(leaf, per_s, token_s, keys or ()))
        return found

    def _user_value(self, leaf: Any, per_s: float, token_s: float, keys: Iterable[Key]) -> float:
        assert self._worth is not None
        idle_s = (self._now - self._times.of(leaf.last_access_tick)) / NS_PER_S
        sessions = tuple(self._sessions[key].copied() for key in keys)
        return self._worth.value(
            CachedPrefix(
                leaf.depth_tokens, idle_s, leaf.hits, leaf.priority, token_s, float(per_s), sessions, self._now
            )
        )

    def _uses_per_s(self, key: Key, time: PrefillTime) -> float:
        session = self._sessions[key]
        if session.open and session.node.locked:
            return 0.0
        kept = TTL_VALUE if self.retains is not None and self.retains(session, self._now) else 0.0
        if self._now - max(session.arrived_ns, session.idle_ns) > MAX_IDLE_NS:
            return 0.0
        if session.open:
            lost = session.tokens - session.node.depth_tokens
            return kept + (WAITING_PER_S if time.chunk_s(session.node.depth_tokens, lost) <= CHEAP_S else MISS_PER_S)
        idle_ns = self._now - session.idle_ns
        return self.returns.index_of(session.kind, idle_ns) + (TTL_VALUE if key in self._honoured else kept)

    def _without_session(self, leaf: Any) -> float:
        idle_ns = self._now - self._times.of(leaf.last_access_tick)
        return 0.0 if idle_ns > MAX_IDLE_NS else self.returns.index_of(_kind_without_session(leaf), idle_ns)

    def _sessions_kept(self) -> set[Key]:
        """The sessions whose explicit time to live is honoured now, in the order in which their turns ended.

        Tenants without a `kv_share` have together what the shares leave.
        """
        shares = {name: tenant.kv_share for name, tenant in self._tenants.items() if tenant.kv_share}
        left = {name: TTL_SHARE * share * self._total_tokens for name, share in shares.items()}
        left[""] = TTL_SHARE * (1.0 - sum(shares.values())) * self._total_tokens
        kept, counts = set[Key](), {tenant: 0 for tenant, _ in self._kept}
        most = max(MAX_TTLS // max(len(counts), 1), 1)
        for key in list(self._kept):
            session, tenant = self._sessions[key], key[0]
            if session.open or session.node is None or self._now >= session.kept_until_ns:
                del self._kept[key]
                continue
            budget = tenant if tenant in shares else ""
            tokens = session.node.depth_tokens
            if counts[tenant] < most and tokens <= left[budget]:
                left[budget] -= tokens
                counts[tenant] += 1
                kept.add(key)
                if len(kept) == MAX_TTLS:
                    break
        return kept

    # ---- base.PrefixListener -----------------------------------------------------------------------------------

    @override
    def inserted(self, parent: Any, node: Any) -> None:
        """Nothing changes for sessions."""

    @override
    def split(self, upper: Any, lower: Any) -> None:
        """`lower` keeps its end and its sessions."""

    @override
    def evicted(self, node: Any) -> None:
        """What is left of a session's prefix ends at the parent."""
        parent = node.parent
        keys = list(self._at.get(node, ()))
        for key in keys:
            session = self._sessions[key]
            if not session.evicted_ns:
                self._counters.evicted_sessions += not session.open
                session.evicted_from = self._evicted_tokens
            session.evicted_ns = self._now
            self._move(key, session, None if parent.parent is None else parent)
        self._evicted_tokens += node.depth_tokens - parent.depth_tokens
        if keys or parent in self._at or not self.ranks:
            return
        if node.superseded:
            if parent.parent is not None and not parent.children:
                self._tree.supersede(parent)
        elif parent.children or parent.parent is None or parent.last_access_tick != node.last_access_tick:
            # The rest of a leaf that was cut goes later; it counts once.
            self.returns.lost(_kind_without_session(node), self._now - self._times.of(node.last_access_tick))

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _learn_from(self, request: Request, now: int) -> None:
        """A request without a session came. If most of its prompt is here, it continues what one before it has left."""
        ids = request.known_ids
        found = self._tree.find(ids.tobytes(), request.namespace, len(ids) - 1)
        node = found.node
        if 2 * found.tokens >= len(ids) and not node.locked and node not in self._at:
            self.returns.came_back(_kind_without_session(node), now - self._times.of(node.last_access_tick))

    def _supersede(self, before: Any, node: Any) -> None:
        """A session's prompt ended at `before` and ends at `node` now: what is not on the way there is superseded."""
        path = set()
        while node is not None:
            path.add(node)
            node = node.parent
        for old in (before, *before.children.values()):
            if old not in path and not old.children and not old.locked and old not in self._at:
                self._tree.supersede(old)

    def _move(self, key: Key, session: Session, node: Any) -> None:
        if session.node is not None:
            here = self._at[session.node]
            del here[key]
            if not here:
                del self._at[session.node]
        session.node = node
        if node is not None:
            self._at.setdefault(node, {})[key] = None

    def _drop(self, key: Key, now: int) -> None:
        session = self._sessions.pop(key)
        before = session.node
        self._move(key, session, None)
        self._kept.pop(key, None)
        if not session.open and 0 < session.idle_ns < now:
            self.returns.lost(session.kind, now - session.idle_ns)
            if before is not None:
                self._supersede(before, None)


def _kind_without_session(leaf: Any) -> int:
    return NO_SESSION + int(leaf.hits > 0)


def _key(request: Request) -> Key | None:
    if not request.session or len(request.session) > MAX_NAME_BYTES:
        return None
    return request.tenant, request.session
