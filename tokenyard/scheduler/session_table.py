"""Which sessions are idle between two turns, for how long, and how much of their KV is in the prefix tree.

A session belongs to its tenant: the same id of another tenant is another session. The table is active only while the
policy reads it, and it never keeps KV from being evicted.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from tokenyard.base import PrefixListener, Request
from tokenyard.policy.return_times import KINDS, ReturnTimes
from tokenyard.policy.views import IdleSessions

MAX_SESSIONS = 4096
MAX_NAME_BYTES = 256
"""Requests with longer session ids count as none, so that the table's memory is bounded."""

Key = tuple[str, str]
"""Tenant and session."""


@dataclass(slots=True)
class Session:
    """One session.

    open: the numbers of its requests that wait or run.
    idle_ns: when its latest answer ended.
    kind: index into `KINDS`.
    node: the end of its latest prompt in the tree, or of what is left of it; None if it has none there.
    """

    open: set[int] = field(default_factory=set)
    idle_ns: int = 0
    kind: int = 0
    node: Any = None


class SessionTable(IdleSessions, PrefixListener):
    """The sessions with the latest turns, at most `MAX_SESSIONS`, and when such sessions come back."""

    def __init__(self, tree: Any) -> None:
        self.returns = ReturnTimes()
        self._tree = tree
        self._sessions: dict[Key, Session] = {}
        self._at: dict[Any, dict[Key, None]] = {}
        tree.listeners.append(self)

    def __len__(self) -> int:
        return len(self._sessions)

    def close(self) -> None:
        """Stop watching the tree."""
        self._tree.listeners.remove(self)

    def arrived(self, number: int, request: Request, now: int) -> None:
        """The answer `number` of a request joins the queue."""
        key = _key(request)
        if key is None:
            return
        session = self._sessions.pop(key, None)
        if session is None:
            session = Session()
        elif not session.open:
            self.returns.came_back(session.kind, now - session.idle_ns)
        # The order of the dict is that of the latest turns.
        self._sessions[key] = session
        session.open.add(number)
        self._move(key, session, None)
        if len(self._sessions) > MAX_SESSIONS:
            self._drop(next(iter(self._sessions)), now)

    def ended(self, number: int, request: Request, node: Any, now: int) -> None:
        """An answer has ended; `node` is the end of its prefix in the tree, None if it has none."""
        key = _key(request)
        session = None if key is None else self._sessions.get(key)
        if key is None or session is None or number not in session.open:
            return
        session.open.discard(number)
        session.idle_ns, session.kind = now, 0
        if not session.open and node is not None and node.parent is not None:
            self._move(key, session, node)

    def turn_ended(self, tenant: str, name: str, kind: str) -> None:
        """The latest answer of a tenant's session ended with a stop of this kind."""
        session = self._sessions.get((tenant, name))
        if session is not None and not session.open:
            session.kind = KINDS[kind]

    def session_ended(self, tenant: str, name: str, now: int) -> None:
        """A tenant's session has no further turns."""
        session = self._sessions.get((tenant, name))
        if session is not None and not session.open:
            self._drop((tenant, name), now)

    @override
    def expected_tokens(self, now: int, least_per_s: float) -> int:
        idle = [self._sessions[key] for keys in self._at.values() for key in keys]
        kinds = np.array([session.kind for session in idle], np.int32)
        idle_ns = now - np.array([session.idle_ns for session in idle], np.int64)
        tokens = np.array([session.node.depth_tokens for session in idle], np.int64)
        return int(tokens[self.returns.index(kinds, idle_ns) >= least_per_s].sum())

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
        for key in list(self._at.get(node, ())):
            self._move(key, self._sessions[key], None if node.parent.parent is None else node.parent)

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
        self._move(key, session, None)
        if not session.open and session.idle_ns:
            self.returns.lost(session.kind, now - session.idle_ns)


def _key(request: Request) -> Key | None:
    if not request.session or len(request.session) > MAX_NAME_BYTES:
        return None
    return request.tenant, request.session
