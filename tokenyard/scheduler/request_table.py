"""All requests that wait or run, as numpy columns, one row each.

Fields of the hot path are columns, so a decode step over any number of rows is a handful of numpy calls. Fields that
are used only when a row starts, stops or moves are in a `RequestState` object. Rows are reused; a row's epoch only
grows, so the result of a plan for an earlier owner is recognised.
"""

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenyard.base import BoolArray, Int32Array, Int64Array, Request, Slo
from tokenyard.policy import NO_DEADLINE, NO_PRIORITY
from tokenyard.policy.service_levels import service_level_of
from tokenyard.scheduler.row_state import RowState
from tokenyard.scheduler.stage_clock import StageClock

NO_GROUP = -1
MAX_TENANTS = 4096
"""Further tenants share one account: clients can invent names, and policies keep an account for each."""

INT32_COLUMNS = (
    "prompt_tokens",
    "limit",
    "target",
    "hit",
    "in_tree",
    "matchable",
    "cached",
    "computed",
    "planned",
    "held",
    "verifying",
    "shared",
    "drafts",
    "acceptance_rate",
    "loadable_tokens",
    "known",
    "tenant",
    "epoch",
    "gates",
    "state",
    "pool_row",
    "retractions",
    "service_level",
    "routing",
    "prefix_group",
    "branch",
    "constrained",
    "verified_drafts",
    "accepted_drafts",
    "adapter",
    "slot",
)
INT64_COLUMNS = (
    "seq",
    "number",
    "arrival_ns",
    "admitted_ns",
    "first_token_ns",
    "priority",
    "boost",
    "deadline_ns",
    "ttft_ns",
    "tpot_ns",
    "last_step",
    "skipped_since_ns",
)


