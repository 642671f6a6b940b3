"""One simulation: schedulers, their routers, and all events, in the order of virtual time."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    ConfigError,
    Event,
    ExecutorInfo,
    Finish,
    Request,
    SessionEnded,
    Submit,
    TurnEnd,
    TurnEnded,
)
from tokenyard.base.version import __version__
from tokenyard.cost import unloaded_prefill_s
from tokenyard.policy.adaptive import AdaptivePolicy
from tokenyard.routing.registry import make_policy
from tokenyard.sim.engine.adaptive_driver import AdaptiveDriver
from tokenyard.sim.engine.sim_scheduler import NEVER_NS, SimExecutor, SimScheduler, StepObserver
from tokenyard.sim.engine.speculation import SimDrafter
from tokenyard.sim.fleet.autoscaler import DRAINING, OFF, READY, STARTING, Autoscaler, EngineLoad, FleetLoad
from tokenyard.sim.fleet.dp_ranks import TENANT_USE_EVERY_NS, exchange_tenant_usage, shares_tenants
from tokenyard.sim.fleet.fleet_events import FleetEvent, fleet_events
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.kv.disagg_routing import DisaggRouting, make_routing
from tokenyard.sim.kv.kv_store import KvStoreTotals, SimKvStore
from tokenyard.sim.kv.pd_network import Network, NetworkSizes
from tokenyard.sim.outcome import (
    FINISHED,
    REJECTED,
    UNFINISHED,
    Outcome,
    SchedulerRun,
    Setup,
    blank_outcome,
    executor_info,
)
from tokenyard.sim.traces.arrival_queue import ALL, make_arrivals
from tokenyard.sim.traces.prompt_ids import BlankContent, Content, UniqueContent
from tokenyard.sim.traces.workload import Workload, to_ns
from tokenyard.tape.codec import Origin
from tokenyard.tape.recorder import RecordingScheduler, Sink

HASH_BYTES = 16


@dataclass(slots=True, eq=False)
class SimInstance:
    """A scheduler with its device and, under policy `adaptive`, its lookahead."""

    replica: SimScheduler
    executor: SimExecutor
    adapter: AdaptiveDriver | None

    @property
    def driver(self) -> SimScheduler | AdaptiveDriver:
        """The object that advances it through time."""
        return self.adapter or self.replica


class Simulation:
    """The state of one simulation.

    The next event is either internal to a scheduler (a step ends) or external: an arrival, an entry of the fleet's
    schedule, a sweep of the routers' queues. At equal times external events come first.
    """

    def __init__(
        self,
        workload: Workload,
        setup: Setup,
        observer: StepObserver | None = None,
        tape: Sink | None = None,
        window: slice = ALL,
    ) -> None:
        """Set up all schedulers and routers. Only the requests of `window` arrive.

        Raises ConfigError for settings that cannot work.
        """
        if setup.replicas < 1 or setup.dp_size < 1:
            what = ("--replicas", setup.replicas) if setup.replicas < 1 else ("--dp-size", setup.dp_size)
            raise ConfigError(f"{what[0]} is {what[1]}; it must be at least 1")
        if setup.settings.max_running_requests < setup.dp_size:
            raise ConfigError("--max-running-requests is for all ranks together; each rank (--dp-size) needs one")
        if setup.disagg is not None and setup.dp_size > 1:
            raise ConfigError("--dp-size with --prefill-replicas is not simulated; leave one of them out")
        if setup.disagg is not None and setup.fleet.autoscale is not None:
            raise ConfigError("an autoscaler of prefill and decode engines is not simulated; leave one of them out")
        make_policy(setup.router)
        setup.fleet.check(setup.engines)
        self._workload, self._setup = workload, setup
        self._truth = setup.profile.cost()
        self._unloaded_s: dict[int, float] = {}
        self._outcome = blank_outcome(workload, setup)
        # If no two prompts share a prefix, no other request can hit an answer in the cache.
        self._alike = not isinstance(workload.content, UniqueContent)
        routed = setup.schedulers > 1 or setup.fleet != Fleet()
        self.routing = make_routing(setup, self._alike, self._send, self._refuse) if routed else None
        self._engines_choose = self.routing is not None and self.routing.engines_choose
        blank = setup.settings.disable_radix_cache and self.routing is None
        self._kv = self._make_network()
        self._content: Content = BlankContent() if blank else workload.content
        self.units = [self._unit(0, observer, tape)] + [self._unit(k, None, None) for k in range(1, setup.schedulers)]
        self._stopped: dict[int, int] = {}
        self._ended: list[list[SimScheduler]] = [[] for _ in self.units]
        self._described = self.units[0].replica.scheduler.snapshot(0).policy
        self._due: list[tuple[int, int]] = []
        self._order = count()
        self._schedule: list[tuple[int, int, Callable[[int], None]]] = []
        for at_ns, happening in fleet_events(setup.fleet):
            self.at(at_ns, partial(self._apply_fleet_event, happening))
        if self._kv is not None:
            self._connect(self._kv)
        numbers = range(
            setup.schedulers if setup.kv_store is not None and not setup.settings.disable_radix_cache else 0
        )
        self._kv_stores = [self._make_kv_store(number) for number in numbers]
        self._arrivals = make_arrivals(workload, window)
        self._served_by: dict[int, list[int]] = {}
        self._sweep_ns = NEVER_NS
        self._autoscaler: Autoscaler | None = None
        self._arrived_ns = np.full(len(workload), NEVER_NS)
        if setup.fleet.autoscale is not None:
            self._start_autoscaler(Autoscaler(setup.fleet.autoscale, setup.replicas))
        self._exchanges_usage = setup.dp_size > 1 and shares_tenants(setup.settings)
        self._exchanging_usage = False
        self._moves: deque[tuple[int, int]] = deque()

    def _make_kv_store(self, number: int, before: SimKvStore | None = None) -> SimKvStore:
        """The KV store of a scheduler. It keeps what an earlier life of the scheduler left on disk."""
        setup, engine = self._setup, number // self._setup.dp_size
        assert setup.kv_store is not None
        core, info = self.units[number].replica.scheduler, executor_info(setup, engine)
        disk = None if before is None else before.disk
        return SimKvStore(setup.kv_store, core, info, setup.prior(engine), partial(self.apply, number), self.at, disk)

    def _move_kv(self, number: int, now: int) -> None:
        """Start the loads, stores and transfers that a scheduler requested."""
        moves = self.units[number].replica.scheduler.drain_moves()
        if self._kv_stores:
            moves = self._kv_stores[number].take(moves, now)
        if self._kv is not None:
            self._kv.turned(number, moves, now)
        self._note_due(number)

    def _make_network(self) -> Network | None:
        setup = self._setup
        if setup.disagg is None:
            return None
        info = executor_info(setup)
        state_bytes = 0 if info.states is None else info.states.slot_bytes
        kv_bytes = info.kv_bytes_per_token
        sizes = NetworkSizes(len(self._workload), setup.replicas, info.page_size, kv_bytes, state_bytes)
        return Network(setup.disagg, self, sizes, setup.seed)

    def _connect(self, network: Network) -> None:
        """Add all engines to the network."""
        later = {fault.replica for fault in self._setup.fleet.faults if fault.deadly and not fault.at_s}
        for number, unit in enumerate(self.units):
            network.add(unit.replica.scheduler, self._setup.prior(number), alive=number not in later)
        network.start()
        if isinstance(self.routing, DisaggRouting):
            network.leg_ended, self.routing.drop = self.routing.leg_ended, network.dropped

    def at(self, when_ns: int, call: Callable[[int], None]) -> None:
        """Have `call(now)` run at `when_ns`."""
        heappush(self._schedule, (when_ns, next(self._order), call))

    def apply(self, number: int, event: Event, now: int) -> None:
        """Apply an event to scheduler `number`; while the scheduler is stalled, the event waits."""
        unit, until = self.units[number], self._stopped.get(number, 0)
        if now < until:
            self.at(until, lambda at: self.apply(number, event, at) if self.units[number] is unit else None)
            return
        unit.driver.advance_to(now)
        if self._kv_stores and isinstance(event, Submit):
            event = Submit(self._kv_stores[number].submitted(event.request, now))
        unit.replica.apply_event(event, now)
        self._note_due(number)

    def _unit(self, number: int, observer: StepObserver | None, tape: Sink | None) -> SimInstance:
        setup, (engine, rank) = self._setup, divmod(number, self._setup.dp_size)
        info = executor_info(setup, engine)
        cached = not setup.settings.disable_radix_cache
        truth = setup.profile_of(engine).cost()
        distinct_tokens = cached and (self._alike or tape is not None)
        executor = SimExecutor(info, truth, self._workload.output_tokens, distinct_tokens, self._drafter(info))
        answers = engine < setup.replicas
        routing, by_events = self.routing, setup.fleet.kv_event_lag_s is not None and cached
        settings = setup.settings_of(rank)
        settings = replace(
            settings,
            enable_kv_events=by_events or settings.enable_kv_events,
            enable_hierarchical_cache=setup.kv_store is not None and cached,
        )
        origin = Origin(settings, info, setup.prior(engine), setup.learn)
        replica = SimScheduler(
            origin.scheduler() if tape is None else RecordingScheduler(origin, tape, None, __version__),
            executor,
            partial(self._note_finish, number),
            setup.settings.max_in_flight,
            setup.host_s,
            observer,
            routing.first_token if routing is not None and answers else None,
            partial(routing.kv_events_sent, number) if routing is not None and by_events and answers else None,
        )
        adaptive = setup.settings.schedule_policy == AdaptivePolicy.name
        return SimInstance(replica, executor, AdaptiveDriver(settings, replica) if adaptive else None)

    def _drafter(self, info: ExecutorInfo) -> SimDrafter | None:
        speculation = self._setup.speculation
        if speculation is None:
            return None
        return SimDrafter(speculation, speculation.marks(len(self._workload), self._setup.seed), info.max_pool_rows)

    @property
    def _interleaved(self) -> bool:
        """Whether schedulers must run in order of time because they interact; a single one need not."""
        return self.routing is not None or self._workload.sessions is not None or bool(self._kv_stores)

    def until_end(self) -> Iterator[int]:
        """Run the simulation. Yields, before each event, the number of requests that have arrived."""
        alone = None if self._interleaved else self.units[0]
        while True:
            at_ns = min(self._arrivals.next_ns, self._schedule[0][0] if self._schedule else NEVER_NS, self._sweep_ns)
            if alone is not None:
                alone.driver.advance(at_ns, to_arrival=at_ns < NEVER_NS)
            elif self._turn_before(at_ns):
                continue
            if at_ns == NEVER_NS:
                return
            yield from self._from_outside(at_ns)

    def _turn_before(self, until: int) -> bool:
        """Run the scheduler with the earliest due time for a turn, if that is before `until`."""
        while self._due and self._due[0][0] < until:
            due_ns, number = heappop(self._due)
            driver = self.units[number].driver
            if driver.due_ns != due_ns:
                continue
            driver.turn()
            self._note_due(number)
            self._move(due_ns)
            if self._kv is not None or self._kv_stores:
                self._move_kv(number, due_ns)
            if self.routing is not None and self.routing.capacity_freed:
                self._serve(due_ns)
            return True
        return False

    def _note_due(self, number: int) -> None:
        due_ns = self.units[number].driver.due_ns
        if due_ns < NEVER_NS:
            heappush(self._due, (due_ns, number))

    def _from_outside(self, now: int) -> Iterator[int]:
        """Process the external events at `now`: the schedule first, then arrivals, then the queues."""
        if self._schedule and self._schedule[0][0] == now:
            heappop(self._schedule)[2](now)
            if self.routing is not None and self.routing.capacity_freed:
                self._serve(now)
        elif self._arrivals.next_ns == now:
            self._arrive(self._arrivals.pop(), now)
            yield self._arrivals.popped - 1
        elif self.routing is not None:
            self.routing.sweep(now)
            self._serve(now)

    def _arrive(self, index: int, now: int) -> None:
        """Request `index` arrives."""
        self._arrived_ns[index] = now
        self._outcome.unloaded_s[index] = self._unloaded(int(self._workload.prompt_tokens[index]))
        request = self._request(index)
        if self._workload.sessions is not None:
            request = replace(request, arrival_ns=now)
        if self.routing is None:
            self._send(request, 0, now)
        else:
            self.routing.arrive(request, now)
            self._schedule_router_sweep(now)

    def _request(self, index: int) -> Request:
        return self._workload.request(index, self._content, true_length=self._setup.oracle)

    def _send(self, request: Request, number: int, now: int) -> None:
        """Submit a request to a scheduler. Its arrival at the engine is when the router sends it."""
        self._outcome.sent_ns[request.number] = now
        self._forward(request if request.arrival_ns == now else replace(request, arrival_ns=now), number, now)
        self._move(now)
        if self._exchanges_usage and not self._exchanging_usage:
            self._exchanging_usage = True
            self.at((now // TENANT_USE_EVERY_NS + 1) * TENANT_USE_EVERY_NS, self._exchange_tenant_usage)

    def _forward(self, request: Request, number: int, now: int) -> None:
        """Forward a request to a scheduler."""
        self._outcome.place[request.number] = number
        if now < self._stopped.get(number, 0):
            self.at(self._stopped[number], partial(self._deliver, request, number, self.units[number]))
        else:
            self._deliver(request, number, self.units[number], now)

    def _deliver(self, request: Request, number: int, to: SimInstance, now: int) -> None:
        """Deliver a request to a scheduler, unless that has died meanwhile."""
        unit = self.units[number]
        if unit is not to:
            return
        unit.driver.advance_to(now)
        if self._kv is not None:
            partner = self.routing.partner[request.number] if isinstance(self.routing, DisaggRouting) else -1
            request = self._kv.submitted(number, request, partner, now)
        if self._kv_stores:
            request = self._kv_stores[number].submitted(request, now)
        unit.replica.submit(request, now)
        if unit.adapter is not None:
            unit.adapter.submitted(request, now)
        if self._engines_choose:
            unit.replica.drain(now)
        if self._interleaved:
            self._note_due(number)

    def _move(self, now: int) -> None:
        """Move requests that a rank refused to other ranks of its engine."""
        while self._moves:
            index, number = self._moves.popleft()
            request = replace(self._request(index), arrival_ns=int(self._outcome.sent_ns[index]))
            self._forward(request, number, now)

    def _exchange_tenant_usage(self, now: int) -> None:
        """Exchange tenant usage among the ranks of each engine, as long as they have work."""
        size, self._exchanging_usage = self._setup.dp_size, False
        for first in range(0, self._setup.schedulers, size):
            ranks = self.units[first : first + size]
            for unit in ranks:
                unit.driver.advance_to(now)
            cores = [unit.replica.scheduler for unit in ranks]
            self._exchanging_usage |= exchange_tenant_usage(cores, now) or any(core.has_work for core in cores)
            for number in range(first, first + size):
                self._note_due(number)
        self._move(now)
        if self._exchanging_usage:
            self.at(now + TENANT_USE_EVERY_NS, self._exchange_tenant_usage)

    def _serve(self, now: int) -> None:
        """Assign free room to requests that wait at the routers."""
        assert self.routing is not None
        self.routing.serve(now)
        self._schedule_router_sweep(now)

    def _schedule_router_sweep(self, now: int) -> None:
        """Set the time of the next sweep of the routers' queues."""
        assert self.routing is not None
        self._sweep_ns = self.routing.next_sweep_ns(now)

    def _refuse(self, number: int, now: int) -> None:
        """Record that the router refused a request."""
        self._outcome.status[number] = REJECTED
        self._outcome.finished_ns[number] = now
        self._end_turn(number, None, now)

    def _end_turn(self, index: int, number: int | None, now: int) -> None:
        """Request `index` has ended at scheduler `number` (None: at the router): those that wait for it may be sent.

        The schedulers that served a session learn of the end of the turn, and of the session if clients say so.
        """
        over, sessions = self._arrivals.ended(index, now), self._workload.sessions
        if sessions is None:
            return
        if number is not None:
            conversation = int(sessions.conversation[index])
            kind: TurnEnd = "tool" if sessions.tool[index] else "user"
            turn = TurnEnded(sessions.names[conversation], kind, tenant=self._tenant_of(index))
            self.at(now, partial(self.apply, number, turn))
            served_by = self._served_by.setdefault(conversation, [])
            if number not in served_by:
                served_by.append(number)
        if over and sessions.closed:
            mine = sessions.conversation[sessions.session == sessions.session[index]]
            for conversation in dict.fromkeys(mine.tolist()):
                for place in self._served_by.pop(conversation, ()):
                    ended = SessionEnded(sessions.names[conversation], self._tenant_of(index))
                    self.at(now, partial(self.apply, place, ended))

    def _tenant_of(self, index: int) -> str:
        """The tenant of request `index`."""
        return str(self._workload.tenants[self._workload.tenant[index]])

    def _apply_fleet_event(self, happening: FleetEvent, now: int) -> None:
        """Apply an entry of the fleet's schedule."""
        routing, engine = self.routing, happening.replica
        assert routing is not None
        # Routers do not see prefill engines that the decode engines choose themselves.
        routed = engine < self._setup.replicas or isinstance(routing, DisaggRouting)
        numbers, scaler = self._ranks_of(engine), self._autoscaler
        if happening.what == "slow":
            for number in numbers:
                self.units[number].driver.advance_to(now)
                self.units[number].executor.slow_down(happening.factor)
                self._note_due(number)
        elif happening.what == "stop":
            for number in numbers:
                self._stop(number, now + to_ns(happening.factor), now)
        elif happening.what == "kill":
            if scaler is not None:
                scaler.died(engine, now / NS_PER_S)
            self._kill(engine, now)
            if routed:
                routing.died(engine, now)
        elif happening.what == "close":
            if routed:
                routing.close(engine)
        elif scaler is not None and engine not in scaler.numbers(READY):
            scaler.repaired(engine, now / NS_PER_S)
        else:
            if routed:
                routing.open(engine)
            if self._kv is not None:
                self._kv.opened(engine, now)
        self._serve(now)

    def _start_autoscaler(self, scaler: Autoscaler) -> None:
        """Only the first engines serve; the others wait for the autoscaler."""
        assert self.routing is not None
        self._autoscaler = scaler
        for engine in scaler.numbers(OFF):
            self.routing.close(engine)
        self.at(to_ns(scaler.settings.every_s), self._autoscale)

    def _autoscale(self, now: int) -> None:
        """Let the autoscaler decide, as long as there are requests."""
        scaler, routing = self._autoscaler, self.routing
        assert scaler is not None
        assert routing is not None
        arrived = self._arrived_ns < NEVER_NS
        if self._arrivals.next_ns == NEVER_NS and (self._outcome.status[arrived] != UNFINISHED).all():
            return
        now_s = now / NS_PER_S
        self._end_drained(now)
        start, again, close = scaler.decide(self._fleet_load(scaler, now))
        for engine in start:
            ready_s = scaler.started(engine, now_s)
            self.at(to_ns(ready_s), partial(self._engine_ready, engine, ready_s))
        for engine in again:
            scaler.opened(engine, now_s)
            routing.open(engine)
        for engine in close:
            scaler.closed(engine, now_s)
            routing.close(engine)
        self._end_drained(now)
        self._serve(now)
        self.at(now + to_ns(scaler.settings.every_s), self._autoscale)

    def _engine_ready(self, engine: int, ready_s: float, now: int) -> None:
        """The cold start of an engine, which was to be ready at `ready_s`, is over."""
        assert self._autoscaler is not None
        if self._autoscaler.ready(engine, ready_s):
            self._apply_fleet_event(FleetEvent("open", engine), now)

    def _end_drained(self, now: int) -> None:
        """Draining engines without requests end, and lose their caches."""
        scaler = self._autoscaler
        assert scaler is not None
        assert self.routing is not None
        for engine in scaler.numbers(DRAINING):
            if not any(unit.replica.scheduler.has_work for unit in self._advanced(engine, now)):
                scaler.ended(engine, now / NS_PER_S)
                self._kill(engine, now)
                self.routing.died(engine, now)

    def _advanced(self, engine: int, now: int) -> list[SimInstance]:
        """The schedulers of an engine, advanced to `now`."""
        for number in self._ranks_of(engine):
            self.units[number].driver.advance_to(now)
            self._note_due(number)
        self._move(now)
        return [self.units[number] for number in self._ranks_of(engine)]

    def _ranks_of(self, engine: int) -> range:
        """The numbers of an engine's schedulers."""
        return range(engine * self._setup.dp_size, (engine + 1) * self._setup.dp_size)

    def _fleet_load(self, scaler: Autoscaler, now: int) -> FleetLoad:
        """What an autoscaler sees at this moment."""
        assert self.routing is not None
        engines: list[EngineLoad] = []
        for engine in scaler.numbers(READY):
            states = [unit.replica.scheduler.snapshot(now) for unit in self._advanced(engine, now)]
            used = sum(state.used_tokens for state in states) / max(sum(state.total_tokens for state in states), 1)
            waiting = sum(state.waiting for state in states)
            engines.append(EngineLoad(waiting, sum(state.running + state.prefilling for state in states), used))
        attainment = self._first_tokens_in_time(now - to_ns(scaler.settings.every_s), now)
        starting, arrivals = len(scaler.numbers(STARTING)), self._arrivals.popped
        return FleetLoad(now / NS_PER_S, engines, starting, self.routing.waiting, arrivals, attainment)

    def _first_tokens_in_time(self, since: int, now: int) -> float | None:
        """The share of the requests that began or became overdue since `since` (ns) whose first token was in time."""
        outcome, routing = self._outcome, self.routing
        assert routing is not None
        arrived = self._arrived_ns < NEVER_NS
        first = outcome.first_token_ns.copy()
        for number, at in routing.first_seen.items():
            first[number] = at
        first = first[arrived]
        due = self._arrived_ns[arrived] + np.minimum(outcome.ttft_slo_s[arrived] * NS_PER_S, 1e18).astype(np.int64)
        latest = (first > since) | ((first == 0) & (due > since) & (due <= now))
        in_time = (first > 0) & (first <= due)
        return float(in_time[latest].mean()) if latest.any() else None

    def _kill(self, engine: int, now: int) -> None:
        """The processes of an engine end; new ones with empty caches take their place."""
        for number in self._ranks_of(engine):
            self.units[number].driver.advance_to(now)
            self._ended[number].append(self.units[number].replica)
            self._stopped.pop(number, None)
            self.units[number] = self._unit(number, None, None)
            if self._kv_stores:
                self._kv_stores[number].alive = False
                self._kv_stores[number] = self._make_kv_store(number, self._kv_stores[number])
            if self._kv is not None:
                self._kv.killed(number, self.units[number].replica.scheduler, now)

    def _stop(self, number: int, until: int, now: int) -> None:
        """Stall a scheduler until `until`; events for it wait."""
        unit = self.units[number]
        unit.driver.advance_to(now)
        unit.replica.pause_until(until)
        self._stopped[number] = until
        if self._kv is not None:
            self._kv.stopped(number, until)
        self._note_due(number)

    def _unloaded(self, prompt_tokens: int) -> float:
        """Seconds that the prefill of the whole prompt takes on the idle device."""
        seconds = self._unloaded_s.get(prompt_tokens)
        if seconds is None:
            seconds = self._unloaded_s[prompt_tokens] = unloaded_prefill_s(self._truth, prompt_tokens)
        return seconds

    def _note_finish(self, number: int, finish: Finish) -> None:
        """Record the end of request `finish.number` at scheduler `number`."""
        outcome, index = self._outcome, finish.number
        if self._kv_stores:
            self._kv_stores[number].ended(finish.number)
        if self._kv is not None:
            self._kv.finished(number, finish, self.units[number].replica.now)
            if number >= self._setup.replicas:
                return
        adapter = self.units[number].adapter
        if adapter is not None:
            adapter.finished(finish)
        if self._engines_choose and self.routing is not None:
            other = self.routing.move_to_other_rank(finish, finish.finished_ns)
            if other is not None:
                self._moves.append((index, other))
                return
        outcome.status[index] = REJECTED if finish.reason == "abort" else FINISHED
        outcome.admitted_ns[index] = finish.admitted_ns
        outcome.first_token_ns[index] = finish.first_token_ns
        outcome.finished_ns[index] = finish.finished_ns
        outcome.completion_tokens[index] = finish.completion_tokens
        outcome.cached_tokens[index] = finish.cached_tokens
        outcome.retractions[index] = finish.retractions
        if self.routing is not None:
            self.routing.finished(finish)
            seen_ns = self.routing.first_seen.pop(index, finish.first_token_ns)
            outcome.first_token_ns[index] = min(seen_ns, finish.first_token_ns)
        self._end_turn(index, number, max(finish.finished_ns, self.units[number].replica.now))

    @property
    def kv(self) -> Network | None:
        """The network between prefill and decode engines; None without PD disaggregation."""
        return self._kv

    @property
    def so_far(self) -> Outcome:
        """The outcome of the requests that have ended."""
        return self._outcome

    def misses(self, window: slice) -> int:
        """Number of requests of `window` that can no longer meet their targets.

        These are requests that have ended late, and open ones whose first token is overdue.
        """
        routing = self.routing
        begun = None if routing is None or self._workload.sessions is not None else list(routing.first_seen)
        return self._outcome.certain_misses(window, self._arrivals.popped, begun)

    def outcome(self) -> Outcome:
        """The outcome at the end of the simulation."""
        outcome = self._outcome
        outcome.workload = self._arrivals.with_actual_arrivals()
        replicas = [unit.replica for unit in self.units]
        lives = [[*ended, replica] for ended, replica in zip(self._ended, replicas, strict=True)]
        outcome.schedulers = [_run_of(one) for one in lives]
        ends_ns = [life.now for one in lives for life in one]
        if self._autoscaler is not None:
            ends_ns.append(round(self._autoscaler.decided_s * NS_PER_S))
        outcome.sim_seconds = max(ends_ns) / NS_PER_S
        if self._kv_stores:
            outcome.kv_store = KvStoreTotals()
            for unit, kv_store in zip(self.units, self._kv_stores, strict=True):
                outcome.kv_store.add(kv_store.close(unit.replica.scheduler.snapshot(unit.replica.now).unstored_tokens))
        if self._kv is not None:
            outcome.transfers = self._kv.close()
        if self._autoscaler is not None:
            outcome.scaling = self._autoscaler.finish(outcome.sim_seconds)
        if self.routing is not None:
            outcome.predicted_cached_tokens = self.routing.predicted_tokens
        digests = [replica.decision_hash() for replica in replicas]
        outcome.decision_hash = (
            digests[0] if len(digests) == 1 else blake2b(b"".join(digests), digest_size=HASH_BYTES).digest()
        ).hex()
        outcome.counters = _sum_of([run.counters for run in outcome.schedulers])
        if self.routing is not None:
            for name, times in self.routing.retried.items():
                outcome.counters[name] -= times
        outcome.switches = [one for unit in self.units if unit.adapter for one in unit.adapter.selector.latest]
        outcome.policy_note = "; ".join(dict.fromkeys(filter(None, map(self._policy_note, self.units))))
        return outcome

    def check_policy(self) -> None:
        """Raise ConfigError if a user policy has failed."""
        if self.routing is not None and (failure := self.routing.policy_failure):
            raise ConfigError(f"the routing policy {failure}")
        if ":" in self._setup.settings.schedule_policy:
            for unit in self.units:
                if failure := unit.replica.scheduler.snapshot(unit.replica.now).policy_failure:
                    raise ConfigError(f"the policy {failure}")
        if ":" in self._setup.settings.radix_eviction_policy:
            for unit in self.units:
                if failure := unit.replica.scheduler.snapshot(unit.replica.now).eviction_failure:
                    raise ConfigError(f"the eviction policy {failure}")

    def _policy_note(self, unit: SimInstance) -> str:
        """Why this scheduler did not use the configured policy; "" if it did."""
        state = unit.replica.scheduler.snapshot(unit.replica.now)
        if state.policy_note or unit.adapter is not None or state.policy == self._described:
            return state.policy_note
        return f"ended as {state.policy}"


def _run_of(lives: list[SimScheduler]) -> SchedulerRun:
    """Totals of a scheduler over all its lives. A new life begins when its engine is killed."""
    counters = [asdict(life.scheduler.snapshot(life.now).counters) for life in lives]
    return SchedulerRun(sum(life.busy_ns for life in lives) / NS_PER_S, _sum_of(counters), len(lives) - 1)


def _sum_of(counters: list[dict[str, int]]) -> dict[str, int]:
    """The sum of each counter, by name."""
    totals: dict[str, int] = {}
    for one in counters:
        for name, number in one.items():
            totals[name] = totals.get(name, 0) + number
    return totals
