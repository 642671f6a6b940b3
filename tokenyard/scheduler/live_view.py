"""What a person who watches the scheduler wants to see: who waits and runs, who holds KV, which prefixes are hot."""

import heapq
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tokenyard.base import NS_PER_MS, Int32Array
from tokenyard.cache.tree_node import TOKEN_DTYPE, TreeNode
from tokenyard.scheduler.request_table import MAX_TENANTS
from tokenyard.scheduler.row_state import Gate, RowState
from tokenyard.scheduler.scheduler_state import SchedulerState

STATES = {
    RowState.WAITING: "waiting",
    RowState.LOADING: "loading",
    RowState.PREFILL: "prefill",
    RowState.RUNNING: "running",
}
MAX_ROWS = 48
"""Single requests shown of those that wait, and of those that have a place; groups count all of them."""

MAX_PREFIXES = 12
MAX_NODES = 2048
"""Nodes looked at for hot prefixes: the walk must not grow with the tree."""

HEAD_TOKENS = 32


@dataclass(slots=True)
class LiveGroup:
    """Requests of one state, service level and tenant.

    known: their tokens.
    held: those with KV on private pages.
    """

    state: str
    level: int
    tenant: str
    requests: int
    known: int
    held: int


@dataclass(slots=True)
class LiveRow:
    """One request.

    age_ms: time since its arrival.
    hit, computed, known: tokens, see `policy.Columns`.
    limit: the most tokens of prompt and answer.
    gates: why it may not start, as bits of `row_state.Gate`.
    """

    number: int
    state: str
    level: int
    tenant: str
    age_ms: float
    prompt: int
    hit: int
    computed: int
    known: int
    limit: int
    gates: int
    paused: bool


@dataclass(slots=True)
class HotPrefix:
    """A run of the tree.

    begin: tokens before it from the root.
    hits: admissions that used it.
    in_use: whether it is locked.
    salted: whether its namespace is not the default one.
    head: its first token ids.
    """

    begin: int
    tokens: int
    hits: int
    in_use: bool
    salted: bool
    head: list[int] = field(default_factory=list)


@dataclass(slots=True)
class KvOwners:
    """Tokens of the device's pool by owner.

    rows: private pages of requests.
    shared: locked pages of the tree.
    cached: evictable pages of the tree.
    held: private pages of readers and writers outside.
    """

    rows: int
    shared: int
    cached: int
    held: int
    free: int
    total: int


@dataclass(slots=True)
class LiveView:
    """The scheduler at one moment.

    prefixes: the hottest first (most tokens saved); None if they were not requested.
    prefixes_cut: whether the tree has more nodes than were visited.
    step_budget_s: the time that the policy allows a step; None for policies that do not bound time.
    step_budget_tokens: prompt tokens that a step may compute; -1 for no bound.
    """

    groups: list[LiveGroup]
    rows: list[LiveRow]
    kv: KvOwners
    prefixes: list[HotPrefix] | None
    prefixes_cut: bool
    step_budget_s: float | None
    step_budget_tokens: int


def take_live_view(state: SchedulerState, now: int, *, prefixes: bool) -> LiveView:
    """The view at `now` (ns). Its cost does not grow with the queue but for a few numpy calls, nor with the tree."""
    found, cut = _hot_prefixes(state) if prefixes else (None, False)
    return LiveView(
        groups=_groups(state),
        rows=_rows(state, now),
        kv=_owners(state),
        prefixes=found,
        prefixes_cut=cut,
        step_budget_s=getattr(state.policy.budget_rule, "limit_s", None),
        step_budget_tokens=state.settings.chunked_prefill_size,
    )


