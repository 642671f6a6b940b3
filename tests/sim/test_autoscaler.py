"""Autoscalers: rules, delays and money, and that engines which come and go lose no request."""

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError
from tokenyard.sim.fleet.autoscaler import (
    RULES,
    Autoscale,
    Autoscaler,
    EngineLoad,
    FleetLoad,
    autoscale,
)
from tokenyard.sim.fleet.fleet_settings import Fault, Fleet, read_fleet
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionOptions, SessionRecord, Turn
from tokenyard.sim.traces.synthetic import synthetic

IDLE, BUSY = EngineLoad(0, 0, 0.0), EngineLoad(20, 30, 0.95)


def load(*engines, starting=0, queued=0, now_s=1000.0, arrivals=0, attainment=None):
    return FleetLoad(now_s, engines, starting, queued, arrivals, attainment)


@pytest.mark.parametrize(
    ("rule", "seen", "wanted"),
    [
        ("queue", load(EngineLoad(0, 33, 0.1)), 3),
        ("queue", load(IDLE), 0),
        ("keda", load(EngineLoad(5, 30, 0.5)), 1),  # within a tenth of its target
        ("keda", load(EngineLoad(12, 30, 0.5)), 3),
        ("keda", load(EngineLoad(500, 30, 0.5)), 5),  # at most four more in one interval
        ("keda", load(queued=1), 1),
        ("keda", load(), 0),
        ("llm-d", load(BUSY, BUSY), 3),
        ("llm-d", load(BUSY, BUSY, starting=1), 3),  # waits for the one on its way
        ("llm-d", load(EngineLoad(0, 9, 0.3), EngineLoad(0, 9, 0.3)), 1),
        ("llm-d", load(EngineLoad(0, 9, 0.4), EngineLoad(0, 9, 0.4)), 2),  # one alone would be at 0.8
        ("llm-d", load(BUSY, EngineLoad(0, 9, 0.5)), 2),  # the others are full: no one can spare its engine
        ("llm-d", load(IDLE), 0),
        ("attainment", load(BUSY, BUSY, BUSY, BUSY, attainment=0.9), 5),
        ("attainment", load(BUSY, attainment=1.0), 1),
    ],
)
def test_what_a_rule_wants(rule, seen, wanted):
    assert autoscale(rule).make_rule()(seen) == wanted


def test_a_forecast_looks_ahead_by_the_cold_start():
    rule = autoscale("forecast", target=1.0, start_s=60.0).make_rule()
    arrivals, wanted = 0, []
    for minute in range(5):
        wanted.append(rule(load(EngineLoad(0, 1, 0.1), now_s=60.0 * minute, arrivals=arrivals)))
        arrivals += 60 * (minute + 1)  # 1, 2, 3, 4 requests per second
    # At 240 s the last minute had 4 a second on average; the line is at 5.5 in 60 s.
    assert wanted[-1] == 6


def scaler(**changes):
    return Autoscaler(Autoscale(**{"rule": lambda _: 0, "start_s": 10.0, "stable_s": 30.0, **changes}), 4)


def test_an_engine_is_paid_for_from_its_start_to_its_end():
    one = scaler(initial_replicas=0, min_replicas=0)
    assert one.started(0, 100.0) == 110.0
    assert not one.ready(0, 105.0)
    assert one.ready(0, 110.0)
    one.closed(0, 200.0)
    one.ended(0, 230.0)
    assert one.finish(1000.0).engine_s == 130.0


def test_fewer_are_wanted_for_a_while_before_one_is_stopped_and_the_least_loaded_goes():
    wanted = iter([3, 1, 1, 1, 1])
    one = scaler(rule=lambda _: next(wanted), initial_replicas=3)
    engines = (EngineLoad(0, 5, 0.1), EngineLoad(0, 1, 0.1), EngineLoad(0, 3, 0.1))
    decisions = [one.decide(load(*engines, now_s=now_s)) for now_s in (100.0, 110.0, 120.0, 129.0, 131.0)]
    assert decisions[:4] == [([], [], [])] * 4
    assert decisions[4] == ([], [], [1, 2])