class Interner:
    """Numbers names from `first` on, the lowest free number first, and drops a name that has no users left."""

    def __init__(self, first: int = 0) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._users: dict[int, int] = {}
        self._names: dict[int, Hashable] = {}
        self._free: list[int] = []
        self._first = first

    def take(self, name: Hashable) -> int:
        """The number of `name`, with one more user."""
        number = self._numbers.get(name)
        if number is None:
            number = heapq.heappop(self._free) if self._free else self._first + len(self._numbers)
            self._numbers[name], self._names[number], self._users[number] = number, name, 0
        self._users[number] += 1
        return number

    def number_of(self, name: Hashable) -> int:
        """The number of a name that has users; 0 for one without (`first` must be above that)."""
        return self._numbers.get(name, 0)

    def keep(self, number: int) -> None:
        """Count one more user of this number."""
        self._users[number] += 1

    def release(self, number: int) -> None:
        """Count one user of this number fewer."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._numbers[self._names.pop(number)]
            heapq.heappush(self._free, number)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(slots=True)
class RequestState:
    """The fields of one request outside the hot path (SGLang's `Req`, vLLM's `Request`).

    known_ids: int32[known], valid while the row has no pool row (afterwards the pool holds the tokens).
    node: the deepest tree node that the row has locked.
    followers: numbers of the group's other answers, which wait for this one.
    clock: how long the request spends in each stage.
    retracted_at_release: for a row retracted for lack of pages, how often pages had been returned by then
        (`SchedulerState.pages_returned_since`).
    run: for a LOADING row, the name of the first block that it loads.
    fresh: its pool row and pages are not in any plan yet.
    state_loaded: its working state was loaded, so it does not continue from a checkpoint in the tree.
    vector: the embedding of its prompt (raw float32), once computed.
    branch_tokens: tokens of its prompt that the tree had when it was admitted, where these are more than it could use
        for lack of a checkpoint of recurrent states: the place where it branches off from others.
    mixed_weights: its pages have KV of earlier weights too, so they do not enter the tree.
    kv_outdated: KV that is offered for it from elsewhere is of earlier weights.
    weight_runs: (version, output tokens) of each change of weights: what it had by then, and by which weights.
    """

    request: Request
    known_ids: Int32Array
    clock: StageClock
    node: Any = None
    sibling_rows: list[int] = field(default_factory=list)
    retracted_at_release: int | None = None
    run: bytes = b""
    fresh: bool = False
    state_loaded: bool = False
    vector: bytes = b""
    branch_tokens: int = 0
    mixed_weights: bool = False
    kv_outdated: bool = False
    weight_runs: list[tuple[str, int]] = field(default_factory=list)


class RequestTable:
    """Columns by row. See `policy.Columns` for the meaning of those that policies read; the others are:

    number: the request's number.
    in_tree: leading tokens of a waiting row whose KV is in the tree; `matchable` of them are usable.
    pool_row: row of ReqToTokenPool, -1 while waiting.
    verifying: drafts that a plan in flight verifies, the last ones of `planned`.
    drafts: drafts that the executor has ready for the row's next step.
    acceptance_rate: of its next draft if those before it are right, in thousandths.
    last_step: the latest plan that contains the row.
    gates, state: lifecycle.
    reach: leading tokens whose KV can be loaded from elsewhere.
    constrained: 1 for rows whose answer must match a grammar; `grammars` counts them.
    verified_drafts, accepted_drafts: of the answer so far.
    adapter: small integer per LoRA adapter, 0 for none.
    slot: device slot of the adapter while the row is admitted, 0 for none.
    skipped_since_ns: when the row was first passed over for lack of a slot, 0 before.
    """

    def __init__(self, capacity: int = 256, tenants: Iterable[str] = ()) -> None:
        """`tenants` always have separate numbers, however many other tenants appear."""
        self._capacity = 0
        self._free: list[int] = []
        self._request_states: list[RequestState | None] = []
        self._row_of_number: dict[int, int] = {}
        self._tenants = {name: number for number, name in enumerate(tenants)}
        self._routing_keys = Interner(first=1)
        self._adapters = Interner(first=1)
        self._next_seq = 0
        self.grammars = 0
        for name in INT32_COLUMNS:
            setattr(self, name, np.zeros(0, np.int32))
        for name in INT64_COLUMNS:
            setattr(self, name, np.zeros(0, np.int64))
        self._grow(capacity)

    # The columns, declared for type checkers; `__init__` makes them.
    prompt_tokens: Int32Array
    limit: Int32Array
    target: Int32Array
    hit: Int32Array
    in_tree: Int32Array
    matchable: Int32Array
    cached: Int32Array
    computed: Int32Array
    planned: Int32Array
    held: Int32Array
    verifying: Int32Array
    shared: Int32Array
    drafts: Int32Array
    acceptance_rate: Int32Array
    loadable_tokens: Int32Array
    known: Int32Array
    tenant: Int32Array
    epoch: Int32Array
    gates: Int32Array
    state: Int32Array
    pool_row: Int32Array
    retractions: Int32Array
    service_level: Int32Array
    routing: Int32Array
    prefix_group: Int32Array
    branch: Int32Array
    constrained: Int32Array
    verified_drafts: Int32Array
    accepted_drafts: Int32Array
    adapter: Int32Array
    slot: Int32Array
    seq: np.ndarray[Any, np.dtype[np.int64]]
    number: np.ndarray[Any, np.dtype[np.int64]]
    arrival_ns: np.ndarray[Any, np.dtype[np.int64]]
    admitted_ns: np.ndarray[Any, np.dtype[np.int64]]
    first_token_ns: np.ndarray[Any, np.dtype[np.int64]]
    priority: np.ndarray[Any, np.dtype[np.int64]]
    boost: np.ndarray[Any, np.dtype[np.int64]]
    deadline_ns: np.ndarray[Any, np.dtype[np.int64]]
    ttft_ns: np.ndarray[Any, np.dtype[np.int64]]
    tpot_ns: np.ndarray[Any, np.dtype[np.int64]]
    last_step: np.ndarray[Any, np.dtype[np.int64]]
    skipped_since_ns: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self._row_of_number)

    def add(self, request: Request, number: int, now: int) -> int:
        """Take a row for one answer of `request`, in state WAITING, and return it."""
        if not self._free:
            self._grow(2 * self._capacity)
        row = self._free.pop()
        prompt, known_ids = len(request.prompt_ids), request.known_ids
        self._row_of_number[number] = row
        self.number[row] = number
        self.seq[row] = self._next_seq
        self._next_seq += 1
        self.arrival_ns[row] = request.arrival_ns or now
        self._request_states[row] = RequestState(request, known_ids, StageClock(request.arrival_ns or now))
        self.prompt_tokens[row] = prompt
        self.constrained[row] = bool(request.grammar)
        self.grammars += bool(request.grammar)
        self.known[row] = self.target[row] = len(known_ids)
        self.limit[row] = prompt + max(request.sampling.max_new_tokens, 1) - 1
        self.priority[row] = NO_PRIORITY if request.priority is None else request.priority
        has_deadline = request.deadline_ns is not None
        self.deadline_ns[row] = int(self.arrival_ns[row]) + (request.deadline_ns or 0) if has_deadline else NO_DEADLINE
        slo = request.slo or Slo()
        self.ttft_ns[row], self.tpot_ns[row] = slo.ttft_ns or 0, slo.tpot_ns or 0
        self.tenant[row] = self.tenant_number(request.tenant)
        self.service_level[row] = service_level_of(request.service_class)
        self.routing[row] = self._routing_keys.take(request.routing_key) if request.routing_key else 0
        self.adapter[row] = self._adapters.take(request.lora) if request.lora else 0
        self.prefix_group[row] = NO_GROUP
        self.state[row] = RowState.WAITING
        self.pool_row[row] = self.last_step[row] = -1
        for column in (
            self.hit,
            self.in_tree,
            self.matchable,
            self.cached,
            self.computed,
            self.planned,
            self.held,
            self.verifying,
            self.shared,
            self.drafts,
            self.acceptance_rate,
            self.loadable_tokens,
            self.gates,
            self.retractions,
            self.boost,
            self.verified_drafts,
            self.accepted_drafts,
            self.slot,
            self.skipped_since_ns,
        ):
            column[row] = 0
        self.admitted_ns[row] = self.first_token_ns[row] = 0
        return row

    def remove(self, row: int) -> None:
        """Free the row of a request that has ended."""
        del self._row_of_number[int(self.number[row])]
        self.grammars -= int(self.constrained[row])
        self._request_states[row] = None
        if self.routing[row]:
            self._routing_keys.release(int(self.routing[row]))
        if self.adapter[row]:
            self._adapters.release(int(self.adapter[row]))
        self.epoch[row] += 1
        self.state[row] = RowState.FREE
        self._free.append(row)

    def row_of(self, number: int) -> int | None:
        """The row of a request, None if it is unknown or has ended."""
        return self._row_of_number.get(number)

    def request_state(self, row: int) -> RequestState:
        """The `RequestState` of a row that is in use."""
        request_state = self._request_states[row]
        assert request_state is not None, f"row {row} is free"
        return request_state

    def request(self, row: int) -> Request:
        """The request in a row that is in use."""
        return self.request_state(row).request

    def usable_tokens(self, row: int) -> int:
        """Leading tokens of a waiting row that may come from the tree. At least the last known token is computed, and
        so is every prompt token with requested log-probabilities or that a vector is the mean of.
        """
        request = self.request(row)
        usable, options = int(self.known[row]) - 1, request.logprobs
        if request.pooling == "mean":
            return 0
        if options is None or options.prompt_from < 0:
            return usable
        return min(usable, max(options.prompt_from - 1, 0))

    def tenant_number(self, name: str) -> int:
        """The permanent number of a tenant; with too many tenants, that of the tenant without a name."""
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            name = ""
        return self._tenants.setdefault(name, len(self._tenants))

    def tenant_names(self) -> list[str]:
        """The names of all tenants so far, by their numbers."""
        return list(self._tenants)

    def adapter_number(self, adapter: str) -> int:
        """The number of an adapter that a row or a slot has; 0 if none has it."""
        return self._adapters.number_of(adapter)

    def retain_adapter(self, number: int) -> None:
        """Add one use of an adapter's number, until `release_adapter`."""
        self._adapters.keep(number)

    def release_adapter(self, number: int) -> None:
        """Release one use of an adapter's number."""
        self._adapters.release(number)

    def numbers(self) -> list[int]:
        """The numbers of all requests, in order of arrival."""
        return sorted(self._row_of_number, key=lambda number: int(self.seq[self._row_of_number[number]]))

    def check(self, rows: Int32Array) -> None:
        """Assert `cached <= computed <= planned <= limit` and `computed <= known` for rows in use."""
        assert (self.cached[rows] <= self.computed[rows]).all()
        assert (self.computed[rows] <= self.planned[rows]).all()
        assert (self.planned[rows] <= self.held[rows]).all()
        assert (self.held[rows] <= self.limit[rows]).all()
        assert (self.computed[rows] <= self.known[rows]).all()

    def _grow(self, capacity: int) -> None:
        extra = capacity - self._capacity
        for name in INT32_COLUMNS + INT64_COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(extra, column.dtype))))
        self._free.extend(range(capacity - 1, self._capacity - 1, -1))
        self._request_states.extend([None] * extra)
        self._capacity = capacity


