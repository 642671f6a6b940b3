"""PD disaggregation in virtual time: the engines' protocol, and KV accounting that is right at the end."""

import json

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import NS_PER_S, ConfigError
from tokenyard.cli.main import main
from tokenyard.disagg.protocol import Timeouts
from tokenyard.sim.fleet.fleet_settings import Fault, Fleet, ProcessStop
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.kv.links import LinkDirection, LinkScheduler
from tokenyard.sim.kv.transfer_figures import transfer_figures
from tokenyard.sim.planner.trial import FleetOption
from tokenyard.sim.traces.synthetic import synthetic

CACHED = {"disable_radix_cache": False, "schedule_policy": "slo", "page_size": 16}
SHORT = Timeouts(lease_ns=NS_PER_S, beat_ns=NS_PER_S // 5, silence_ns=3 * NS_PER_S // 5, admission_ns=2 * NS_PER_S)


def served(traffic, disagg, observer=None, **changes):
    """The run and its outcome; every answer is whole and nothing is left over."""
    changes = {"settings": CACHED, "replicas": 2, "router": "least_load"} | changes
    run = Simulation(traffic, setup(disagg=disagg, **changes), observer)
    for _ in run.until_end():
        pass
    outcome = run.outcome()
    assert outcome.served.all()
    assert (outcome.completion_tokens == traffic.output_tokens).all()
    assert run.kv is not None
    assert not any(run.kv.at_rest().values()), run.kv.at_rest()
    for unit in run.units:
        memory = unit.replica.scheduler.state.memory
        assert not memory.holds
        assert unit.replica.scheduler.flush(unit.replica.now)
        assert memory.allocator.available == memory.num_pages
    return run, outcome


def test_every_prompt_is_computed_elsewhere_and_its_kv_is_sent_over_the_link():
    traffic = workload((0.0, 8000, 20), (0.1, 16_000, 20), (5.0, 4000, 1))
    _, outcome = served(traffic, DisaggSettings(1, link_gbit=10.0))
    moved = outcome.transfers
    assert (moved.prefill == 2).all()
    carried_s = (moved.end_ns - moved.begin_ns)[:2] / 1e9
    kv_bytes = outcome.setup.profile.kv_bytes_per_token
    assert carried_s == pytest.approx(np.array([8000, 16_000]) * kv_bytes * 8 / 10e9, rel=0.01)
    # The first token does not wait for the KV, the second one does.
    assert outcome.ttft_s[1] < carried_s[1]
    assert (outcome.finished_ns > moved.arrived_ns).all()
    # An answer of one token is complete before any KV moves.
    assert moved.end_ns[2] == 0
    assert transfer_figures(moved, outcome.sim_seconds)["transferred"] == 2


class Links:
    """Sends KV and keeps the last reported begin and end of each transfer."""

    def __init__(self) -> None:
        self.traffic, self.times = LinkScheduler(), {}

    def carry(self, out: LinkDirection, into: LinkDirection, num_bytes: int, now: int):
        def ends(transfer) -> None:
            self.times[transfer] = (transfer.begin_ns, transfer.end_ns)

        return self.traffic.carry(out, into, num_bytes, now, ends)


def test_a_link_carries_one_transfer_after_the_other():
    links, out, slow, free = Links(), LinkDirection.of(1e9), LinkDirection.of(1e9), LinkDirection.of(1e9)
    wires = ((out, slow, 0), (LinkDirection.of(1e9), slow, 200), (out, slow, 200), (out, free, 200))
    for source, target, now in wires:
        links.carry(source, target, 1000, now)
    # What waits for a receiver does not hold up the sender's next transfer.
    assert list(links.times.values()) == [(0, 1000), (1000, 2000), (2000, 3000), (2000, 3000)]


def test_a_stopped_transfer_leaves_the_links_to_those_behind_it():
    links, out, into, other = Links(), LinkDirection.of(1e9), LinkDirection.of(1e9), LinkDirection.of(1e9)
    first = links.carry(out, into, 1000, 0)
    second, third = links.carry(out, into, 1000, 0), links.carry(out, other, 1000, 0)
    links.traffic.stop(first, 400)
    assert links.times == {first: (0, 1000), second: (400, 1400), third: (1400, 2400)}
    assert (out.busy_ns, out.moved_bytes) == (into.busy_ns + 1000, into.moved_bytes + 1000) == (2400, 2400)
    # One that has not begun leaves no trace.
    links.traffic.stop(second, 400)
    links.traffic.stop(second, 400)
    assert links.times[third] == (400, 1400)
    assert (into.busy_ns, into.moved_bytes, into.free_ns, other.free_ns) == (400, 400, 400, 1400)
    # Nothing begins before it is asked for, and what is through stays.
    late = links.carry(out, into, 1000, 1300)
    links.traffic.stop(third, 5000)
    assert links.times[late] == (1400, 2400)
    links.traffic.stop(late, 2400)
    assert out.busy_ns == 400 + 1000 + 1000


def test_a_read_that_is_given_up_does_not_hold_up_the_next_one():
    traffic = workload((0.0, 16_000, 20), (1.6, 2000, 20))
    _, outcome = served(traffic, DisaggSettings(1, link_gbit=5.0, terms=SHORT), replicas=1)
    moved = outcome.transfers
    found = transfer_figures(moved, outcome.sim_seconds)
    assert (found["transferred"], found["failed"]) == (1, {"reading for too long": 1})
    assert outcome.transfers.moved_tokens == 2000


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["decode", "both"])
def test_steps_one_by_one_make_the_same_plans(mode):
    traffic = synthetic("multi-turn", 60, 30.0, seed=2)
    disagg = DisaggSettings(1, mode=mode, link_gbit=25.0)
    _, fast = served(traffic, disagg, replicas=1)
    _, slow = served(traffic, disagg, lambda *_: None, replicas=1)
    assert fast.decision_hash == slow.decision_hash
    assert (fast.finished_ns == slow.finished_ns).all()