def test_an_engine_that_does_not_serve_yet_is_stopped_before_one_that_does():
    one = scaler(rule=lambda _: 1)
    one.started(1, 900.0)
    one.started(2, 900.0)
    assert one.decide(load(IDLE, starting=2)) == ([], [], [1, 2])


def test_a_draining_engine_is_opened_again_before_another_starts():
    one = scaler(rule=lambda _: 3, initial_replicas=2)
    one.closed(1, 5.0)
    start, again, close = one.decide(load(IDLE))
    assert (start, again, close) == ([2], [1], [])


def test_an_engine_that_died_while_it_started_is_not_ready():
    one = scaler(initial_replicas=0, min_replicas=0)
    one.started(0, 0.0)
    one.died(0, 4.0)
    assert not one.ready(0, 10.0)
    assert one.run.engine_s == 4.0
    one.repaired(0, 20.0)
    assert 0 in one.numbers("off")


@pytest.mark.parametrize("rule", RULES)
def test_no_request_is_lost_while_engines_come_and_go(rule):
    traffic = synthetic("bursts", 250, 12.0, seed=4)
    scale = autoscale(rule, start_s=5.0, every_s=2.0, stable_s=6.0, idle_s=4.0, min_replicas=0, price=3600.0)
    faults = (Fault(6.0, 0, 5.0),)
    fleet = Fleet(autoscale=scale, faults=faults)
    outcome = simulate(traffic, setup(settings={"disable_radix_cache": False}, replicas=3, fleet=fleet))
    assert outcome.served.all()
    figures = fleet_summary(outcome)["autoscaling"]
    assert figures["cost"] == pytest.approx(outcome.scaling.engine_s, abs=1e-2)
    assert figures["engine_hours"] * 3600.0 <= 3 * outcome.sim_seconds + 1.0
    assert max(ready + starting + draining for _, ready, starting, draining in outcome.scaling.timeline) <= 3


@pytest.mark.parametrize("dp_size", [1, 2])
def test_an_autoscaler_that_changes_nothing_only_watches(dp_size):
    traffic = workload(*((0.05 * number, 200, 400 + 37 * number % 300) for number in range(40)))
    watched = Autoscale(lambda _: 2, initial_replicas=2, every_s=1.7)
    plain, scaled = (
        simulate(traffic, setup(replicas=2, dp_size=dp_size, fleet=Fleet(max_worker_requests=6, autoscale=scale)))
        for scale in (None, watched)
    )
    assert scaled.finished_ns.tolist() == plain.finished_ns.tolist()
    assert scaled.decision_hash == plain.decision_hash


def test_from_zero_the_first_request_waits_for_the_cold_start():
    traffic = workload((20.0, 100, 10), (400.0, 100, 10))
    scale = autoscale("queue", min_replicas=0, initial_replicas=0, start_s=30.0, stable_s=60.0, idle_s=60.0)
    outcome = simulate(traffic, setup(replicas=2, fleet=Fleet(autoscale=scale)))
    # It comes at 20 s, is seen at 30 s and served at 60 s.
    assert outcome.ttft_s[0] == pytest.approx(40.0, abs=0.5)
    assert outcome.ttft_s[1] > 30.0
    assert outcome.scaling.starts == 2
    assert outcome.scaling.engine_s < 250.0


def test_a_cold_start_of_any_length_ends():
    # 0.1 + 0.2 is more than 0.3.
    scale = autoscale("queue", min_replicas=0, initial_replicas=0, every_s=0.1, start_s=0.2)
    outcome = simulate(workload((0.0, 100, 10)), setup(fleet=Fleet(autoscale=scale)))
    assert outcome.ttft_s[0] == pytest.approx(0.3, abs=0.1)
    assert fleet_summary(outcome)["autoscaling"]["starts"] == 1  # also of a fleet of one


