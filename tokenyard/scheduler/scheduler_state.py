"""The rows that wait, load, prefill and run, and every move between these states.

The planner, the committer and the methods of the scheduler share one `SchedulerState`. Each move is one method here, so
the lists, the table and the memory always agree.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from tokenyard.base import (
    AbortCause,
    ConfigError,
    CostModel,
    ExecutorInfo,
    Finish,
    FinishReason,
    Handover,
    Int32Array,
    RetractReason,
    SamplingParams,
    SchedulerSettings,
    Started,
    StepWork,
)
from tokenyard.base.request import weight_version
from tokenyard.cost import LinearCost, OnlineCost, get_profile, unknown_cpu
from tokenyard.policy import Policy, Views, create_policy
from tokenyard.policy.eviction_value import load_eviction_value
from tokenyard.policy.slo_targets import slo_targets
from tokenyard.policy.state_retention import create_state_retention
from tokenyard.policy.tenant_limits import create_tenant_limits
from tokenyard.scheduler.kv_store_queue import KvStoreQueue, StateStoreQueue
from tokenyard.scheduler.lora_slots import AdapterSlots
from tokenyard.scheduler.memory import NO_PAGES, KvMemory, Release
from tokenyard.scheduler.outbox import Outbox
from tokenyard.scheduler.prefix_holders import PrefixHolders
from tokenyard.scheduler.request_observer import RequestObserver
from tokenyard.scheduler.request_table import RequestState, RequestTable, RowList, StopTokens
from tokenyard.scheduler.row_state import Gate, RowState
from tokenyard.scheduler.session_table import SessionTable
from tokenyard.scheduler.waiting_index import WaitingIndex


def prior_cost_model(info: ExecutorInfo) -> LinearCost:
    """The first cost model of a device that was not calibrated, until its steps correct it.

    Every device except CUDA counts as a small CPU, so that the first steps are short rather than long.
    """
    return get_profile("h100", "llama-3-8b").cost() if info.device.startswith("cuda") else unknown_cpu()


def runs_of(runs: list[tuple[str, int]], version: str, output: int) -> list[tuple[str, int]]:
    """The runs of an answer's first `output` tokens: `runs`, and one of `version` for those after them."""
    rest = output - sum(tokens for _, tokens in runs)
    return [*runs, (version, rest)] if rest > 0 else runs


