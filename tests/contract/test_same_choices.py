"""The same events lead to the same decisions in the simulator and in the router.

The simulator serves a workload, with faults and drains. What its routers report to the dispatch machine is then
reported to a real router at the same times; all of it runs but the connections to workers.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest

from tests.sim.small_workloads import setup
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.proxy import Router
from tokenyard.router.proxy_exchange import Exchange
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.dispatch import Dispatcher, Send
from tokenyard.routing.load import preempts_by
from tokenyard.routing.registry import POLICIES
from tokenyard.routing.workers import Workers
from tokenyard.sim.fleet.fleet_settings import Drain, Fault, Fleet
from tokenyard.sim.fleet.sim_router import SimRouter, SimRouting
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

REPLICAS, ROOM = 4, 5
PREEMPTS_BY = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 1}
TROUBLE = {"faults": (Fault(0.5, 1, 1.0), Fault(1.0, 3, 0.5)), "drains": (Drain(0.7, 0, 1.0),)}
CROWDED = {"max_worker_requests": 2, "queue_size": 12, "queue_timeout_s": 1.0, "queue_aging_s": 0.5}
CASES = [(policy, "shared-prefix", {}, {}) for policy in POLICIES] + [
    ("predicted_ttft", "classes", {"max_worker_requests": ROOM}, {}),
    ("predicted_ttft", "classes", {"max_worker_requests": ROOM}, PREEMPTS_BY),
    ("least_load", "tenants", {"max_worker_requests": ROOM}, {}),
    ("predicted_ttft", "shared-prefix", TROUBLE, {}),
    ("predicted_ttft", "classes", {"max_worker_requests": ROOM, **TROUBLE}, PREEMPTS_BY),
    ("cache_aware", "tenants", CROWDED, {}),
    ("predicted_ttft", "classes", {**CROWDED, **TROUBLE}, {}),
]


class Log:
    """What a driver reports to its dispatch machine, and what the machine decides."""

    def __init__(self, number_of):
        self.number_of, self.events, self.decisions = number_of, [], []
        self._depth = 0

    def record(self, monkeypatch):
        for name in ("arrived", "place", "first_token", "released", "ended"):
            self._wrap(monkeypatch, Dispatcher, name, self._request)
        for name in ("serve", "tick"):
            self._wrap(monkeypatch, Dispatcher, name, lambda now: (now,))
        for name in ("drain", "down", "probed"):
            self._wrap(monkeypatch, Workers, name, lambda worker, **options: (int(worker.name[1:]), options))

    def _request(self, request, now=None):
        return self.number_of(request), now

    def _wrap(self, monkeypatch, kind, name, describe):
        original = getattr(kind, name)

        def wrapped(subject, *args, **options):
            if not self._depth:
                self.events.append((name, *describe(*args, **options)))
            self._depth += 1
            try:
                actions = original(subject, *args, **options)
            finally:
                self._depth -= 1
            if isinstance(actions, list) and not self._depth:
                self.decisions += [self._decision(action, args[-1]) for action in actions]
            return actions

        monkeypatch.setattr(kind, name, wrapped)

    def _decision(self, action, now):
        number = self.number_of(action.request)
        return (number, action.choice.target.name[1:] if isinstance(action, Send) else action.cause, now)


class Driven:
    """A router in virtual time, without connections."""

    def __init__(self, policy, fleet, settings, salts, monkeypatch):
        self.now_ns = 0
        self.router = Router(
            RouterSettings(
                policy=policy,
                max_worker_requests=fleet.max_worker_requests or 256,
                queue_size=fleet.queue_size,
                queue_timeout_secs=fleet.queue_timeout_s,
                queue_aging_secs=fleet.queue_aging_s,
                health_success_threshold=1,
            )
        )
        self.router.now_ns = lambda: self.now_ns
        self.exchanges = {}
        monkeypatch.setattr(Exchange, "dispatched", lambda exchange: None)
        monkeypatch.setattr(self.router.health, "watch", lambda worker: None)
        self.workers = []
        for number, salt in enumerate(salts):
            worker = self.router.add_worker(f"http://127.0.0.1:{9000 + number}", "test")
            worker.targets[0].state.salt = salt
            worker.preempts_by = preempts_by(settings)
            self.workers.append(worker)

    def arrived(self, request):
        body = {
            "number": request.number,
            "prompt": request.prompt_ids.tolist(),
            "stream": True,
            "tenant": request.tenant,
        }
        body |= {"priority": request.priority} if request.priority is not None else {}
        body |= {"deadline_ms": request.deadline_ns / 1e6} if request.deadline_ns is not None else {}
        incoming = ClientRequest(
            b"POST", b"/v1/completions", [], True, False, json.dumps(body).encode(), "/v1/completions"
        )
        front = SimpleNamespace(fail=lambda error, path: None, end=lambda keep=True: None, paused=False)
        self.exchanges[request.number] = self.router.handle(front, incoming)

    def learned(self, number, prompt_tokens, cached_tokens):
        exchange = self.exchanges[number]
        self.router.learn(exchange.parsed, exchange.sent, prompt_tokens, cached_tokens)

    def replay(self, name, subject, detail):
        """Report one event to the machine, as the router does."""
        router, machine = self.router, self.router.machine
        match name:
            case "serve":
                router.perform(machine.serve(self.now_ns))
            case "tick":
                router.sweep()
            case "drain" | "down" | "probed":
                getattr(router.workers, name)(self.workers[subject], **detail)
            case "place":
                router.perform(machine.place(self.exchanges[subject], self.now_ns))
            case "first_token":
                machine.first_token(self.exchanges[subject], self.now_ns)
            case "released":
                machine.released(self.exchanges[subject])
            case "ended" if not self.exchanges[subject].over:
                self.exchanges[subject].client_gone()


@pytest.mark.part(3)
@pytest.mark.parametrize(("policy", "kind", "options", "settings"), CASES)
def test_the_router_decides_what_the_simulator_decided(policy, kind, options, settings, monkeypatch):
    traffic = synthetic(kind, 120, 40.0, seed=3)
    fleet = Fleet(**{"queue_timeout_s": 1e6, **options})
    chosen = setup(settings={"disable_radix_cache": False, **settings}, replicas=REPLICAS, router=policy, fleet=fleet)
    log, targets = Log(lambda request: request.request.number), []
    with monkeypatch.context() as patches:
        add, finished = SimRouter.add, SimRouting.finished

        def added(router, *args):
            add(router, *args)
            targets.extend(worker.targets[0].state for worker in router.workers)

        def learned(routing, finish):
            log.events.append(("learned", finish.number, finish.cached_tokens))
            finished(routing, finish)

        patches.setattr(SimRouter, "add", added)
        patches.setattr(SimRouting, "finished", learned)
        log.record(patches)
        simulated = simulate(traffic, chosen)
    salts = [target.salt for target in targets]
    decisions = asyncio.run(replayed(log, traffic, policy, fleet, settings, salts, monkeypatch))
    assert decisions == log.decisions
    assert len({target for _, target, _ in decisions}) >= REPLICAS
    assert "max_worker_requests" not in options or (simulated.sent_ns > simulated.arrival_ns).any()
    if "queue_size" in options:
        assert {"queue_full", "queue_timeout"} <= {what for _, what, _ in decisions}
    if "faults" in options:
        assert len(decisions) > len(traffic)


async def replayed(log, traffic, policy, fleet, settings, salts, monkeypatch):
    """The decisions of a router to which the events of `log` are reported."""
    own = Log(lambda request: request.parsed.fields["number"])
    driven = Driven(policy, fleet, settings, salts, monkeypatch)
    own.record(monkeypatch)
    # The driver serves its queue as soon as there is capacity; here it does when the simulator did.
    monkeypatch.setattr(driven.router, "wake", lambda: None)
    for name, subject, *details in log.events:
        detail = details[0] if details else None
        if name in ("serve", "tick"):
            driven.now_ns = subject
        elif isinstance(detail, int) and name != "learned":
            driven.now_ns = detail
        if name == "arrived":
            driven.arrived(traffic.request(subject))
        elif name == "learned":
            driven.learned(subject, int(traffic.prompt_tokens[subject]), detail)
        else:
            driven.replay(name, subject, detail)
    return own.decisions
