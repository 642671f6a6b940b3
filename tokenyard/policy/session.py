"""Sessions: hits first, and KV that an idle session is expected to need soon is kept from misses."""

from typing_extensions import override

from tokenyard.base import SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.hits_first import CHEAP, MISS, HitsFirst
from tokenyard.policy.return_times import SOON_PER_S
from tokenyard.policy.views import Views


class SessionPolicy(HitsFirst):
    """`hits-first`, where misses leave KV alone that is expected to be needed soon.

    A miss starts only in memory that neither idle sessions that are expected back soon nor waiting cheap requests have
    their KV in. When a session comes back is learned from its kind of stop and its idle time. The KV is not pinned:
    rows that have started, cheap requests and due ones may evict it.
    """

    name = "session"
    needs_sessions = True

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._protected: int | None = None

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self._protected = None

    @override
    def spared_tokens(self, row: int) -> int:
        views = self.views
        assert views is not None
        if self._kinds[row] != MISS:
            return 0
        if self._protected is None:
            self._protected = self._soon_needed(views)
        return self._protected

    def _soon_needed(self, views: Views) -> int:
        """Tokens of KV that idle sessions or waiting cheap requests are expected to need soon."""
        kinds = self._kinds[views.waiting]
        tokens = int(views.columns.matchable[views.waiting[kinds == CHEAP]].sum())
        return tokens + (0 if views.sessions is None else views.sessions.expected_tokens(views.now, SOON_PER_S))


POLICIES: list[type[Policy]] = [SessionPolicy]