class ExpiryQueue:
    """Requests in the order in which they expire. `timeout_s` below 0 disables it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9) if timeout_s >= 0 else None
        self._entries: deque[tuple[int, int]] = deque()

    def start(self, number: int, now: int) -> None:
        """Start the timeout of request `number` at `now` (ns)."""
        if self._timeout_ns is not None:
            self._entries.append((now + self._timeout_ns, number))

    def expired(self, now: int) -> list[int]:
        """Numbers of expired requests; the caller checks whether they are still open."""
        numbers = []
        while self._entries and self._entries[0][0] <= now:
            numbers.append(self._entries.popleft()[1])
        return numbers

    @property
    def next_ns(self) -> int | None:
        """When the next one expires."""
        return self._entries[0][0] if self._entries else None


@dataclass(slots=True, eq=False)
class DeduplicatedPages:
    """Pages of the tree that replaced pages of a row with the same tokens. The executor does not know it yet."""

    row: int
    """The row whose page table changed."""
    epoch: int
    """Its epoch at that time."""
    first_page: int
    """Place of the first one in its page table."""
    pages: Int32Array
    """int32[n]: the pages of the tree."""


class SchedulerState:
    """All state of the scheduler except the plans in flight.

    Its lists are SGLang's `waiting_queue` and `running_batch`, vLLM's `waiting` and `running`.
    """

    def __init__(self, settings: SchedulerSettings, info: ExecutorInfo, cost: CostModel | None) -> None:
        """Raises ConfigError for settings that contradict each other or an unknown policy."""
        settings.validate()
        if info.windows is not None and settings.enable_hierarchical_cache:
            raise ConfigError(
                "the KV store does not support layers with a window; --swa-full-tokens-ratio 0 keeps KV of all tokens"
            )
        self.settings = settings
        self.info = info
        self.cost = cost
        self.table = RequestTable(tenants=settings.tenants)
        self.observer = RequestObserver(self.table)
        self.outbox = Outbox()
        self.waiting = RowList()
        self.loading = RowList()
        self.prefilling = RowList()
        self.running = RowList()
        self.longest = min(settings.context_length, info.num_pages * settings.page_size + 1)
        self.stop_tokens = StopTokens(info.max_pool_rows)
        self.queue_timeouts = ExpiryQueue(settings.queue_timeout_s)
        self.run_timeouts = ExpiryQueue(settings.run_timeout_s)
        self.limits = create_tenant_limits(settings)
        self.adapters = AdapterSlots(settings, self.table)
        self.prefill_steps_in_row = 0
        self.retraction_count = 0
        self._pages_returned = self._policies_set = 0
        self.weights = ""
        """The weights in use (`Request.weights`), "" for those that the executor started with."""
        self.deduplicated: list[DeduplicatedPages] = []
        """Since the last plan; the next one writes them."""
        self.drafting = False
        self.holders: PrefixHolders | None = None
        self.sessions: SessionTable | None = None
        self.eviction_value = load_eviction_value(settings.radix_eviction_policy)
        self.counts_sessions = False
        """Whether sessions are counted from the first one on, whatever the policy. The server does."""
        self._sessions_seen = False
        self._loads: dict[bytes, list[int]] = {}
        self.waiting_index = WaitingIndex(self.table, settings.in_batch_prefix_caching_deprioritize_threshold)
        self._rows_limit = min(settings.max_running_requests, info.max_pool_rows)
        self._retention = None if info.states is None else create_state_retention(settings)
        self.reset_memory()
        self.set_policy(settings, 0)

    # ---- moves -------------------------------------------------------------------------------------------------

    def join(self, row: int, now: int) -> None:
        """A new request joins the queue."""
        admitted = len(self.loading) + len(self.prefilling) + len(self.running)
        self.observer.joined(row, len(self.waiting), admitted, now)
        self.waiting.append(row)
        self.waiting_index.add(row)
        request = self.table.request(row)
        if self.sessions is None and self.counts_sessions and request.session:
            self._sessions_seen = True
            self._watch_sessions()
        if self.sessions is not None:
            self.sessions.arrived(int(self.table.number[row]), request, now)
        self.queue_timeouts.start(int(self.table.number[row]), now)

    def admit(self, row: int, hit: int, now: int) -> None:
        """Waiting to prefill: `row` has taken a pool row with `hit` tokens from the tree."""
        self._start_prefill(row, now)
        self._admitted(row, hit, now)

    def begin_output(self, row: int, token: int, now: int) -> None:
        """Append and deliver the first token of a waiting row's answer, which another engine sampled."""
        table, request_state = self.table, self.table.request_state(row)
        self.waiting_index.remove(row)
        request_state.known_ids = np.append(request_state.known_ids, np.int32(token))
        table.known[row] = table.target[row] = len(request_state.known_ids)
        table.first_token_ns[row] = now
        self.waiting_index.add(row)
        self._emit_started(row)
        column = np.array([row])
        self.outbox.tokens(table.number[column], np.array([token], np.int32), table.hit[column])

    def load(self, row: int, hit: int, run: bytes, now: int) -> None:
        """Waiting to loading: `row` has a pool row, `hit` tokens from the tree, and pages for those being loaded.

        `run` names the first block that it loads; rows that need the same block wait for it.
        """
        self.table.request_state(row).run = run
        self._loads[run] = []
        self.table.state[row] = RowState.LOADING
        self.loading.append(row)
        self.observer.loads(row, now)
        self._admitted(row, hit, now)

    def is_loading_elsewhere(self, row: int, run: bytes) -> bool:
        """Whether another row loads the block named `run`; then `row` waits until it has arrived."""
        waiters = self._loads.get(run)
        if waiters is None:
            return False
        waiters.append(int(self.table.number[row]))
        self.table.gates[row] |= Gate.KV
        return True

    def arrived(self, row: int, tokens: int, now: int) -> None:
        """Loading to prefill: the KV of the first `tokens` tokens of `row` is there, of which whole pages count.

        They are published at once, so that rows that wait for the same KV find it in the tree. Pages for tokens that
        did not arrive are freed; those tokens are computed like any other part of a prompt. Recurrent states are those
        after all tokens of the load, so of these a part is of no use.
        """
        table, memory = self.table, self.memory
        cached, held = int(table.cached[row]), int(table.held[row])
        if memory.states is None:
            tokens = max(min(tokens, held) // memory.page_size * memory.page_size, cached)
        elif tokens < held:
            tokens = cached
        else:
            tokens = held
            self._release_checkpoint(row)
            table.request_state(row).state_loaded = True
        unused = memory.pool.page_table[table.pool_row[row], memory.pages_for(tokens) : memory.pages_for(held)]
        memory.allocator.free(unused.copy())
        table.computed[row] = table.planned[row] = table.held[row] = tokens
        table.hit[row] = max(int(table.hit[row]), min(tokens, int(table.prompt_tokens[row])))
        self.cache_unfinished(row)
        table.loadable_tokens[row] = 0
        if not table.request_state(row).state_loaded:
            self.end_load(row)
        self._start_prefill(row, now)
        self.sweep()

    def _release_checkpoint(self, row: int) -> None:
        """`row` does not continue from the checkpoint behind which it was admitted, if there was one."""
        table, memory = self.table, self.memory
        if memory.states is not None and table.cached[row]:
            last = int(table.cached[row]) // memory.page_size - 1
            memory.states.release(int(memory.pool.page_table[table.pool_row[row], last]))

    def end_load(self, row: int) -> None:
        """The load of `row` has succeeded or failed: it is not tried again, and rows that waited for it may start.

        Where there are recurrent states, they wait until the row starts, as others continue from a copy of its state.
        """
        request_state = self.table.request_state(row)
        for waiter in self.known_rows(self._loads.pop(request_state.run)):
            self.table.gates[waiter] &= ~Gate.KV
        self.table.loadable_tokens[row] = 0

    def cache_unfinished(self, row: int) -> Int32Array:
        """Insert the full pages that `row` has computed so far into the tree (SGLang's `cache_unfinished_req`).

        Returns the pages (int32[n]) of the tree that replace its own from its old `cached` on, because the tree had
        them already.
        """
        memory, table = self.memory, self.table
        request_state = table.request_state(row)
        if request_state.mixed_weights:
            return NO_PAGES
        request_state.node, cached, deduplicated = memory.cache_unfinished(
            int(table.pool_row[row]),
            request_state.node,
            int(table.cached[row]),
            int(table.computed[row]),
            request_state.request.priority or 0,
            int(table.last_step[row]),
        )
        if self.holders is not None:
            self.holders.hold(row, request_state.node)
        table.cached[row] = cached
        return deduplicated

    def _start_prefill(self, row: int, now: int) -> None:
        table = self.table
        table.state[row] = RowState.PREFILL
        self.prefilling.append(row)
        self.observer.prefills(row, now)

    def _admitted(self, row: int, hit: int, now: int) -> None:
        """The common part of every admission: `row` leaves the queue and has a pool row."""
        table = self.table
        request_state = table.request_state(row)
        self.waiting_index.remove(row)
        sampling = request_state.request.sampling
        self.stop_tokens.write(int(table.pool_row[row]), self.stop_token_ids(sampling))
        self.observer.admitted(row, hit, now)
        if table.admitted_ns[row]:
            return
        if self.sessions is not None and request_state.request.session:
            self.observer.evicted_before(row, *self.sessions.evicted_before(request_state.request))
        table.admitted_ns[row] = now
        table.hit[row] = min(hit, int(table.prompt_tokens[row]))
        self.run_timeouts.start(int(table.number[row]), now)
        # A row that arrived with the first token of its answer was reported with that token.
        if not table.first_token_ns[row]:
            self._emit_started(row)

    def _emit_started(self, row: int) -> None:
        request = self.table.request(row)
        self.outbox.started.append(
            Started(
                int(self.table.number[row]),
                request.prompt_ids,
                request.text,
                request.sampling.stop,
                request.sampling.stop_token_ids,
                request.logprobs,
                request.output_ids,
            )
        )

    def stop_token_ids(self, sampling: SamplingParams) -> set[int]:
        """The token ids that end an answer: the model's, unless they are to be ignored, and the request's own."""
        eos = () if sampling.ignore_eos else self.info.eos_token_ids
        return {*eos, *sampling.stop_token_ids}

    def prompt_planned(self, row: int) -> None:
        """Prefill to running: the last chunk of `row` is planned; from the next step on it decodes."""
        self.table.state[row] = RowState.RUNNING
        self.running.append(row)

    def pages_to_decode(self, rows: Int32Array) -> int:
        """Pages that running `rows` take if each computes one more token, and drafts in flight are wrong."""
        sure = self.table.planned[rows] - self.table.verifying[rows]
        return int(np.count_nonzero(sure % self.memory.page_size == 0))

    def verify(self, rows: Int32Array, ends: Int32Array, drafts: Int32Array) -> None:
        """A plan lets `rows` compute up to `ends`, the last `drafts` tokens of which are drafts (all int32[n])."""
        table = self.table
        table.planned[rows] = table.held[rows] = ends
        table.verifying[rows] = drafts
        self.memory.draft_pages += self._draft_pages(rows)

    def verified(self, rows: Int32Array) -> None:
        """The drafts of `rows` (int32[n]) are verified: the pages of those that are wrong are free for any row."""
        table = self.table
        self.memory.draft_pages -= self._draft_pages(rows)
        table.verifying[rows] = 0
        table.planned[rows] = table.computed[rows]
        self.memory.shrink(table.pool_row[rows], table.held[rows], table.planned[rows])
        table.held[rows] = table.planned[rows]

    def _draft_pages(self, rows: Int32Array) -> int:
        """Pages that `rows` (int32[n]) hold only for drafts in flight."""
        size, planned = self.memory.page_size, self.table.planned[rows]
        return int((-(-planned // size) - -(-(planned - self.table.verifying[rows]) // size)).sum())

    def charge_decode(self, rows: Int32Array, steps: int = 1) -> None:
        """Steps in which `rows` (int32[n]) decode are planned: charge a token of each row in each of `steps`.

        A row that verifies drafts yields one token or more. The further ones are charged when they are known
        (`charge_tokens`), so that an answer costs the same with drafts and without.
        """
        for _ in range(steps):
            self.policy.headroom.decoded()
            self.charge_tokens(rows)

    def charge_tokens(self, rows: Int32Array) -> None:
        """Charge one output token of each of `rows` (int32[n], no row twice) to the policy and the limits."""
        if self.policy.charges_decode:
            self.policy.charge_decode(rows)
        if self.limits.counts:
            self.limits.charge_decode(rows)

    def retract(self, row: int, why: RetractReason, now: int) -> None:
        """Return a row that holds pages to its place in the queue (SGLang's retraction, vLLM's preemption).

        What it has computed stays in the tree.
        """
        table = self.table
        request_state = table.request_state(row)
        request_state.known_ids = self.memory.pool.token_ids[table.pool_row[row], : table.known[row]].copy()
        if self.stores is not None:
            self.stores.keep(request_state.known_ids, int(table.computed[row]), table.request(row).namespace)
        self._release_pages(row)
        table.epoch[row] += 1
        table.retractions[row] += 1
        table.target[row] = table.known[row]
        table.pool_row[row] = -1
        table.cached[row] = table.computed[row] = table.planned[row] = table.held[row] = table.drafts[row] = 0
        table.state[row] = RowState.WAITING
        if request_state.request.weights != self.weights:
            self.waiting_index.forget(row)
            self._renew_weights(request_state)
        self.waiting.insert_by(row, table.seq)
        self.waiting_index.add(row)
        self.sweep()
        if why == "paused":
            self._pages_returned += 1
        request_state.retracted_at_release = self._pages_returned if why == "out of pages" else None
        self.retraction_count += 1
        self.observer.retracted(row, why, now)

    def end(
        self,
        row: int,
        reason: FinishReason,
        now: int,
        matched: int | str | None = None,
        message: str = "",
        cause: AbortCause = "",
    ) -> None:
        """End a request in any state, exactly once. The caller sweeps the lists afterwards."""
        table, timings = self.table, self.observer.ends(row, now)
        handover = reason == "length" and table.request(row).handover and table.pool_row[row] >= 0
        reason = "handover" if handover else reason
        output = int(table.known[row] - table.prompt_tokens[row])
        finish = Finish(
            number=int(table.number[row]),
            reason=reason,
            matched=matched,
            message=message,
            prompt_tokens=int(table.prompt_tokens[row]),
            completion_tokens=output,
            cached_tokens=int(table.hit[row]) if table.admitted_ns[row] else 0,
            retractions=int(table.retractions[row]),
            arrival_ns=int(table.arrival_ns[row]),
            admitted_ns=int(table.admitted_ns[row]),
            first_token_ns=int(table.first_token_ns[row]),
            finished_ns=now,
            cause=cause,
            timings=timings,
            slo_targets=slo_targets(table, row, self.settings, self.cost),
            vector=table.request_state(row).vector,
            draft_tokens=int(table.verified_drafts[row]),
            accepted_draft_tokens=int(table.accepted_drafts[row]),
            weight_version=weight_version(self.weights),
        )
        if runs := table.request_state(row).weight_runs:
            finish.weight_runs = runs_of(runs, finish.weight_version, output)
        self.outbox.finished.append(finish)
        self.observer.ended(row, finish)
        self.open_group(row)
        if self.sessions is not None:
            self.sessions.ended(finish.number, table.request(row), table.request_state(row).node, now)
        if table.pool_row[row] >= 0:
            self._pages_returned += 1
            if handover:
                self._hand_over(row)
            else:
                self._release_pages(row)
        self.waiting_index.forget(row)
        if reason != "abort":
            self.policy.finished(row)
            self.policy.headroom.finished(output)
        self.policy.removed(row)
        table.remove(row)

    def end_hold(self, number: int) -> None:
        """Free pages that were held for `number`; no transfer or load reads or writes them any more.

        If its request gave up a load and waits, it may start again.
        """
        self.memory.end_hold(number)
        for row in self.known_rows([number]):
            self.table.gates[row] &= ~Gate.LOAD_OPEN
        self._pages_returned += 1

    def pages_returned_since(self, row: int) -> bool:
        """Whether a request or a hold has ended, or a request was paused, since `row` was retracted for lack of pages;
        True if it was not.
        """
        retracted_at_release = self.table.request_state(row).retracted_at_release
        return retracted_at_release is None or retracted_at_release < self._pages_returned

    def _release_pages(self, row: int) -> None:
        """Release what `row` holds, once no plan in flight and no load uses it."""
        self.adapters.leave(row)
        release = self._release(row)
        if self.table.state[row] != RowState.LOADING:
            if self.table.request_state(row).fresh and self.table.request_state(row).state_loaded:
                self.end_load(row)
            self.memory.release(release)
            return
        self.end_load(row)
        self.memory.hold_written(int(self.table.number[row]), release)
        self.table.gates[row] |= Gate.LOAD_OPEN

    def _hand_over(self, row: int) -> None:
        """Hold the pages of a row that ends with its first token, and report where its KV is."""
        table, number = self.table, int(self.table.number[row])
        known, computed = int(table.known[row]), int(table.computed[row])
        pool_row = int(table.pool_row[row])
        token = int(self.memory.pool.token_ids[pool_row, known - 1])
        state_slot = -1 if self.memory.states is None else pool_row
        self.adapters.leave(row)
        pages = self.memory.hold_read(number, self._release(row))
        self.outbox.transfer(Handover(number, computed, pages, token, state_slot))

    def _release(self, row: int) -> Release:
        table, request_state = self.table, self.table.request_state(row)
        # From now on they count with the other pages that it held.
        self.memory.draft_pages -= self._draft_pages(np.array([row], np.int32))
        table.verifying[row] = 0
        release = Release(
            last_step=int(table.last_step[row]),
            pool_row=int(table.pool_row[row]),
            node=request_state.node,
            cached=int(table.cached[row]),
            # KV of several weights is not for other requests.
            computed=int(table.cached[row] if request_state.mixed_weights else table.computed[row]),
            held=int(table.held[row]),
            priority=request_state.request.priority or 0,
        )
        if request_state.fresh and not request_state.state_loaded:
            self._release_checkpoint(row)
        request_state.node = None
        if self.holders is not None:
            self.holders.release(row)
        return release

    def update_weights(self, weights: str, now: int) -> None:
        """The executor uses other `weights` from now on; see `Scheduler.weights_updated`. No plan is in flight."""
        table, version = self.table, weight_version(self.weights)
        self.weights = weights
        for row in self.known_rows(table.numbers()):
            request_state = table.request_state(row)
            output = int(table.known[row] - table.prompt_tokens[row])
            if output > sum(tokens for _, tokens in request_state.weight_runs):
                request_state.weight_runs = runs_of(request_state.weight_runs, version, output)
            request_state.kv_outdated = True
            if table.state[row] == RowState.WAITING:
                self.waiting_index.forget(row)
                self._renew_weights(request_state)
                table.loadable_tokens[row] = 0
                self.waiting_index.add(row)
            elif table.state[row] == RowState.LOADING or request_state.fresh or request_state.request.handover:
                # What has been loaded for a row that no plan has had yet is KV of the earlier weights too.
                self.retract(row, "paused", now)
            else:
                request_state.mixed_weights = True

    def _renew_weights(self, request_state: RequestState) -> None:
        """A row that waits is computed by the weights in use, whatever computed it before."""
        request_state.request = replace(request_state.request, weights=self.weights)
        request_state.mixed_weights = False

    def membership(self) -> tuple[int, ...]:
        """Differs once a request has joined, started, ended or gone back to the queue, or another policy was set."""
        lists = (self.waiting, self.loading, self.prefilling, self.running)
        return (*map(len, lists), self._pages_returned, self.retraction_count, self._policies_set)

    def open_group(self, row: int) -> None:
        """The group's prompt is in the tree, or its first answer has ended: the others may start."""
        request_state = self.table.request_state(row)
        for follower in self.known_rows(request_state.sibling_rows):
            self.table.gates[follower] &= ~Gate.GROUP
        request_state.sibling_rows = []

    def sweep(self) -> None:
        """Drop rows from the lists of states that they have left; to be called before the next `table.add`."""
        state = self.table.state
        for rows, wanted in (
            (self.waiting, RowState.WAITING),
            (self.loading, RowState.LOADING),
            (self.prefilling, RowState.PREFILL),
            (self.running, RowState.RUNNING),
        ):
            if len(rows):
                rows.keep(state[rows.rows] == wanted)

    def expire(self, now: int) -> None:
        """End requests that waited or ran for too long."""
        overdue: list[tuple[int, str, AbortCause]] = []
        for number in self.queue_timeouts.expired(now):
            row = self.table.row_of(number)
            if row is not None and not self.table.admitted_ns[row]:
                overdue.append(
                    (row, f"the request waited {self.settings.queue_timeout_s} s without a place", "queue_timeout")
                )
        for number in self.run_timeouts.expired(now):
            row = self.table.row_of(number)
            if row is not None:
                overdue.append((row, f"the request ran longer than {self.settings.run_timeout_s} s", "run_timeout"))
        for row, message, cause in overdue:
            self.end(row, "abort", now, message=message, cause=cause)
        if overdue:
            self.sweep()

    def admitted_rows(self) -> Int32Array:
        """All admitted rows (loading, prefill or running), int32[n]."""
        return np.concatenate((self.running.rows, self.prefilling.rows, self.loading.rows))

    # ---- views ---------------------------------------------------------------------------------------------

    def views(self, now: int) -> Views:
        """What policies may see; the row arrays are copies, so they stay as they were at the start of the step."""
        waiting = self.waiting.rows
        first_seq = int(self.table.seq[waiting[0]]) if len(waiting) else 0
        # Checking the whole column is far cheaper than the gates of each row, and a gate is seldom closed.
        waiting = waiting[self.table.gates[waiting] == 0] if self.table.gates.any() else waiting.copy()
        return Views(
            columns=self.table,
            waiting=waiting,
            prefilling=self.prefilling.rows.copy(),
            running=self.running.rows.copy(),
            free_tokens=self.memory.free_tokens,
            total_tokens=self.memory.num_pages * self.memory.page_size,
            free_rows=self._rows_limit - len(self.running) - len(self.prefilling) - len(self.loading),
            page_size=self.memory.page_size,
            now=now,
            prefill_steps_in_row=self.prefill_steps_in_row,
            first_seq=first_seq,
            cost=self.cost,
            prefixes=self.waiting_index.forest if self.waiting_index.active else None,
            tenant_prefixes=self.holders if self.limits.shares else None,
            loading=self.loading.rows.copy(),
            sessions=self.sessions if self.policy.needs_sessions else None,
        )

    def measures(self) -> dict[str, float]:
        """Figures of the policy, of the limits of tenants, of adapters, of sessions and of windows, by metric name."""
        waiting, prefilling, running = self.waiting.rows, self.prefilling.rows, self.running.rows
        total = self.memory.num_pages * self.memory.page_size
        held = np.concatenate((running, prefilling, self.loading.rows))
        measures = self.policy.measures(np.concatenate((waiting, prefilling)))
        measures |= self.limits.measures(self.table, held, total, self.holders) | self.adapters.measures()
        if self.sessions is not None:
            measures |= self.sessions.measures()
        return measures | self.memory.measures()

    def queued_work(self, cost: CostModel | None = None) -> tuple[int, float]:
        """Tokens of waiting and started prompts that are not computed yet, and the seconds that they take.

        The seconds are by `cost`, else by the scheduler's cost model, else by the prior cost model of the device.
        """
        rows = np.concatenate((self.waiting.rows, self.prefilling.rows))
        if not len(rows):
            return 0, 0.0
        computed = self.table.computed[rows].astype(np.int64)
        rest = self.table.known[rows] - computed
        tokens, area = int(rest.sum()), float((rest * (computed + rest / 2)).sum())
        cost = cost or self.cost or prior_cost_model(self.info)
        return tokens, cost.step(StepWork(tokens, len(rows), prefill_tokens=tokens, chunk_area=area))

    def set_policy(self, settings: SchedulerSettings, now: int) -> None:
        """Order the queue as `settings` say from `now` (ns) on. Raises ConfigError for an unknown policy."""
        policy = create_policy(settings.schedule_policy, settings)
        self.policy_note = ""
        if policy.needs_tree and not self.memory.tree.enabled:
            self.policy_note = f"{policy.name} needs the prefix cache, which is disabled: using fcfs"
            policy = create_policy("fcfs", replace(settings, policy_options={}))
        if self.cost is None and policy.uses_cost:
            self.cost = OnlineCost(prior_cost_model(self.info))
        self.policy: Policy = policy
        self._policies_set += 1
        self.observer.policy_changed(policy, settings.uses_priorities, self.known_rows(self.table.numbers()), now)
        self._watch_tree()
        self._watch_holders()
        self._watch_sessions()

    def _watch_sessions(self) -> None:
        """Keep the table while policy or eviction read it, or sessions are counted, if there is a tree."""
        wanted = (self._ranks_sessions or self._sessions_seen) and self.memory.tree.enabled
        if not wanted and self.sessions is not None:
            self.sessions.close()
            self.sessions = None
        if wanted and self.sessions is None:
            self.sessions = self._session_table()
            for row in self.known_rows(self.table.numbers()):
                self.sessions.arrived(int(self.table.number[row]), self.table.request(row), 0)
        if self.sessions is not None:
            self.sessions.ranks = self._ranks_sessions
            self.sessions.retains = self.policy.retains if self.policy.needs_sessions else None

    @property
    def _ranks_sessions(self) -> bool:
        return self.policy.needs_sessions or self.settings.evicts_by_value

    def _session_table(self) -> SessionTable:
        settings = self.settings
        total_tokens = self.info.num_pages * settings.page_size
        table = SessionTable(
            self.memory.tree,
            settings.tenants,
            total_tokens,
            self.eviction_value,
            self.observer.counters,
            ranks=self._ranks_sessions,
        )
        if settings.evicts_by_value:
            self.memory.tree.retain_by(table)
        return table

    def _watch_holders(self) -> None:
        """Count which rows hold which prefixes while the headroom or a tenant has a use for it and there is a tree."""
        wanted = (self.policy.headroom.needs_shared or self.limits.shares) and self.memory.tree.enabled
        if not wanted and self.holders is not None:
            self.memory.tree.listeners.remove(self.holders)
            self.table.shared[:] = 0
            self.holders = None
        if wanted and self.holders is None:
            self.holders = PrefixHolders(self.table, self.memory.tree)
            for row in self.admitted_rows().tolist():
                self.holders.hold(row, self.table.request_state(row).node)

    def _watch_tree(self) -> None:
        """Keep the index of waiting rows while the policy reads it and there is a tree."""
        wanted = (self.policy.needs_tree or self.policy.uses_hits) and self.memory.tree.enabled
        if wanted and not self.waiting_index.active:
            self.waiting_index.activate(self.memory, self.waiting.rows.tolist())
        elif not wanted:
            self.waiting_index.deactivate()

    def reset_memory(self) -> None:
        """Start over with every page free and an empty tree. Legal only while no request holds pages."""
        info = self.info
        self.memory = KvMemory(
            self.settings, info.num_pages, info.max_pool_rows, info.windows, info.states, self._retention
        )
        self.memory.tree.use_weights(self.weights)
        has_store = self.settings.enable_hierarchical_cache and self.memory.tree.enabled
        kind = KvStoreQueue if info.states is None else StateStoreQueue
        self.stores: KvStoreQueue | None = kind(self.settings, self.memory) if has_store else None
        if self.settings.enable_kv_events:
            # Clearing the new tree emits an event, on which subscribers drop their state of the old one.
            self.memory.tree.clear()
        if self.waiting_index.active:
            self.waiting_index.activate(self.memory, self.waiting.rows.tolist())
        if self.holders is not None:
            self.holders = PrefixHolders(self.table, self.memory.tree)
        if self.sessions is not None:
            self.sessions = self._session_table()
            self._watch_sessions()

    def known_rows(self, numbers: list[int]) -> list[int]:
        """Rows of those requests that have not ended."""
        rows = (self.table.row_of(number) for number in numbers)
        return [row for row in rows if row is not None]
