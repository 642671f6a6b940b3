"""Routers in front of simulated replicas, and what goes wrong in a fleet."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup
from tokenyard.base import ConfigError
from tokenyard.routing.registry import POLICIES
from tokenyard.sim.fleet.fleet_settings import Fault, Fleet
from tokenyard.sim.fleet.sim_router import SimRouting
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.prompt_ids import TokenContent
from tokenyard.sim.traces.synthetic import synthetic

CACHED = {"disable_radix_cache": False}


def fleet(router="predicted_ttft", replicas=3, **options):
    return setup(settings=CACHED, replicas=replicas, router=router, fleet=Fleet(**options))


@pytest.mark.part(3)
@pytest.mark.parametrize("router", sorted(POLICIES))
def test_every_policy_of_the_router_serves_every_request_and_repeats(router):
    traffic = synthetic("multi-turn", 60, 10.0, seed=2)
    one, again = (simulate(traffic, fleet(router)) for _ in range(2))
    assert one.served.all()
    assert one.decision_hash == again.decision_hash
    assert set(one.replica.tolist()) == {0, 1, 2}


def test_the_routers_predictions_are_close_to_what_happens():
    outcome = simulate(synthetic("shared-prefix", 150, 10.0, seed=1), fleet())
    assert outcome.predicted_cached_tokens == pytest.approx(outcome.cached_tokens.sum(), rel=0.15)


def test_requests_of_a_replica_that_dies_are_served_elsewhere():
    traffic = synthetic("plain", 120, 30.0, seed=1)
    calm = simulate(traffic, fleet())
    killed = simulate(traffic, fleet(faults=(Fault(1.5, 1, 1.0),)))
    assert killed.served.all()
    during = (killed.arrival_ns > 1.5e9) & (killed.arrival_ns < 2.5e9)
    assert during.any()
    assert not (killed.replica[during] == 1).any()
    assert (killed.replica[killed.arrival_ns > 2.5e9] == 1).any()
    assert (killed.first_token_ns >= killed.arrival_ns).all()
    assert killed.e2e_s.max() >= calm.e2e_s.max()


def test_a_replica_can_join_later():
    outcome = simulate(synthetic("plain", 120, 30.0, seed=1), fleet(faults=(Fault(0.0, 2, 2.0),)))
    early = outcome.arrival_ns < 2e9
    assert not (outcome.replica[early] == 2).any()
    assert (outcome.replica[~early] == 2).any()


def test_a_slow_replica_gets_fewer_requests_by_predicted_ttft():
    traffic = synthetic("plain", 300, 40.0, seed=1)
    slow = (Fault(0.0, 0, 1e6, 3.0),)
    aware, blind = (simulate(traffic, fleet(router, faults=slow)) for router in ("predicted_ttft", "round_robin"))
    assert np.count_nonzero(aware.replica == 0) < 0.8 * np.count_nonzero(blind.replica == 0)
    assert np.percentile(aware.ttft_s, 95) < np.percentile(blind.ttft_s, 95)


def test_several_routers_share_kv_events():
    traffic = synthetic("shared-prefix", 200, 20.0, seed=3)
    alone, informed = (
        simulate(traffic, fleet("cache_aware", routers=4, kv_event_lag_s=lag, replicas=4)) for lag in (None, 0.05)
    )
    assert informed.served.all()
    assert summary(informed)["prefix_hit_rate"] > summary(alone)["prefix_hit_rate"]


def test_lost_events_cost_no_request():
    traffic = synthetic("shared-prefix", 100, 20.0, seed=3)
    for loss in (0.3, 1.0):
        assert simulate(traffic, fleet(kv_event_lag_s=0.2, kv_event_loss=loss)).served.all()


@pytest.mark.parametrize("router", ["predicted_ttft", "round_robin"])
def test_one_shared_prompt_does_not_collapse(router):
    traffic = synthetic("shared-prefix", 240, 60.0, seed=1)
    share = np.bincount(simulate(traffic, fleet(router, replicas=4)).replica, minlength=4).max() / len(traffic)
    assert share <= 0.3


@pytest.mark.parametrize("options", [{"routers": 0}, {"kv_event_loss": 2.0}, {"kv_event_lag_s": -1.0}])
def test_fleets_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match="a fleet needs"):
        Fleet(**options)


def test_faults_must_name_a_replica():
    with pytest.raises(ConfigError, match="a replica that is not there"):
        simulate(synthetic("plain", 2, 1.0), fleet(faults=(Fault(0.0, 7, 1.0),)))


def test_first_tokens_are_seen_when_they_arrive(monkeypatch):
    """What the router learns from, and what the client sees, is the first token and not the admission."""
    seen = {}
    note = SimRouting.first_token

    def noted(routing, number, cached, now):
        seen.setdefault(number, now)
        note(routing, number, cached, now)

    monkeypatch.setattr(SimRouting, "first_token", noted)
    outcome = simulate(synthetic("plain", 60, 20.0, seed=1), fleet())
    assert [seen[i] for i in range(60)] == outcome.first_token_ns.tolist()
    assert (outcome.first_token_ns > outcome.admitted_ns).all()


@pytest.mark.part(2)
@pytest.mark.parametrize("router", ["predicted_ttft", "cache_aware"])
def test_prompts_that_never_begin_alike_need_not_be_compared(router):
    traffic = synthetic("plain", 60, 40.0, seed=3)
    known = TokenContent([traffic.request(number).prompt_ids for number in range(len(traffic))])
    fleet = Fleet(routers=2, faults=(Fault(0.3, 1, 0.4),), kv_event_lag_s=0.01)
    settings = {"disable_radix_cache": False, "headroom": "none"}
    kind = setup(settings=settings, replicas=3, router=router, kv_pool_tokens=12_000, fleet=fleet)
    one, other = (simulate(work, kind) for work in (traffic, replace(traffic, content=known)))
    assert one.retractions.any()
    assert one.decision_hash == other.decision_hash
    for column in ("status", "place", "sent_ns", "first_token_ns", "finished_ns", "cached_tokens"):
        assert (getattr(one, column) == getattr(other, column)).all()
