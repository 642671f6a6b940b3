"""Fleets in the simulator: how a file describes one, and that many schedulers behave like one at a time."""

import json

import numpy as np
import pytest

from tests.sim.small_workloads import setup
from tokenyard.base import NS_PER_S, ConfigError, TenantSettings
from tokenyard.sim.fleet.fleet_settings import Drain, Fault, Fleet, read_fleet
from tokenyard.sim.report.fleet_charts import POINTS, over_time
from tokenyard.sim.report.scheduler_figures import router_queue, worker_figures
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

CACHED = {"disable_radix_cache": False}


def file_of(tmp_path, text):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "settings", [CACHED, {"schedule_policy": "slo"}, {"max_in_flight": 2}, {"schedule_policy": "adaptive"}]
)
def test_a_fleet_of_one_is_the_single_engine(settings):
    traffic = synthetic("multi-turn", 80, 20.0, seed=2)
    alone = simulate(traffic, setup(settings=settings))
    # A change of the fleet that changes nothing puts a router in front.
    fleet = simulate(traffic, setup(settings=settings, fleet=Fleet(queue_size=5000)))
    assert fleet.decision_hash == alone.decision_hash
    for column in ("admitted_ns", "first_token_ns", "finished_ns", "cached_tokens", "status"):
        assert (getattr(fleet, column) == getattr(alone, column)).all(), column


def test_ranks_that_the_router_sees_are_replicas():
    traffic = synthetic("shared-prefix", 200, 40.0, seed=1)
    replicas = simulate(traffic, setup(settings=CACHED, replicas=4, router="predicted_ttft"))
    ranks = simulate(traffic, setup(settings=CACHED, replicas=2, dp_size=2, router="predicted_ttft"))
    assert replicas.served.all()
    assert ranks.served.all()
    shares = np.bincount(ranks.place, minlength=4) / len(traffic)
    assert (shares > 0.15).all()
    assert set(ranks.replica.tolist()) == {0, 1}


def test_a_router_that_is_blind_to_ranks_finds_less_in_their_caches():
    traffic = synthetic("multi-turn", 200, 20.0, seed=1)
    blind, aware = (
        simulate(
            traffic,
            setup(
                settings=CACHED,
                dp_size=8,
                router="predicted_ttft",
                fleet=Fleet(dp_aware=dp_aware, load_balance_method="round_robin"),
            ),
        )
        for dp_aware in (False, True)
    )
    assert aware.cached_tokens.sum() > 1.5 * blind.cached_tokens.sum()
    assert np.bincount(blind.place).max() - np.bincount(blind.place).min() <= 1


def test_requests_wait_at_the_router_for_room_and_the_urgent_ones_go_first():
    traffic = synthetic("classes", 200, 60.0, seed=1)
    fleet = Fleet(max_worker_requests=4, queue_aging_s=0.0)
    outcome = simulate(traffic, setup(replicas=2, router="least_load", fleet=fleet))
    waited_s = (outcome.sent_ns - outcome.arrival_ns) / 1e9
    urgent = traffic.priority == traffic.priority.max()
    sent = outcome.place >= 0
    assert sent[urgent].all()
    assert router_queue(outcome)["waited"] > 20
    assert waited_s[urgent].mean() < 0.5 * waited_s[~urgent & sent].mean()
    assert all(row["running"]["max"] <= 4 for row in worker_figures(outcome))


def test_a_full_queue_refuses_the_least_urgent_and_a_long_wait_ends():
    traffic = synthetic("plain", 200, 200.0, seed=1)
    full = simulate(traffic, setup(replicas=2, fleet=Fleet(max_worker_requests=2, queue_size=10)))
    refused = ~full.served
    assert refused.any()
    assert (full.place[refused] == -1).all()
    assert router_queue(full)["refused"] == refused.sum()
    late = simulate(traffic, setup(replicas=2, fleet=Fleet(max_worker_requests=2, queue_timeout_s=1.0)))
    given_up_s = ((late.finished_ns - late.arrival_ns) / 1e9)[~late.served]
    assert len(given_up_s)
    assert ((given_up_s >= 1.0) & (given_up_s <= 1.25)).all()


