"""The same requests lead to the same choices in the simulator and in the router.

The simulator serves a workload and tells when each request came, was sent and where, saw its first token and ended. The
real router is then given the same events at the same times; all of it runs but the connections to workers.
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
from tokenyard.routing.load import preempts_by
from tokenyard.routing.policies import POLICIES
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.fleet.sim_router import SimRouter
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

ARRIVES, BEGINS, ENDS = range(3)
REPLICAS, ROOM = 4, 5
PREEMPTS_BY = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 1}
CASES = [(policy, "shared-prefix", 0, {}) for policy in POLICIES] + [
    ("predicted_ttft", "classes", ROOM, {}),
    ("predicted_ttft", "classes", ROOM, PREEMPTS_BY),
    ("least_load", "tenants", ROOM, {}),
]


class Driven:
    """A router in virtual time, without connections."""

    def __init__(self, policy, room, settings, salts, monkeypatch):
        self.now_ns = 0
        self.router = Router(RouterSettings(policy=policy, max_worker_requests=room or 256, queue_timeout_secs=1e6))
        self.router.now_ns = lambda: self.now_ns
        self.chosen, self.exchanges = {}, {}
        monkeypatch.setattr(Exchange, "_go", lambda exchange, target: self._sent(exchange, target))
        monkeypatch.setattr(self.router.health, "watch", lambda worker: None)
        for number, salt in enumerate(salts):
            worker = self.router.add_worker(f"http://127.0.0.1:{9000 + number}", "test")
            worker.targets[0].state.salt = salt
            worker.preempts_by = preempts_by(settings)
            self.router.workers.set_healthy(worker, True)

    def _sent(self, exchange, target):
        number = exchange.parsed.fields["number"]
        self.chosen[number] = (int(target.name[1:]), self.now_ns)

    def arrives(self, request):
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
        front = SimpleNamespace(fail=lambda error: None, end=lambda keep=True: None)
        self.exchanges[request.number] = self.router._data(front, incoming)

    def begins(self, number):
        self.router.machine.first_token(self.exchanges[number], self.now_ns)

    def end(self, number, prompt_tokens, cached_tokens):
        exchange = self.exchanges.pop(number)
        self.router.learn(exchange.parsed, exchange.sent, prompt_tokens, cached_tokens)
        exchange._close()


@pytest.mark.part(3)
@pytest.mark.parametrize(("policy", "kind", "room", "settings"), CASES)
def test_the_router_chooses_what_the_simulator_chose(policy, kind, room, settings, monkeypatch):
    traffic = synthetic(kind, 120, 40.0, seed=3)
    fleet = Fleet(max_worker_requests=room, queue_timeout_s=1e6)
    chosen = setup(settings={"disable_radix_cache": False, **settings}, replicas=REPLICAS, router=policy, fleet=fleet)
    targets = []
    add = SimRouter.add
    monkeypatch.setattr(
        SimRouter, "add", lambda self, *a: (add(self, *a), targets.extend(w.targets[0].state for w in self.workers))[0]
    )
    simulated = simulate(traffic, chosen)
    found = asyncio.run(replayed(simulated, policy, room, settings, [target.salt for target in targets], monkeypatch))
    served = range(len(traffic))
    assert [found[number] for number in served] == [
        (int(simulated.place[n]), int(simulated.sent_ns[n])) for n in served
    ]
    assert len({place for place, _ in found.values()}) == REPLICAS
    assert not room or (simulated.sent_ns > simulated.arrival_ns).any()


async def replayed(simulated, policy, room, settings, salts, monkeypatch):
    """Where and when the router sends each request, if all else happens as `simulated`."""
    driven, traffic = Driven(policy, room, settings, salts, monkeypatch), simulated.workload
    places = simulated.place.tolist()
    events = [(at_ns, ARRIVES, 0, number) for number, at_ns in enumerate(simulated.arrival_ns.tolist())]
    for what, times_ns in ((BEGINS, simulated.first_token_ns), (ENDS, simulated.finished_ns)):
        events += [(at_ns, what, places[number], number) for number, at_ns in enumerate(times_ns.tolist())]
    # At equal times arrivals come first, then the reports of each replica, one after the other.
    for at_ns, what, _, number in sorted(events, key=lambda one: (one[0], one[1] != ARRIVES, one[2], one[1], one[3])):
        driven.now_ns = at_ns
        if what == ARRIVES:
            driven.arrives(traffic.request(number))
            await asyncio.sleep(0)
        elif what == BEGINS:
            driven.begins(number)
        else:
            driven.end(number, int(traffic.prompt_tokens[number]), int(simulated.cached_tokens[number]))
            await asyncio.sleep(0)
    return driven.chosen
