"""Orders of the waiting rows: those of SGLang, and highest response ratio."""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tokenyard.base import BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.views import PrefixBranch, Views

Keys = Int64Array | npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

DRAWN_AT_ONCE = 64
SAMPLE = 512
"""About this many keys are sampled to find the border of the best ones."""

LAST = 2**62


def best_first(rows: Int32Array, key: Keys) -> Iterator[int]:
    """`rows` (int32[n]) by ascending `key` (int64[n] or float64[n]); ties keep their order.

    The first few dozen come from a selection in O(n); the rest is sorted only if it is drawn.
    """
    for places in _sorted_places(key):
        ordered = rows[places]
        for start in range(0, len(ordered), DRAWN_AT_ONCE):
            yield from ordered[start : start + DRAWN_AT_ONCE].tolist()


def in_groups(rows: Int32Array, key: Int64Array) -> Iterator[Int32Array]:
    """`rows` grouped by `key`, the lowest key first; rows of one key keep their order. Lazy like `best_first`."""
    for places in _sorted_places(key):
        borders = np.flatnonzero(np.diff(key[places])) + 1
        start = 0
        for end in (*borders.tolist(), len(places)):
            yield rows[places[start:end]]
            start = end


def _sorted_places(key: Keys) -> Iterator[IndexArray]:
    """Places by ascending key; ties keep their order. First come those below a border, which are few, then those on it,
    which may be many but need no sorting, then all others. No tie is cut, and no part is empty.
    """
    if len(key) <= DRAWN_AT_ONCE:
        parts = [np.ones(len(key), np.bool_)]
    else:
        border = _border(key)
        below, on_border = key < border, key == border
        # NaN is neither below nor on the border, and comes last.
        parts = [below, on_border, ~(below | on_border)]
    for part in parts:
        places = np.flatnonzero(part)
        if len(places):
            yield places[np.argsort(key[places], kind="stable")]