def test_tenants_share_the_queue_by_their_weights():
    traffic = synthetic("tenants", 400, 100.0, seed=1)
    heavy = traffic.tenants[int(np.bincount(traffic.tenant).argmax())]
    waits = {}
    for weight in (0.2, 20.0):
        fleet = Fleet(max_worker_requests=4, tenant_weights={heavy: weight})
        outcome = simulate(traffic, setup(replicas=2, fleet=fleet))
        of_heavy = traffic.tenant == traffic.tenants.index(heavy)
        waits[weight] = float(((outcome.sent_ns - outcome.arrival_ns) / 1e9)[of_heavy & (outcome.place >= 0)].mean())
    assert waits[20.0] < waits[0.2]


def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has():
    traffic = synthetic("plain", 200, 40.0, seed=1)
    outcome = simulate(traffic, setup(replicas=3, fleet=Fleet(drains=(Drain(1.0, 1, 2.0),))))
    sent_s = outcome.sent_ns / 1e9
    assert outcome.served.all()
    assert not (outcome.replica[(sent_s > 1.0) & (sent_s < 3.0)] == 1).any()
    assert (outcome.replica[sent_s > 3.0] == 1).any()
    assert outcome.finished_ns[outcome.replica == 1].min() / 1e9 < 3.0


def test_requests_wait_while_every_replica_is_dead():
    traffic = synthetic("plain", 60, 40.0, seed=1)
    outcome = simulate(traffic, setup(replicas=2, fleet=Fleet(faults=(Fault(0.5, 0, 2.0), Fault(0.5, 1, 2.0)))))
    assert outcome.served.all()
    assert not ((outcome.sent_ns > 0.5e9) & (outcome.sent_ns < 2.5e9)).any()
    assert [run.restarts for run in outcome.schedulers] == [1, 1]


def test_different_replicas_have_the_costs_and_pools_of_their_devices(tmp_path):
    fleet = read_fleet(file_of(tmp_path, "workers: {1: {device: a100}}"), "llama-3-8b")
    outcome = simulate(synthetic("plain", 120, 20.0, seed=1), setup(replicas=2, fleet=fleet))
    fast, slow = worker_figures(outcome)
    assert (fast["device"], slow["device"]) == ("h100/llama-3-8b", "a100/llama-3-8b")
    assert slow["busy"] > 1.5 * fast["busy"]


