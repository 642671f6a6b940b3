"""The same requests at the same times: the ranks of an engine and the simulator's router, which chooses as the router
does, choose alike.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.routing.choices import Taped
from tokenyard.base import Request, SamplingParams
from tokenyard.routing.balance import LOAD_BALANCE_METHODS, RankBalancer
from tokenyard.routing.dispatch import PendingRequest, RequestFacts
from tokenyard.routing.load import TargetLoad, TtftModel
from tokenyard.routing.policies import prompt_key
from tokenyard.routing.prefix_index import token_prompt
from tokenyard.routing.registry import make_policy
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.fleet.sim_router import FleetLayout, SimRouter

RANKS, POOL = 4, 1 << 14


def traffic(seed=3, count=400):
    """Conversations that grow, at random times: (seconds, prompt, seconds to the first token, seconds to the end)."""
    rng, now = np.random.default_rng(seed), 0.0
    talks = [rng.integers(5, 900, 300).astype(np.int32) for _ in range(25)]
    for _ in range(count):
        now += float(rng.exponential(0.03))
        place = int(rng.integers(len(talks)))
        talks[place] = np.concatenate((talks[place], rng.integers(5, 900, 40).astype(np.int32)))
        first_s = float(rng.uniform(0.01, 0.2))
        yield now, talks[place], first_s, first_s + float(rng.exponential(1.0))


def drive(choose):
    """Give the traffic to `choose(number, prompt, now) -> count of the request`, with first tokens and ends between."""
    due = []
    for number, (now, prompt, first_s, end_s) in enumerate(traffic()):
        due.sort(key=lambda entry: entry[0])
        while due and due[0][0] <= now:
            at, tell = due.pop(0)
            tell(at)
        counted = choose(number, prompt, now)
        due.append((now + first_s, counted.first_token))
        due.append((now + end_s, lambda at, counted=counted: counted.end()))


def named_states():
    speed = TtftModel()
    return [TargetLoad(f"rank {rank}", speed) for rank in range(RANKS)]


def chosen_by_ranks(method):
    tape, balancer = [], RankBalancer(method, RANKS, POOL)
    balancer.policy = Taped(balancer.policy, tape)

    def choose(number, prompt, now):
        return balancer.choose(Request(number, "", prompt, SamplingParams()), range(RANKS), now)

    drive(choose)
    return tape


def chosen_by_simulator(method):
    tape, router = [], SimRouter((method,), Fleet(), 0)
    router.add(FleetLayout(1, RANKS, True, 10**6, [POOL]))
    machine = router.machine
    machine.policy = Taped(machine.policy, tape)
    for target, named in zip(router.workers[0].targets, named_states(), strict=True):
        machine.index.remove_target(target.state.name)
        target.state.name, target.state.salt = named.name, named.salt
        machine.index.limit(named.name, POOL // 64)

    def choose(number, prompt, now):
        blocks = token_prompt(prompt)
        facts = RequestFacts(blocks, len(prompt), stream=True, key=prompt_key(blocks.digests))
        request = PendingRequest(facts)
        machine.arrived(request, round(now * 1e9))
        return request.sent

    drive(choose)
    return tape


@pytest.mark.parametrize("method", LOAD_BALANCE_METHODS)
def test_ranks_and_the_simulator_make_the_same_choices(method):
    tapes = chosen_by_ranks(method), chosen_by_simulator(method)
    assert len({choice.first for choice in tapes[0]}) == RANKS
    if not make_policy(method).needs_prefix:
        # A policy that does not look at prompts does not depend on how they are identified.
        tapes = tuple([replace(choice, key=0, matched=()) for choice in tape] for tape in tapes)
    for one, other in zip(*tapes, strict=True):
        assert one == other