def test_in_mode_both_an_engine_asks_only_when_it_is_busy():
    calm = workload(*((float(i), 4000, 10) for i in range(10)))
    busy = workload(*((0.01 * i, 4000, 10) for i in range(60)))
    assert transfer_figures(served(calm, DisaggSettings(1, mode="both"))[1].transfers, 1.0)["asked"] == 0
    asked = served(busy, DisaggSettings(1, mode="both"))[1].transfers.prefill >= 0
    assert 0 < asked.sum() < 60


def test_in_mode_both_what_a_prompt_costs_the_decodes_counts():
    decodes = [(0.001 * i, 60, 2000) for i in range(200)]
    traffic = workload(*decodes, (3.0, 4000, 10))
    asked = served(traffic, DisaggSettings(1, mode="both", link_gbit=400.0), replicas=1)[1].transfers.prefill >= 0
    assert asked.tolist() == [False] * 200 + [True], "nothing waits here, and yet it is faster there"


FAULTS = {
    "a prefill engine dies": (Fleet(faults=(Fault(1.0, 2, 2.0),)), {}),
    "both prefill engines die": (Fleet(faults=(Fault(1.0, 2, 2.0), Fault(1.2, 3, 30.0))), {}),
    "a decode engine dies": (Fleet(faults=(Fault(1.0, 0, 2.0),)), {}),
    "a prefill engine joins later": (Fleet(faults=(Fault(0.0, 3, 1.5),)), {}),
    "a prefill engine stops": (Fleet(stops=(ProcessStop(1.0, 2, 3.0),)), {}),
    "a decode engine stops beyond its lease": (Fleet(stops=(ProcessStop(1.0, 0, 3.0),)), {}),
    "messages are lost": (Fleet(), {"lost": 0.2}),
    "messages come twice": (Fleet(), {"doubled": 0.5}),
    "KV events and two routers": (Fleet(routers=2, kv_event_lag_s=0.01, max_worker_requests=4), {}),
}


@pytest.mark.part(10)
@pytest.mark.parametrize("mode", ["decode", "both"])
@pytest.mark.parametrize("what", FAULTS)
def test_whatever_fails_every_answer_is_whole(what, mode):
    fleet, more = FAULTS[what]
    traffic = workload(*((0.02 * i, 3000 + 40 * i, 5 + i % 30) for i in range(80)))
    disagg = DisaggSettings(2, mode=mode, link_gbit=20.0, terms=SHORT, **more)
    _, outcome = served(traffic, disagg, fleet=fleet)
    failed = transfer_figures(outcome.transfers, 1.0)["failed"]
    if mode == "decode" and "prefill engine dies" in what:
        assert failed["connection lost"] > 0
    if mode == "decode" and "stops" in what:
        assert failed


@pytest.mark.slow
def test_a_run_with_faults_repeats_itself():
    traffic = synthetic("shared-prefix", 80, 40.0, seed=3)
    disagg = DisaggSettings(2, link_gbit=10.0, lost=0.1, doubled=0.1, terms=SHORT)
    fleet = Fleet(faults=(Fault(0.5, 2, 1.0),))
    one, two = (served(traffic, disagg, fleet=fleet)[1] for _ in range(2))
    assert one.decision_hash == two.decision_hash


def test_the_command_shows_both_sides(tmp_path, capsys):
    out, page = tmp_path / "out.json", tmp_path / "report.html"
    words = "simulate --synthetic plain --limit 40 --prefill-replicas 1 --link-gbit 10 --schedule-policy slo"
    assert main([*words.split(), "--json", str(out), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "links of 10 Gbit/s" in shown
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["workers"]] == ["r0", "p0"]
    assert found["transfers"]["transferred"] == found["transfers"]["asked"] == 40
    assert found["transfers"]["links"][1]["sent_bytes"] == found["transfers"]["links"][0]["received_bytes"] > 0
    assert "p0" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prefill-replicas -1", "--prefill-replicas"),
        ("--prefill-replicas 1 --link-gbit 0", "--link-gbit"),
        ("--prefill-replicas 1 --dp-size 2", "--dp-size"),
    ],
)
def test_wrong_numbers_are_refused_in_a_line(words, says, capsys):
    assert main(["simulate", "--synthetic", "plain", "--limit", "5", *words.split()]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(ConfigError):
        DisaggSettings(1, mode="neither")


def test_a_share_of_a_planned_fleet_prefills():
    option = FleetOption(setup(settings=CACHED, disagg=DisaggSettings(1)), "slo", None, 8, prefill_share=0.25)
    sizes = {count: option.fleet(count) for count in (1, 2, 4, 8)}
    assert sizes[1].disagg is None
    assert [(sizes[n].replicas, sizes[n].disagg.prefill_replicas) for n in (2, 4, 8)] == [(1, 1), (3, 1), (6, 2)]
    assert [sizes[count].engines for count in (1, 2, 4, 8)] == [option.devices(count) for count in (1, 2, 4, 8)]