def _groups(state: SchedulerState) -> list[LiveGroup]:
    table = state.table
    rows = np.concatenate([one.rows for one in (state.waiting, state.loading, state.prefilling, state.running)])
    if not len(rows):
        return []
    keys = (table.state[rows].astype(np.int64) * 8 + table.service_level[rows]) * MAX_TENANTS * 2 + table.tenant[rows]
    distinct, place = np.unique(keys, return_inverse=True)
    counts = np.bincount(place)
    known = np.bincount(place, table.known[rows])
    held = np.bincount(place, np.maximum(table.held[rows] - table.cached[rows], 0))
    names = table.tenant_names()
    groups = []
    for index, key in enumerate(distinct.tolist()):
        head, tenant = divmod(key, MAX_TENANTS * 2)
        kind, level = divmod(head, 8)
        group = LiveGroup(STATES[kind], level, names[tenant], int(counts[index]), int(known[index]), int(held[index]))
        groups.append(group)
    return groups


def _rows(state: SchedulerState, now: int) -> list[LiveRow]:
    placed = np.concatenate([one.rows for one in (state.loading, state.prefilling, state.running)])
    shown = [*state.waiting.rows[:MAX_ROWS].tolist(), *placed[:MAX_ROWS].tolist()]
    return [_row(state, row, now) for row in shown]


def _row(state: SchedulerState, row: int, now: int) -> LiveRow:
    table = state.table
    return LiveRow(
        number=int(table.number[row]),
        state=STATES[int(table.state[row])],
        level=int(table.service_level[row]),
        tenant=table.request(row).tenant,
        age_ms=(now - int(table.arrival_ns[row])) / NS_PER_MS,
        prompt=int(table.prompt_tokens[row]),
        hit=int(table.hit[row]),
        computed=int(table.computed[row]),
        known=int(table.known[row]),
        limit=int(table.limit[row]) + 1,
        gates=int(table.gates[row]),
        paused=bool(table.gates[row] & Gate.PAUSED),
    )


def _owners(state: SchedulerState) -> KvOwners:
    memory = state.memory
    size, tree = memory.page_size, memory.tree
    cached = tree.evictable_pages + memory.state_pages
    pages = memory.num_pages - memory.allocator.available - cached - tree.protected_pages
    return KvOwners(
        rows=(pages - memory.held_pages) * size,
        shared=tree.protected_pages * size,
        cached=cached * size,
        held=memory.held_pages * size,
        free=memory.allocator.available * size,
        total=memory.num_pages * size,
    )


def _hot_prefixes(state: SchedulerState) -> tuple[list[HotPrefix], bool]:
    """The runs that saved most tokens, and whether there are nodes that were not looked at.

    A child is never hit more often than its parent, so the nodes with most hits are visited first.
    """
    heap: list[tuple[int, int, TreeNode, bool]] = []
    seen = 0
    for root in islice(state.memory.tree.roots(), MAX_NODES):
        seen += _push(heap, root, bool(root.namespace), MAX_NODES - seen, seen)
    visited: list[tuple[TreeNode, bool]] = []
    while heap:
        _, _, node, salted = heapq.heappop(heap)
        visited.append((node, salted))
        seen += _push(heap, node, salted, MAX_NODES - seen, seen)
    visited = [(node, salted) for node, salted in visited if node.hits]
    best = heapq.nlargest(MAX_PREFIXES, visited, key=lambda one: one[0].hits * len(one[0].pages))
    return [_prefix(node, salted) for node, salted in best], seen >= MAX_NODES


def _push(heap: list[tuple[int, int, TreeNode, bool]], node: TreeNode, salted: bool, most: int, seen: int) -> int:
    """Put up to `most` children of a node on the heap; how many. `seen` keeps equal hits in a fixed order."""
    children = list(islice(node.children.values(), max(most, 0)))
    for place, child in enumerate(children):
        heapq.heappush(heap, (-child.hits, seen + place, child, salted))
    return len(children)


def _prefix(node: TreeNode, salted: bool) -> HotPrefix:
    ids: Int32Array = np.frombuffer(node.key, TOKEN_DTYPE)
    begin = node.depth_tokens - len(ids)
    return HotPrefix(begin, len(ids), node.hits, node.locked, salted, ids[:HEAD_TOKENS].tolist())
