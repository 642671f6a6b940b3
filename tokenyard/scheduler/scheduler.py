"""The scheduler: a function from events to plans.

Events come in through `apply`, each with its time `now` in integer nanoseconds; `plan` returns the next step of the
executor and `commit` applies its result. Prefill and decode follow one rule: a row computes while it has fewer computed
than known tokens. `RowState` only tells which list a row is in.

Order of effects. `plan` advances `planned` and takes pages and pool rows. `commit` advances `computed`, appends tokens,
inserts computed prompt chunks into the tree and ends rows. A row that stops leaves the table immediately; its pages are
freed when the last plan that contains it has committed (`memory.Release`). Up to `max_in_flight` plans may wait for
their commit.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Cancel,
    CostModel,
    Event,
    ExecutorInfo,
    Explanation,
    Flush,
    Int32Array,
    KvAvailable,
    KvLoaded,
    KvMove,
    OpenGate,
    PagesReleased,
    Pause,
    RanksRemaining,
    Request,
    Resume,
    SchedulerSettings,
    SessionEnded,
    SetPolicy,
    StepPlan,
    StepResult,
    StopFound,
    Submit,
    TenantUsage,
    TokenBatch,
    TurnEnded,
    UnloadAdapter,
    Update,
    WeightsUpdated,
)
from tokenyard.cache.kv_events import KvEvent, KvRecord, kv_record
from tokenyard.policy import NO_PRIORITY
from tokenyard.policy.adaptive import changed
from tokenyard.policy.priority_function import MAX_BOOST, RequestView
from tokenyard.policy.time_budget import prefill_slowdown
from tokenyard.scheduler.committer import Committer
from tokenyard.scheduler.intake import accept_request
from tokenyard.scheduler.kv_store_queue import KvStoreQueue
from tokenyard.scheduler.live_view import LiveView, take_live_view
from tokenyard.scheduler.lookahead_state import LookaheadState, take_lookahead_state
from tokenyard.scheduler.multi_step import extend_plan, possible_steps
from tokenyard.scheduler.plan_builder import PlanBuilder
from tokenyard.scheduler.planner import Planner
from tokenyard.scheduler.row_state import HELD_BY, Gate, RowState
from tokenyard.scheduler.scheduler_state import SchedulerState
from tokenyard.scheduler.snapshot import Snapshot, take_snapshot


@dataclass(slots=True)
class InFlightPlan:
    """A plan that waits for its commit, with the table rows behind its columns."""

    plan: StepPlan
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class RequeuedRequest:
    """A retracted request that waits again.

    known_ids: int32[n], all its known tokens.
    cached: how many of them are in the prefix cache.
    """

    number: int
    namespace: str
    known_ids: Int32Array
    cached: int


class Scheduler:
    """Requests in, plans out. See the module's docstring for the order of effects."""

    def __init__(self, settings: SchedulerSettings, info: ExecutorInfo, cost: CostModel | None = None) -> None:
        """Raises ConfigError for settings that contradict each other or an unknown policy."""
        self.state = SchedulerState(settings, info, cost)
        self._planner = Planner(self.state)
        self._committer = Committer(self.state)
        self._in_flight: deque[InFlightPlan] = deque()
        self._paused = False
        self._kv_events: list[KvEvent] = []
        self._verbs: dict[type, Callable[[Any, int], object]] = {
            Submit: self.submit,
            Cancel: self.cancel,
            Update: self.update,
            Pause: self.pause,
            Resume: self.resume,
            StopFound: self.stop_found,
            OpenGate: self.open_gate,
            SetPolicy: self.set_policy,
            KvAvailable: self.reach,
            KvLoaded: self.arrived,
            PagesReleased: self.hold_ended,
            TenantUsage: self.add_tenant_usage,
            RanksRemaining: self.set_remaining_ranks,
            UnloadAdapter: self.unload_adapter,
            Flush: lambda event, now: self.flush(now),
            TurnEnded: self.turn_ended,
            SessionEnded: self.session_ended,
            WeightsUpdated: self.weights_updated,
        }

    # ---- events ------------------------------------------------------------------------------------------------

    def apply(self, event: Event, now: int) -> None:
        """Apply any event at time `now` (ns)."""
        self._verbs[type(event)](event, now)

    def submit(self, event: Submit, now: int) -> None:
        """Queue a request, one row per answer. One that can never run, or finds a full queue, ends immediately."""
        rows = accept_request(self.state, event, now)
        if self._paused:
            self._pause_clocks(rows, now)

    def cancel(self, event: Cancel, now: int) -> None:
        """End the given requests, or all; unknown numbers are ignored."""
        numbers = event.numbers or self.state.table.numbers()
        for number in numbers:
            row = self.state.table.row_of(number)
            if row is not None:
                self.state.end(row, "abort", now, message=event.message, cause=event.cause)
        self.state.sweep()

    def update(self, event: Update, now: int) -> None:
        """Change a request's priority, boost (clamped to `MAX_BOOST`) or deadline; unknown requests are ignored."""
        row = self.state.table.row_of(event.number)
        if row is None:
            return
        if event.priority is not None:
            self.state.table.priority[row] = event.priority
        if event.boost is not None:
            self.state.table.boost[row] = min(max(event.boost, -MAX_BOOST), MAX_BOOST)
        if event.deadline_ns is not None:
            self.state.table.deadline_ns[row] = self.state.table.arrival_ns[row] + event.deadline_ns
        self.state.observer.moved(row, now)

    def pause(self, event: Pause, now: int) -> None:
        """Hold back single requests, or stop all planning in one of three modes (see `Pause`)."""
        if event.numbers:
            rows = self.state.known_rows(event.numbers)
            for row in rows:
                if self.state.table.state[row] != RowState.WAITING:
                    self.state.retract(row, "paused", now)
                self.state.table.gates[row] |= Gate.PAUSED
            self._pause_clocks(rows, now)
            return
        self._paused = True
        if event.mode == "abort":
            self.cancel(Cancel([], "the server was paused and all requests aborted", "paused"), now)
        elif event.mode == "retract":
            for row in self.state.admitted_rows().tolist():
                self.state.retract(row, "paused", now)
        self._pause_clocks(self.state.known_rows(self.state.table.numbers()), now)

    def resume(self, event: Resume, now: int) -> None:
        """Resume paused requests, or everything."""
        rows = self.state.known_rows(event.numbers or self.state.table.numbers())
        if event.numbers:
            self.state.table.gates[rows] &= ~Gate.PAUSED
        else:
            self._paused = False
        self._pause_clocks(rows, now)

    def _pause_clocks(self, rows: list[int], now: int) -> None:
        """Count time as paused for those of `rows` that a pause holds back now, and as unpaused for the others."""
        table = self.state.table
        for row in rows:
            self.state.observer.held(row, self._paused or bool(table.gates[row] & Gate.PAUSED), now)

    def stop_found(self, event: StopFound, now: int) -> None:
        """End a request whose answer has a stop string after `keep_tokens` tokens; later tokens are dropped."""
        row = self.state.table.row_of(event.number)
        if row is None:
            return
        table = self.state.table
        table.known[row] = min(int(table.known[row]), int(table.prompt_tokens[row]) + event.keep_tokens)
        table.computed[row] = min(int(table.computed[row]), int(table.known[row]))
        self.state.end(row, "stop", now, matched=event.matched)
        self.state.sweep()

    def open_gate(self, event: OpenGate, now: int) -> None:
        """Open a gate of a waiting request."""
        row = self.state.table.row_of(event.number)
        if row is not None:
            self.state.table.gates[row] &= ~event.gate

    def reach(self, event: KvAvailable, now: int) -> None:
        """KV of a waiting request's first tokens can be loaded; only whole pages of it count, or with recurrent states,
        which are those after the last of these tokens, all of it.
        """
        row = self.state.table.row_of(event.number)
        if row is None:
            return
        self.state.table.gates[row] &= ~Gate.KV
        if self.state.table.state[row] == RowState.WAITING and not self.state.table.request_state(row).kv_outdated:
            if event.token >= 0 and self._begin_output(row, event.token, now):
                return
            unit, usable = self.state.memory.page_size, self.state.table.usable_tokens(row)
            if self.state.memory.states is None:
                loadable = max(min(event.tokens, usable), 0) // unit * unit
            else:
                loadable = event.tokens if 0 <= event.tokens <= usable else 0
            self.state.table.loadable_tokens[row] = loadable

    def _begin_output(self, row: int, token: int, now: int) -> bool:
        """Append and deliver the first token of a waiting row's answer; returns whether it ends the answer.

        Ignored if the answer has begun.
        """
        state, table = self.state, self.state.table
        if table.known[row] > table.prompt_tokens[row]:
            return False
        state.begin_output(row, token, now)
        if token in state.stop_token_ids(table.request(row).sampling):
            state.end(row, "stop", now, matched=token)
        elif table.known[row] > table.limit[row]:
            state.end(row, "length", now)
        else:
            return False
        state.sweep()
        return True

    def arrived(self, event: KvLoaded, now: int) -> None:
        """A load has ended. If its row has ended or was retracted, free the pages held for the load.

        A retracted row may then start again. A row has one load at a time, so its number identifies the load.
        """
        row = self.state.table.row_of(event.number)
        if row is None or self.state.table.state[row] != RowState.LOADING:
            self.state.end_hold(event.number)
        else:
            self.state.arrived(row, event.tokens, now)

    def hold_ended(self, event: PagesReleased, now: int) -> None:
        """Release the pages of a `Handover` or a `Store`, whose reader has finished."""
        self.state.end_hold(event.number)
        if self.state.stores is not None:
            self.state.stores.ended(event.number)

    def add_tenant_usage(self, event: TenantUsage, now: int) -> None:
        """Charge what other ranks did for tenants: rates and service count for the whole engine."""
        for name, tokens, service in zip(event.tenants, event.tokens, event.service, strict=True):
            number = self.state.table.tenant_number(name)
            self.state.limits.add_remote_usage(number, name, tokens)
            self.state.policy.served_elsewhere(number, name, service)

    def set_remaining_ranks(self, event: RanksRemaining, now: int) -> None:
        """Some ranks have ended for good: this one's share of the engine's limits grows."""
        settings = replace(self.state.settings, max_queued_requests=event.max_queued_requests)
        self.state.settings = settings
        self.state.limits.set_remaining_ranks(event.ranks)

    def set_policy(self, event: SetPolicy, now: int) -> None:
        """Order the queue by another policy. Raises ConfigError for an unknown name, or one that contradicts other
        settings; the old one then stays.
        """
        settings, headroom = changed(self.state.settings, event), self.state.policy.headroom
        self.state.set_policy(settings, now)
        if type(self.state.policy.headroom) is type(headroom):
            # What the headroom has learned about answers does not depend on the order of the queue.
            self.state.policy.headroom = headroom

    def turn_ended(self, event: TurnEnded, now: int) -> None:
        """What the latest answer of a session ended with; unknown sessions are ignored."""
        if self.state.sessions is not None:
            self.state.sessions.turn_ended(event.tenant, event.session, event.kind, event.ttl_ns)

    def session_ended(self, event: SessionEnded, now: int) -> None:
        """A session has no further turns; unknown sessions are ignored."""
        if self.state.sessions is not None:
            self.state.sessions.session_ended(event.tenant, event.session, now)

    def unload_adapter(self, event: UnloadAdapter, now: int) -> None:
        """Free the slot and the cached KV of an unloaded adapter. Raises ValueError while requests use it."""
        if self.uses_adapter(event.adapter):
            raise ValueError(f"the adapter {event.adapter!r} is in use")
        self.state.adapters.unload(event.adapter)
        self.state.memory.evict_adapter(event.adapter)

    def weights_updated(self, event: WeightsUpdated, now: int) -> None:
        """The executor uses other weights from now on. Raises ValueError while a plan is in flight.

        Rows that run go on with the KV that they have, which does not enter the tree any more. Rows that wait, that
        load KV or have loaded all of it, or that are to be handed over start again under the new weights.
        """
        if self._in_flight:
            raise ValueError("the weights change only between steps")
        self.state.update_weights(event.version, now)
        if event.flush:
            self.state.memory.evict_other_weights(event.version)
        self.state.memory.tree.use_weights(event.version)

    def uses_adapter(self, adapter: str) -> bool:
        """Whether any request that waits or runs uses this adapter."""
        table = self.state.table
        number = table.adapter_number(adapter)
        return bool(number) and bool(((table.adapter == number) & (table.state != RowState.FREE)).any())

    def time_policy(self, asked: Callable[[], None], answered: Callable[[], None]) -> None:
        """Have `asked` called before each call of a user-defined policy, and `answered` after it.

        This ends when another policy is set.
        """
        self.state.policy.time_answers(asked, answered)

    def held_back(self) -> dict[str, int]:
        """How many waiting rows gates hold back, by the name of the first closed gate in `HELD_BY`."""
        gates = self.state.table.gates[self.state.waiting.rows]
        held: dict[str, int] = {}
        for gate, name in HELD_BY.items():
            closed = gates & gate != 0
            if count := int(np.count_nonzero(closed)):
                held[name], gates = count, gates[~closed]
        return held

    def flush(self, now: int) -> bool:
        """Empty the prefix cache.

        Returns False, and does nothing, while any request waits or runs, a plan is in flight, or pages are held for a
        reader or writer outside.
        """
        if self.has_work or self.state.memory.holds:
            return False
        self.state.memory.flush()
        return True

    # ---- steps -------------------------------------------------------------------------------------------------

    def plan(self, now: int) -> StepPlan | None:
        """The next step, or None if there is nothing to do before the next event or commit."""
        self.state.expire(now)
        if self.state.sessions is not None and (self.state.counts_sessions or self.state.memory.evicts_by_time):
            self.state.sessions.begin_step(self.state.cost, now)
        if self.state.memory.states is not None:
            self.state.memory.states.now = now
        if self.state.stores is not None:
            self._offer_stores(self.state.stores)
        if self._paused or len(self._in_flight) >= self.state.settings.max_in_flight:
            return None
        builder = self._planner.plan(now, len(self._in_flight))
        return None if builder is None else self._launch(builder)

    def multi_step(self, max_steps: int) -> int:
        """Extend the plan just made to up to `max_steps` steps, if the next ones differ only in their positions.

        Returns the number of steps. For a driver that knows the next events: no row may stop before the last of these
        steps, and no event but `Submit`, and no timeout, may occur between the first step and the commit, which is at
        the end of the last one; and all steps begin before `repeats_until_ns`. The state is then the same as after as
        many single steps. All pages are taken now; if there are too few, there are fewer steps.
        """
        pending = self._in_flight[-1]
        extend_plan(self.state, pending.plan, pending.rows, max_steps, self._planner.decodes_until_ns)
        return pending.plan.num_steps

    def possible_steps(self, max_steps: int) -> int:
        """How many steps `multi_step(max_steps)` would make of the plan just made. Changes nothing."""
        pending = self._in_flight[-1]
        return possible_steps(self.state, pending.plan, pending.rows, max_steps, self._planner.decodes_until_ns)

    def repeats_until_ns(self) -> int | None:
        """All steps of `multi_step` must begin before this time (ns); None for no such bound."""
        return self._planner.decodes_until_ns

    def commit(self, result: StepResult, now: int) -> None:
        """Apply the result of a step. Raises ValueError for results out of the order of their plans."""
        pending = self._in_flight[0]
        if result.step != pending.plan.step:
            raise ValueError(f"the result of step {result.step} arrived before that of step {pending.plan.step}")
        self._in_flight.popleft()
        self._committer.commit(pending.plan, pending.rows, result, now)

    def request_number(self, plan: StepPlan, place: int) -> int | None:
        """The number of the request in row `place` of a plan that waits for its commit; None if it has ended."""
        for pending in self._in_flight:
            if pending.plan is plan:
                row = int(pending.rows[place])
                if self.state.table.epoch[row] == plan.epochs[place]:
                    return int(self.state.table.number[row])
        return None

    def _offer_stores(self, stores: KvStoreQueue) -> None:
        for offer in stores.offer():
            self.state.outbox.transfer(offer)

    def store_whole_cache(self, now: int) -> None:
        """Offer the whole prefix cache to the KV store, as far as there is room. Called as the engine ends."""
        if self.state.stores is not None:
            self.state.stores.enqueue_all()
            self._offer_stores(self.state.stores)

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        state, counters = self.state, self.state.observer.counters
        plan, rows = builder.finish(counters.steps), builder.rows()
        state.table.last_step[rows] = plan.step
        self._in_flight.append(InFlightPlan(plan, rows))
        counters.steps += 1
        counters.adapter_loads += plan.adapter_loads
        if builder.chunks:
            counters.prefill_steps += 1
            counters.prefill_tokens += sum(chunk.count for chunk in builder.chunks)
        if plan.chunks_from:
            counters.decode_steps += 1
            state.prefill_steps_in_row = 0
        elif len(state.running):
            state.prefill_steps_in_row += 1
        return plan

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `drain` or `kv_records` may return anything."""
        return self.state.settings.enable_kv_events or not self.state.outbox.empty

    def drain(self) -> TokenBatch:
        """All output since the last call. Events of the cache come separately, see `kv_records`."""
        if self.state.settings.enable_kv_events:
            self._kv_events = self.state.memory.tree.drain_events()
        return self.state.outbox.drain()

    def drain_moves(self) -> list[KvMove]:
        """Loads, handovers and stores requested since the last call."""
        return self.state.outbox.drain_moves()

    def drain_tenant_usage(self) -> TenantUsage | None:
        """Tenant usage on this rank since the last call, for the other ranks; None for nothing."""
        tokens, service = self.state.limits.drain_tenant_usage(), self.state.policy.drain_service()
        tenants = sorted(tokens.keys() | service.keys())
        if not tenants:
            return None
        names = self.state.table.tenant_names()
        return TenantUsage(
            [names[tenant] for tenant in tenants],
            [tokens.get(tenant, 0) for tenant in tenants],
            [service.get(tenant, 0.0) for tenant in tenants],
        )

    def kv_records(self) -> list[KvRecord]:
        """KV events of the prefix cache between the last two calls of `drain`, in wire form."""
        return [kv_record(event) for event in self._kv_events]

    def kv_snapshot(self) -> list[KvRecord]:
        """The whole prefix cache as KV events in wire form, for subscribers that have missed some."""
        return [kv_record(event) for event in self.state.memory.tree.snapshot_events()]

    @property
    def in_flight(self) -> int:
        """Plans that wait for their commit."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a plan is in flight."""
        return bool(len(self.state.table) or self._in_flight)

    def wakeup_ns(self) -> int | None:
        """The time (ns) to call `plan` next even without an event; None for no such time."""
        state = self.state
        times = [state.queue_timeouts.next_ns, state.run_timeouts.next_ns]
        if len(state.waiting) and not self._paused:
            # Planning a step updates the limits of tenants; while nothing waits, this value is outdated.
            times.append(state.limits.next_ns)
        return min((time for time in times if time is not None), default=None)

    def idle(self) -> str | None:
        """Called when no request is left. Returns a description of leaked pages, after a reset, or None."""
        self.state.policy.headroom.idle()
        mismatch = self.state.memory.find_leak()
        if mismatch is not None and not self.state.memory.holds:
            self.state.reset_memory()
        return mismatch

    @property
    def weights(self) -> str:
        """The weights in use (`Request.weights`), "" for those that the executor started with."""
        return self.state.weights

    @property
    def cost(self) -> CostModel | None:
        """The cost model in use."""
        return self.state.cost

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request's prompt that would be a hit in the prefix cache now."""
        return self.state.memory.peek(request.known_ids.tobytes(), request.namespace)

    def requeued(self, max_requests: int) -> list[RequeuedRequest]:
        """The first `max_requests` retracted requests that wait without known KV elsewhere, paused ones last."""
        table, rows = self.state.table, self.state.waiting.rows
        rows = rows[(table.retractions[rows] > 0) & (table.loadable_tokens[rows] == 0)]
        gates = table.gates[rows]
        found = []
        for row in np.concatenate((rows[gates == 0], rows[gates == Gate.PAUSED]))[:max_requests].tolist():
            known, namespace = table.request_state(row).known_ids, table.request(row).namespace
            cached = self.state.memory.peek(known.tobytes(), namespace)
            found.append(RequeuedRequest(int(table.number[row]), namespace, known, cached))
        return found

    def outputs(self, numbers: list[int]) -> dict[int, list[int]]:
        """The output tokens so far of those of `numbers` that wait (paused requests included), by number."""
        table, found = self.state.table, {}
        for row in self.state.known_rows(numbers):
            if table.state[row] == RowState.WAITING:
                known = table.request_state(row).known_ids
                found[int(table.number[row])] = known[table.prompt_tokens[row] :].tolist()
        return found

    def prefill_load(self, cost: CostModel, now: int) -> tuple[float, float]:
        """The load of waiting prompts by `cost`, as (seconds, slowdown).

        seconds: time until the prompts that wait now are computed. slowdown: seconds that one second of prefill takes
        here next to the decoding requests.
        """
        slowdown = prefill_slowdown(self.state.views(now), self.state.settings, cost)
        return self.state.queued_work(cost)[1] * slowdown, slowdown

    def awaits_admission(self, number: int) -> bool:
        """Whether a request waits, or its KV is being loaded."""
        row = self.state.table.row_of(number)
        return row is not None and self.state.table.state[row] in (RowState.WAITING, RowState.LOADING)

    def waiting_numbers(self) -> list[int]:
        """The numbers of all requests that wait, in order of arrival."""
        numbers: list[int] = self.state.table.number[self.state.waiting.rows].tolist()
        return numbers

    def request_view(self, number: int, now: int) -> RequestView | None:
        """What a priority function may see of a waiting request; None if it does not wait."""
        table = self.state.table
        row = table.row_of(number)
        if row is None or table.state[row] != RowState.WAITING:
            return None
        request, priority, prompt = table.request(row), int(table.priority[row]), int(table.prompt_tokens[row])
        return RequestView(
            priority=None if priority == NO_PRIORITY else priority,
            tenant=request.tenant,
            service_class=request.service_class,
            prompt_tokens=prompt,
            max_new_tokens=int(table.limit[row]) - prompt + 1,
            waited_s=(now - int(table.arrival_ns[row])) / NS_PER_S,
        )

    def explain(self, number: int, now: int) -> Explanation | None:
        """Where the time of a request went until `now`, or until it ended; None if the request is unknown or its entry
        was dropped.
        """
        return self.state.observer.explain(number, now)

    def lookahead_state(self, now: int) -> LookaheadState:
        """The state that a forecast of lookahead starts from; see `scheduler.lookahead_state`."""
        return take_lookahead_state(self.state, now)

    def live_view(self, now: int, *, prefixes: bool) -> LiveView:
        """Who waits and runs, who holds KV, and with `prefixes` which parts of the tree are hot; see `live_view`."""
        return take_live_view(self.state, now, prefixes=prefixes)

    def snapshot(self, now: int) -> Snapshot:
        """Counters and gauges at `now`."""
        return take_snapshot(self.state, now, in_flight=len(self._in_flight), paused=self._paused)