def test_time_without_engines_counts_as_time():
    scale = autoscale("queue", min_replicas=0, start_s=120.0, stable_s=30.0, idle_s=30.0)
    outcome = simulate(workload((0.0, 100, 10), (1000.0, 100, 10)), setup(replicas=2, fleet=Fleet(autoscale=scale)))
    assert outcome.served.tolist() == [True, False]  # it waits at the router for a minute
    assert outcome.sim_seconds > 1000.0
    assert 0.0 < fleet_summary(outcome)["autoscaling"]["mean_replicas"] < 0.3


def test_nothing_starts_after_the_last_request():
    scale = autoscale("attainment", initial_replicas=1, every_s=2.0, stable_s=4.0)
    slow = setup(settings={"slo_ttft_ms": 0.001, "slo_ttft_scale": 0.0}, replicas=4, fleet=Fleet(autoscale=scale))
    outcome = simulate(workload((0.0, 100, 10)), slow)
    assert not outcome.met.any()
    assert (outcome.scaling.starts, outcome.scaling.engine_s) == (0, outcome.sim_seconds)


def test_first_tokens_of_later_turns_are_in_time():
    ids = np.arange(300, dtype=np.int32)
    turns = [Turn(100, 10, (), 0.0, ids=ids[:100]), Turn(200, 1000, (0,), 100.0, ids=ids[:200])]
    traffic = session_workload(SessionTrace("two turns", [SessionRecord("one", turns, 0.0)]), SessionOptions())
    seen = []
    scale = Autoscale(lambda load: seen.append(load.attainment) or 1, every_s=5.0)
    outcome = simulate(traffic, setup(replicas=2, fleet=Fleet(autoscale=scale)))
    assert outcome.met.all()
    assert [share for share in seen if share is not None] == [1.0, 1.0]


def test_a_fleet_without_an_autoscaler_has_none_of_its_figures():
    assert "autoscaling" not in fleet_summary(simulate(synthetic("plain", 20, 5.0, seed=0), setup(replicas=2)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("autoscale: {rule: qeue}", "did you mean queue"),
        ("autoscale: {rule: queue, tarjet: 3}", "has no 'tarjet'; it has rule, target"),
        ("autoscale: {tarjet: queue}", "has no 'tarjet'; it has rule, target"),
        ("autoscale: {rule: queue, target: 0}", "must be above 0"),
        ("autoscale: {every_s: 1.0e-12}", "every_s at least 0.001"),
        ("autoscale: {rule: attainment, target: 2}", "a share below 1"),
        ("autoscale: {start_s: soon}", "must be a number"),
        ("autoscale: {min_replicas: 1.5}", "min_replicas is 1.5; it must be a whole number"),
    ],
)
def test_a_wrong_autoscaler_in_a_file_is_refused(tmp_path, text, complaint):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_fleet(path, "llama-3-8b")


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(ConfigError, match="did you mean target"):
        autoscale("queue", tarjet=3)


@pytest.mark.parametrize(
    ("fleet", "complaint"),
    [
        (Fleet(autoscale=Autoscale(min_replicas=3)), "more engines than the fleet has"),
        (Fleet(autoscale=Autoscale(initial_replicas=3)), "more engines than the fleet has"),
        (Fleet(autoscale=Autoscale(), faults=(Fault(0.0, 1, 5.0),)), "leave out drain and join"),
    ],
)
def test_an_autoscaler_that_contradicts_its_fleet_is_refused(fleet, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fleet.check(2)


@pytest.mark.parametrize("changes", [{"start_s": float("nan")}, {"target": float("inf")}])
def test_numbers_of_an_autoscaler_are_finite(changes):
    with pytest.raises(ConfigError, match="must be finite"):
        autoscale("queue", **changes)


def test_a_file_may_leave_all_settings_of_an_autoscaler_to_their_defaults(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("autoscale: {}")
    assert read_fleet(path, "llama-3-8b").autoscale == autoscale("queue")
