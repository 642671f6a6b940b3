"""Orders of the waiting rows as SGLang names them."""

from collections.abc import Iterator

import numpy as np

from tokenyard.base import Int64Array
from tokenyard.policy.base import Policy
from tokenyard.policy.views import Views

DRAWN_AT_ONCE = 64


def by_key(views: Views, key: Int64Array) -> Iterator[int]:
    """Waiting rows by ascending `key` (int64[len(waiting)]), ties by arrival, sorted only as far as they are drawn.

    The first `DRAWN_AT_ONCE` rows come from a selection in O(n); the rest is sorted only if someone asks for it.
    """
    waiting = views.waiting
    if len(waiting) <= DRAWN_AT_ONCE:
        yield from waiting[np.argsort(key, kind="stable")].tolist()
        return
    border = np.partition(key, DRAWN_AT_ONCE)[DRAWN_AT_ONCE]
    ahead = np.flatnonzero(key < border)
    yield from waiting[ahead[np.argsort(key[ahead], kind="stable")]].tolist()
    behind = np.flatnonzero(key >= border)
    yield from waiting[behind[np.argsort(key[behind], kind="stable")]].tolist()


class LongestPrefixMatch(Policy):
    """Most cached prompt tokens first (RadixAttention, Zheng et al. 2024): the best order for the hit rate."""

    name = "lpm"
    needs_tree = True
    overtaking = "unbounded: a request that shares no prefix can wait as long as others keep hitting"

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        return by_key(views, -views.columns.matchable[views.waiting].astype(np.int64))


POLICIES: list[type[Policy]] = [LongestPrefixMatch]