NO_TOKEN = -1


class StopTokens:
    """Stop token ids by pool row, padded with NO_TOKEN; as wide as the longest list seen."""

    def __init__(self, pool_rows: int) -> None:
        self._ids = np.full((pool_rows, 4), NO_TOKEN, np.int32)

    def write(self, pool_row: int, token_ids: set[int]) -> None:
        """Set the tokens that end `pool_row` from now on."""
        missing = len(token_ids) - self._ids.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self._ids[pool_row] = NO_TOKEN
        self._ids[pool_row, : len(token_ids)] = sorted(token_ids)

    def hit(self, pool_rows: Int32Array, tokens: Int32Array) -> BoolArray:
        """Whether `tokens[..., i]` ends row `pool_rows[i]`; as many bools as there are tokens."""
        found: BoolArray = (self._ids[pool_rows] == tokens[..., None]).any(axis=-1)
        return found


class RowList:
    """An ordered list of table rows. `rows` is a view; do not keep it over a change."""

    def __init__(self) -> None:
        self._buffer: Int32Array = np.empty(64, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Int32Array:
        """int32[len(self)], in order."""
        return self._buffer[: self._length]

    def append(self, row: int) -> None:
        """Put a row at the end, in O(1) on average."""
        if self._length == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty_like(self._buffer)))
        self._buffer[self._length] = row
        self._length += 1

    def insert_by(self, row: int, keys: Int64Array) -> None:
        """Put a row where `keys[row]` belongs among the keys of the others, which ascend. O(len)."""
        place = int(np.searchsorted(keys[self.rows], keys[row]))
        self.append(row)
        self._buffer[place + 1 : self._length] = self._buffer[place : self._length - 1].copy()
        self._buffer[place] = row

    def keep(self, mask: BoolArray) -> None:
        """Keep only the rows where `mask` (bool[len(self)]) holds."""
        kept = self.rows[mask]
        self._buffer[: len(kept)] = kept
        self._length = len(kept)

    def clear(self) -> None:
        """Remove all rows."""
        self._length = 0
