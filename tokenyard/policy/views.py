"""What a policy sees: read-only columns over requests, and the rows in each state at the start of a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tokenyard.base import NO_TOKENS, CostModel, Int32Array, Int64Array, Request

NO_PRIORITY = -(2**63)
"""In the priority column: no priority was given. It ranks below every given one in both directions."""

NO_DEADLINE = 2**63 - 1
"""In the deadline column: no deadline was given."""


class Columns(Protocol):
    """One numpy column per field, indexed by table row. Policies must not write to them.

    seq: arrival order; does not change.
    arrival_ns: when the API received the request.
    admitted_ns: first admission, 0 before.
    first_token_ns: when the prompt was computed, 0 before.
    known: token ids on the host.
    target: tokens to compute before the next token can be sampled.
    hit: prompt tokens found in the tree at first admission.
    matchable: what a waiting row would hit now; only for policies that use the tree.
    computed: tokens whose KV is known to be in the pool.
    cached: leading tokens whose KV the tree owns and the row has locked.
    held: leading tokens that have pages; beyond `planned` while KV is loaded.
    shared: cached tokens that other rows hold too; 0 while no headroom or share of a tenant needs it.
    planned: tokens whose KV is in the pool once the plans in flight are done.
    limit: prompt + max_new_tokens - 1.
    priority: as given, or NO_PRIORITY.
    deadline_ns: the absolute time of the deadline, or NO_DEADLINE.
    ttft_ns, tpot_ns: the request's own targets, 0 for none.
    tenant: a small integer per tenant name.
    retractions: how often it was retracted.
    boost: levels of urgency that a priority function adds.
    service_level: see service_levels.py.
    routing: a small integer per routing key, 0 for none.
    prefix_group: equal for rows with the same first tokens, -1 for none; only for policies that use the tree.
    branch: the `birth` of the PrefixBranch that a waiting row belongs to; only for policies that use the tree.
    """

    seq: Int64Array
    arrival_ns: Int64Array
    admitted_ns: Int64Array
    first_token_ns: Int64Array
    prompt_tokens: Int32Array
    known: Int32Array
    target: Int32Array
    hit: Int32Array
    matchable: Int32Array
    computed: Int32Array
    cached: Int32Array
    held: Int32Array
    shared: Int32Array
    planned: Int32Array
    limit: Int32Array
    priority: Int64Array
    deadline_ns: Int64Array
    ttft_ns: Int64Array
    tpot_ns: Int64Array
    tenant: Int32Array
    retractions: Int32Array
    boost: Int64Array
    service_level: Int32Array
    routing: Int32Array
    prefix_group: Int32Array
    branch: Int32Array

    def request(self, row: int) -> Request:
        """The request in this row."""


class PrefixBranch(Protocol):
    """A part of the prefix tree with waiting rows in it.

    birth: unique, older is smaller.
    own: how many rows match the tree exactly this far.
    weight: rows here and below.
    """

    birth: int
    own: int
    weight: int

    def heaviest_first(self) -> "Iterator[PrefixBranch]":
        """The branches directly below, the heaviest first, among equals the older first; drawn lazily."""

    def rows(self) -> list[int]:
        """The `own` rows, in no particular order."""


@dataclass(slots=True)
class SessionState:
    """A session between the end of a turn and the start of its next one.

    tenant, name: the name is the session's own within its tenant.
    idle_ns: when its latest answer ended.
    arrived_ns: when its next turn joined the queue; 0 while there is none.
    kind: what its latest answer ended with, see `return_times.KINDS`.
    tokens: the end of its latest prompt when that answer ended.
    """

    tenant: str
    name: str
    idle_ns: int = 0
    arrived_ns: int = 0
    kind: int = 0
    tokens: int = 0

    def copied(self) -> "SessionState":
        """A copy without what a subclass adds, which a user's code may keep."""
        return SessionState(self.tenant, self.name, self.idle_ns, self.arrived_ns, self.kind, self.tokens)


class IdleSessions(Protocol):
    """The sessions that have KV in the prefix tree."""

    def expected_tokens(self, now: int, least_per_s: float) -> int:
        """Tokens of KV of sessions without a request with at least so many expected returns per second of keeping it,
        at `now` (ns).
        """

    def retained_tokens(self, now: int) -> dict[tuple[str, str], int]:
        """Tokens of KV of each session, by tenant and name, that no started request holds and `Policy.retains` names
        at `now` (ns).
        """

    def best_ttl_s(self, kind: int, worth_s: float) -> float:
        """`ReturnTimes.best_ttl_s` of the gaps seen so far."""


class TenantPrefixes(Protocol):
    """What rows hold of the prefix tree, by tenant."""

    def held(self, tenants: int) -> Int64Array:
        """int64[tenants]: tokens of the tree that the rows of each tenant hold now, each token once."""

    def leaving(self) -> Callable[[int], int]:
        """A function to call with one row after another: by how many tokens `held` of its tenant falls if that row
        leaves after those before it. Nothing is changed.
        """


@dataclass(slots=True)
class Views:
    """The scheduler's state at the start of a step, for a policy to read.

    waiting: rows that may be admitted now, in order of arrival.
    prefilling: admitted rows whose prompt is not completely planned, oldest first.
    running: rows that decode, in order of admission.
    free_tokens: KV tokens that are free, evictable or about to be freed.
    total_tokens: KV tokens of the whole pool.
    free_rows: how many more requests may be admitted.
    prefill_steps_in_row: prefill-only steps since the last step that decoded.
    first_seq: `seq` of the row that has waited longest, including rows that a gate or a limit holds back.
    prefixes: the root over the waiting rows of all namespaces in the tree; only for policies that use the tree.
    tenant_prefixes: KV of the tree by tenant; only while a tenant has a share of the pool.
    loading: admitted rows whose KV is being loaded; they count as admitted and are not victims.
    sessions: the idle sessions; only for policies that need them, and only while there is a prefix tree.
    """

    columns: Columns
    waiting: Int32Array
    prefilling: Int32Array
    running: Int32Array
    free_tokens: int
    total_tokens: int
    free_rows: int
    page_size: int
    now: int
    prefill_steps_in_row: int
    first_seq: int = 0
    cost: CostModel | None = None
    prefixes: PrefixBranch | None = None
    tenant_prefixes: TenantPrefixes | None = None
    loading: Int32Array = field(default_factory=lambda: NO_TOKENS)
    sessions: IdleSessions | None = None


def tokens_generated(columns: Columns, rows: Int32Array) -> Int32Array:
    """Output tokens so far of each row, int32[len(rows)]."""
    generated: Int32Array = columns.known[rows] - columns.prompt_tokens[rows]
    return generated