def test_a_fleet_is_read_from_a_file(tmp_path):
    text = """
    routers: 2
    dp_aware: false
    queue: {max_worker_requests: 24, tenant_weights: {gold: 4}}
    kv_events: {lag_s: 0.05, loss: 0.01}
    events:
      - {at_s: 8, kill: 1, for_s: 5}
      - {at_s: 4, slow: 2, factor: 3, for_s: 10}
      - {at_s: 10, drain: 0}
      - {at_s: 6, join: 3}
    """
    fleet = read_fleet(file_of(tmp_path, text), "llama-3-8b")
    assert (fleet.routers, fleet.dp_aware, fleet.max_worker_requests) == (2, False, 24)
    assert (fleet.kv_event_lag_s, fleet.kv_event_loss, fleet.tenant_weights) == (0.05, 0.01, {"gold": 4})
    assert fleet.faults == (Fault(8.0, 1, 5.0), Fault(4.0, 2, 10.0, 3.0), Fault(0.0, 3, 6.0))
    assert [drain.replica for drain in fleet.drains] == [0]
    as_json = read_fleet(file_of(tmp_path, json.dumps({"routers": 2})), "llama-3-8b")
    assert as_json == Fleet(routers=2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "no mapping"),
        ("{", "neither YAML nor JSON"),
        ("router: 2", "no 'router'; it has routers"),
        ("routers: two", "routers is 'two'"),
        ("routers: 0", "at least 1 router"),
        ("dp_aware: 1", "dp_aware is 1"),
        ("load_balance_method: best", "load_balance_method is 'best'"),
        ("queue: {size: 3}", "queue has no 'size'"),
        ("queue: {tenant_weights: {a: x}}", "the weight of a"),
        ("queue: {queue_timeout_s: 0}", "above 0"),
        ("kv_events: {lag_s: -1}", "lag that is not negative"),
        ("events: [{at_s: 1}]", "an event is one of"),
        ("events: [{at_s: 1, kill: 0, slow: 1}]", "an event is one of"),
        ("events: [{at_s: soon, kill: 0}]", "at_s is 'soon'"),
        ("events: [{at_s: .nan, kill: 0}]", "at_s is nan"),
        ("events: [{at_s: 1, kill: zero}]", "a worker is a number"),
        ("events: [{at_s: 1, kill: 0, for_s: 0}]", "length above 0"),
        ("events: [{at_s: 1, slow: 0, factor: 0}]", "the factor of an event"),
        ("events: {at_s: 1}", "a list of mappings"),
        ("workers: {1: a100}", "a worker is {device"),
        ("workers: {1: {device: abacus}}", "no data sheet of device"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_fleet(file_of(tmp_path, text), "llama-3-8b")
    assert "\n" not in caught.value.message


def test_the_numbers_of_a_fleet_name_its_workers():
    numbers = fleet_summary(simulate(synthetic("plain", 40, 20.0), setup(replicas=2)))
    assert [row["name"] for row in numbers["workers"]] == ["r0", "r1"]
    assert sum(row["requests"] for row in numbers["workers"]) == 40
    assert "workers" not in fleet_summary(simulate(synthetic("plain", 10, 20.0), setup()))


def test_a_queue_over_time_is_its_largest_in_each_part():
    begin, end = np.array([0, 0, 4 * NS_PER_S], np.int64), np.array([2, 1, 5], np.int64) * NS_PER_S
    at_s, counts = over_time(begin, end, np.ones(3, bool), 6.0)
    assert len(at_s) == len(counts) == POINTS
    observed = {second: counts[int(second / 6.0 * POINTS)] for second in (0.5, 1.5, 3.0, 4.5, 5.5)}
    assert observed == {0.5: 2.0, 1.5: 1.0, 3.0: 0.0, 4.5: 1.0, 5.5: 0.0}


RATE, BURST = 2000.0, 1000


@pytest.mark.slow
@pytest.mark.parametrize("dp_aware", [True, False])
def test_a_rate_is_that_of_the_engine_and_not_of_each_rank(dp_aware):
    traffic = synthetic("tenants", 50, 100.0, seed=1)
    tenants = {"*": TenantSettings(tokens_per_s=RATE, burst_tokens=BURST, max_running=4)}
    chosen = setup(settings={"tenants": tenants}, dp_size=4, router="predicted_ttft", fleet=Fleet(dp_aware=dp_aware))
    outcome = simulate(traffic, chosen)
    assert outcome.served.all()
    assert (np.bincount(outcome.place, minlength=4) > 5).all()
    for number in range(len(traffic.tenants)):
        own = traffic.tenant == number
        tokens = int((traffic.prompt_tokens + traffic.output_tokens)[own].sum())
        last_s = outcome.admitted_ns[own].max() / NS_PER_S
        # What was admitted before the last one is paid for, but for what the requests that may run still owe.
        owed = 5 * int((traffic.prompt_tokens + traffic.output_tokens)[own].max())
        assert tokens <= BURST + RATE * last_s + owed


def test_a_request_is_refused_only_when_no_rank_has_room():
    traffic = synthetic("plain", 60, 1000.0, seed=1)
    settings = {"max_running_requests": 4, "max_queued_requests": 4}
    fleet = Fleet(max_worker_requests=1000)
    outcome = simulate(traffic, setup(settings=settings, dp_size=4, router="random", fleet=fleet))
    assert outcome.counters["submitted"] == 60
    assert outcome.counters["rejected"] == (~outcome.served).sum()
    first = np.flatnonzero(~outcome.served)[0]
    assert first >= 8, "all places and all of the queue are taken first"


def test_the_deprecated_key_of_the_assumed_pool_is_accepted_with_a_warning(tmp_path, caplog):
    fleet = read_fleet(file_of(tmp_path, "believed_pool_tokens: 4000"), "llama-3-8b")
    assert fleet.assumed_pool_tokens == 4000
    assert "believed_pool_tokens is deprecated" in caplog.text
    with pytest.raises(ConfigError, match="believed_pool_tokens"):
        read_fleet(file_of(tmp_path, "{believed_pool_tokens: 1, assumed_pool_tokens: 2}"), "llama-3-8b")
    (renamed,) = caplog.messages
    assert renamed.endswith("use assumed_pool_tokens")