def _border(key: Keys) -> Any:
    """A key such that `DRAWN_AT_ONCE` to a few times as many keys are not above it, estimated from a sample.

    `np.partition` finds the exact one, but takes ten times as long where most keys are one of a few.
    """
    stride = len(key) // SAMPLE | 1
    sample = np.sort(key[::stride])
    return sample[min(2 * DRAWN_AT_ONCE // stride + 1, len(sample) - 1)]


class LongestPrefixMatch(Policy):
    """Most cached prompt tokens first (RadixAttention, Zheng et al. 2024): the best order for the hit rate.

    With in-batch prefix caching: of requests that share their first tokens and have hardly a hit, all but the first are
    put last. The first brings the tokens into the tree, and the others find them there.
    """

    name = "lpm"
    needs_tree = True
    overtaking = "none: a request that shares no prefix can wait as long as others keep hitting"

    @override
    def order(self, views: Views) -> Iterator[int]:
        degrade = self.settings.lpm_degrade_threshold
        if 0 < degrade < len(views.waiting):
            return super().order(views)
        key = -views.columns.matchable[views.waiting].astype(np.int64)
        key[self._deprioritized(views)] = LAST
        return best_first(views.waiting, key)

    def _deprioritized(self, views: Views) -> BoolArray:
        """Rows with a prefix that an earlier waiting row, or a row in prefill, will insert; bool[len(waiting)]."""
        columns, waiting = views.columns, views.waiting
        groups = columns.prefix_group[waiting]
        grouped = (columns.matchable[waiting] <= self.settings.in_batch_prefix_caching_check_threshold) & (groups >= 0)
        places = np.flatnonzero(grouped)
        groups = groups[places]
        first = np.full(len(columns.seq), -1)
        first[groups[::-1]] = places[::-1]
        admitted = np.concatenate((views.prefilling, views.running))
        coming = admitted[columns.computed[admitted] < self.settings.in_batch_prefix_caching_deprioritize_threshold]
        leaders = columns.prefix_group[coming]
        first[leaders[leaders >= 0]] = -1
        grouped[places] = first[groups] != places
        return grouped


class DfsWeight(Policy):
    """Depth first through the tree, most waiting requests first, so that requests with a common prefix run together.

    SGLang's rule: children before the node's own requests.
    """

    name = "dfs-weight"
    needs_tree = True
    overtaking = "none: the few that share a prefix can wait as long as others keep coming for another prefix"

    @override
    def order(self, views: Views) -> Iterator[int]:
        """Rows come in batches, since the tree's weights change as rows are admitted."""
        wanted = np.zeros(len(views.columns.seq), np.bool_)
        wanted[views.waiting] = True
        most = DRAWN_AT_ONCE
        while batch := self._walk(views, wanted, most):
            wanted[batch] = False
            yield from batch
            most = len(views.waiting)

    def _walk(self, views: Views, wanted: BoolArray, most: int) -> list[int]:
        """At least `most` of the wanted rows that still wait, or all if they are fewer, in order."""
        assert views.prefixes is not None
        found: list[int] = []
        stack = [(views.prefixes, views.prefixes.heaviest_first())]
        while stack and len(found) < most:
            branch, children = stack[-1]
            child = next(children, None)
            if child is not None:
                stack.append((child, child.heaviest_first()))
                continue
            stack.pop()
            if branch.own:
                found.extend(_own_rows(views, branch, wanted))
        return found


def _own_rows(views: Views, branch: PrefixBranch, wanted: BoolArray) -> list[int]:
    """Wanted rows at `branch`, in order of arrival."""
    columns = views.columns
    if branch.own <= DRAWN_AT_ONCE:
        own = [row for row in branch.rows() if wanted[row]]
        return own if len(own) < 2 else sorted(own, key=lambda row: int(columns.seq[row]))
    rows = views.waiting[columns.branch[views.waiting] == branch.birth]
    listed: list[int] = rows[wanted[rows]].tolist()
    return listed


class LongestOutput(Policy):
    """Longest answer allowed first (SGLang's lof): long jobs fill the batch, short ones its gaps at the end."""

    name = "lof"
    overtaking = "none: a request that asks for few tokens can wait as long as others ask for more"

    @override
    def order(self, views: Views) -> Iterator[int]:
        columns, waiting = views.columns, views.waiting
        answer = columns.limit[waiting].astype(np.int64) - columns.prompt_tokens[waiting]
        return best_first(waiting, -answer)


class RandomOrder(Policy):
    """A new shuffle each step, from a seeded generator: a baseline without bias."""

    name = "random"
    overtaking = "none, but each step gives every request the same chance"
    options: ClassVar[dict[str, Option]] = {"seed": 0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"seed": (0, 2**63)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._generator = np.random.default_rng(int(self.chosen["seed"]))

    @override
    def order(self, views: Views) -> Iterator[int]:
        return iter(self._generator.permutation(views.waiting).tolist())


class RoutingKey(Policy):
    """The routing key that most running requests have goes first (SGLang): with one key per LoRA adapter few are
    loaded.

    Keys of equal count stay together; a request without a key, or with a key that no running request has, comes last.
    """

    name = "routing-key"
    overtaking = "none: a request with a key that no running request has can wait as long as others keep coming"

    @override
    def order(self, views: Views) -> Iterator[int]:
        columns = views.columns
        keys = columns.routing[views.waiting].astype(np.int64)
        running = columns.routing[np.concatenate((views.prefilling, views.running))]
        counts = np.bincount(running, minlength=int(keys.max(initial=0)) + 1)
        counts[0] = 0
        count = counts[keys]
        return best_first(views.waiting, np.where(count > 0, keys - (count << 32), LAST))


class HighestResponseRatio(Policy):
    """Longest wait in proportion to the work first (Brinch Hansen 1971): short requests start soon, and long ones never
    starve.

    The work is the number of prompt tokens that are not cached.
    """

    name = "hrrn"
    uses_hits = True
    overtaking = "only by shorter requests, shorter in proportion to how much less they have waited"

    @override
    def order(self, views: Views) -> Iterator[int]:
        columns, waiting = views.columns, views.waiting
        waited = (views.now - columns.arrival_ns[waiting]).astype(np.float64)
        ratio = waited / np.maximum(columns.target[waiting] - columns.matchable[waiting], 1)
        return best_first(waiting, -ratio)


POLICIES: list[type[Policy]] = [
    LongestPrefixMatch,
    DfsWeight,
    LongestOutput,
    RandomOrder,
    RoutingKey,
    HighestResponseRatio,
]
