"""The same requests lead to the same ranks in the simulator and in the engine.

The simulator serves a workload with one engine of several ranks and tells where each request went, which ranks refused
it first, and when it began and ended. The engine's front is then given the same events at the same times; all of it
runs but the processes of the schedulers.
"""

import asyncio
from types import SimpleNamespace

import pytest

from tests.engine.test_placing import Wires, batch, submits
from tests.sim.small_workloads import setup
from tokenyard.base import Finish, SamplingParams, TenantSettings, TextOptions
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend import data_parallel_controller as ranks
from tokenyard.engine.frontend import streams, tokenizer_manager
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.messages import Heartbeat
from tokenyard.engine.text.chat_template import ChatTemplate
from tokenyard.routing.balance import LOAD_BALANCE_METHODS, RankBalancer
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.outcome import executor_info
from tokenyard.sim.traces.synthetic import synthetic

RANKS = 4
LIMITS = {"*": TenantSettings(max_running=2, max_queued=9)}
CASES = [(method, True, {}) for method in LOAD_BALANCE_METHODS]
CASES += [("predicted_ttft", dp_aware, {"tenants": LIMITS}) for dp_aware in (True, False)]
CASES += [("shortest_queue", False, {"max_queued_requests": 8, "max_running_requests": 8})]
CASES += [("predicted_ttft", False, {"enable_priority_scheduling": True})]


def target_of(run, number):
    """The rank that the router has chosen."""
    return run.routing.open_calls[number].target.rank or 0


class Simulated:
    """What the simulator reports about one run: (time, what, number of the request, scheduler, more)."""

    def __init__(self, monkeypatch, traffic, chosen):
        self.events = []
        self._note(
            monkeypatch,
            "_forward",
            lambda run, request, number, now: (now, "sent", request.number, number, target_of(run, request.number)),
        )
        self._note(
            monkeypatch,
            "_note_finish",
            lambda run, number, finish: (finish.finished_ns, "ended", finish.number, number, finish),
        )
        run = Simulation(traffic, chosen)
        routing = run.routing
        begin = routing.first_token

        def first_token(number, cached, now):
            self.events.append((now, "begun", number, routing.open_calls[number].scheduler, cached))
            begin(number, cached, now)

        for unit in run.units:
            unit.replica.started = first_token
        for _ in run.until_end():
            pass
        self.outcome = run.outcome()
        # What reaches the simulator after it happened reaches the engine when it happens.
        self.events.sort(key=lambda event: event[0])

    def _note(self, monkeypatch, name, event):
        original = getattr(Simulation, name)

        def noted(run, *args):
            self.events.append(event(run, *args))
            original(run, *args)

        monkeypatch.setattr(Simulation, name, noted)


@pytest.mark.part(5)
@pytest.mark.parametrize(("method", "blind", "settings"), CASES)
def test_the_engine_chooses_the_ranks_that_the_simulator_chose(method, blind, settings, monkeypatch):
    traffic = synthetic("tenants" if "tenants" in settings else "classes", 120, 30.0, seed=3)
    fleet = Fleet(dp_aware=not blind, load_balance_method=method, max_worker_requests=1000)
    chosen = setup(
        settings={"disable_radix_cache": False, **settings}, dp_size=RANKS, router="round_robin", fleet=fleet
    )
    simulated = Simulated(monkeypatch, traffic, chosen)
    found = asyncio.run(replayed(simulated, traffic, method, chosen, blind, monkeypatch))
    sent = [(number, rank) for _, what, number, rank, *_ in simulated.events if what == "sent"]
    assert sorted(found) == sorted(sent)
    assert len({rank for _, rank in sent}) == RANKS
    assert len(sent) > len(traffic) or not ("tenants" in settings or "max_queued_requests" in settings)


async def replayed(simulated, traffic, method, chosen, blind, monkeypatch):
    """(number of the request, rank) of all that the engine sends, if all else happens as `simulated`."""
    clock = SimpleNamespace(ns=0)
    times = SimpleNamespace(monotonic=lambda: clock.ns / 1e9, monotonic_ns=lambda: clock.ns)
    for module in (ranks, streams, tokenizer_manager):
        monkeypatch.setattr(module, "time", times)
    wires, info = Wires(), executor_info(chosen)
    pool = chosen.profile.kv_pool_tokens
    balancer = RankBalancer(
        method, RANKS, pool // chosen.settings.page_size * chosen.settings.page_size, chosen.settings
    )
    manager = TokenizerManager(
        info, None, ChatTemplate({}, {}), wires, assembler=TextAssembler(None), balancer=balancer
    )
    for rank in range(RANKS):
        manager.failover.rank_ready(rank, rank)
        manager.outputs.receive(Heartbeat(2**62, "idle", 0, 0, {}), rank)
    found, numbers, readers = [], {}, {}

    def look():
        for rank, messages in wires.sent.items():
            for request in submits(messages):
                found.append((int(request.rid), rank))
                numbers[int(request.rid)] = request.number
            messages.clear()

    try:
        for now, what, number, rank, *more in simulated.events:
            clock.ns = now
            if what == "sent" and number not in readers:
                wanted = None if blind else more[0]
                readers[number] = asyncio.create_task(read(manager, traffic.request(number), wanted))
            elif what == "begun":
                manager.outputs.receive(batch(numbers[number], [5], started=True, hit=more[0]), rank)
            elif what == "ended":
                end = more[0]
                finish = Finish(numbers[number], end.reason, cause=end.cause, first_token_ns=end.first_token_ns)
                manager.outputs.receive(batch(numbers[number], finish=finish), rank)
            for _ in range(6):
                await asyncio.sleep(0)
            look()
            while number not in numbers:
                assert not readers[number].done(), readers[number].exception()
                await asyncio.sleep(0)
                look()
        return found
    finally:
        for reader in readers.values():
            reader.cancel()
        await manager.close()


async def read(manager, request, rank):
    sampling = SamplingParams(max_new_tokens=10**4, ignore_eos=True)
    spec = GenerateReqInput(
        input_ids=request.prompt_ids.tolist(),
        sampling=sampling,
        text_options=TextOptions(stream=True),
        rid=str(request.number),
        tenant=request.tenant,
        priority=request.priority,
        rank=rank,
    )
    async for _ in manager.generate(spec):
        pass
