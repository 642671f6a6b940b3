"""Speculative decoding in the simulator: what drafts bring and cost, by acceptance, load and targets."""

import io
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError
from tokenyard.sim.engine.speculation import NO_DRAFT, RIGHT, WRONG, DrawnMarks, RecordedMarks, Speculation
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.tape_workload import TapeHistory
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

ONE = workload((0.0, 64, 41))
SURE = Speculation(4, (1.0, 1.0))


def test_with_drafts_that_are_always_right_a_step_yields_one_token_more_than_it_verifies():
    found = simulate(ONE, setup(speculation=SURE))
    assert found.completion_tokens.tolist() == [41]
    # The prompt's step gives the first token, and each other step five.
    assert found.counters["steps"] == 1 + 8
    assert found.counters["accepted_draft_tokens"] == 32
    assert summary(found)["tokens_per_verify"] == 5.0


def test_wrong_drafts_are_soon_left_out():
    many = workload(*[(0.01 * index, 200, 200) for index in range(40)])
    plain, drafting = (simulate(many, setup(speculation=one)) for one in (None, Speculation(4, (0.0, 0.0))))
    assert drafting.counters["accepted_draft_tokens"] == 0
    assert drafting.counters["draft_tokens"] > 0
    assert drafting.sim_seconds == pytest.approx(plain.sim_seconds, rel=0.01)


def test_at_large_batches_no_draft_pays():
    burst = workload(*[(0.0, 16, 8) for _ in range(1000)])
    steps = []
    found = simulate(
        burst,
        setup(settings={"max_running_requests": 1000}, speculation=Speculation(4, (0.0, 0.0))),
        lambda begin, end, plan, work, core: steps.append((plan.chunks_from, plan.verify_rows)),
    )
    assert max(steps)[0] > 800
    assert not any(verify for rows, verify in steps if rows > 800)
    assert found.completion_tokens.tolist() == [8] * 1000


@pytest.mark.parametrize("overlap", [1, 2])
def test_as_many_drafts_are_right_as_the_model_says(overlap):
    requests = workload(*[(0.2 * index, 64, 400) for index in range(10)])
    found = simulate(requests, setup(settings={"max_in_flight": overlap}, speculation=Speculation(1, (0.6, 0.6))))
    assert found.completion_tokens.tolist() == [400] * 10
    assert found.counters["draft_tokens"] > 1000
    assert found.counters["accepted_draft_tokens"] / found.counters["draft_tokens"] == pytest.approx(0.6, abs=0.05)


def test_each_request_has_its_own_rate_and_only_some_tokens_have_drafts():
    marks = Speculation(4, (0.2, 0.9), coverage=0.5).marks(200, seed=3)
    assert isinstance(marks, DrawnMarks)
    numbers, indices = np.broadcast_arrays(np.arange(200)[:, None], np.arange(2000)[None])
    found = marks.at(numbers, indices)
    assert (found != NO_DRAFT).mean() == pytest.approx(0.5, abs=0.01)
    each = (found == RIGHT).sum(axis=1) / (found != NO_DRAFT).sum(axis=1)
    assert each.min() < 0.3 < 0.8 < each.max()
    assert each.mean() == pytest.approx(0.55, abs=0.05)


def test_recorded_acceptance_is_replayed_token_by_token():
    first, second = (np.array(marks, np.int8) for marks in ([RIGHT, WRONG, NO_DRAFT], [RIGHT]))
    marks = RecordedMarks((first, second))
    index = np.arange(1, 8)
    assert marks.at(np.full(7, 4), index).tolist() == [RIGHT, WRONG, NO_DRAFT, RIGHT, WRONG, NO_DRAFT, RIGHT]
    assert marks.at(np.full(7, 5), index).tolist() == [RIGHT] * 7
    found = simulate(workload((0.0, 64, 31)), setup(speculation=Speculation(4, recorded=(first,))))
    # A verifying step yields the right draft and the token in place of the wrong one; the third has no draft.
    assert found.counters["steps"] == 1 + 20
    assert found.counters["accepted_draft_tokens"] == found.counters["verify_rows"] == 10


def test_the_time_of_a_draft_model_counts():
    slow = replace(SURE, draft_s=1.0)
    quick, slowed = (simulate(ONE, setup(speculation=one)) for one in (SURE, slow))
    assert slowed.sim_seconds - quick.sim_seconds == pytest.approx(9.0, abs=1.1)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2}, {"schedule_policy": "slo"}])
def test_a_run_is_the_same_again_and_its_tape_replays(settings):
    requests = synthetic("tenants", 60, 20.0, 1)
    chosen = setup(settings={**settings, "slo_tpot_ms": 8.0}, speculation=Speculation(4, (0.3, 0.9), 0.8))
    tape = io.BytesIO()
    first = simulate(requests, chosen, tape=tape)
    assert first.counters["accepted_draft_tokens"] > 0
    assert simulate(requests, chosen).decision_hash == first.decision_hash
    assert replay(Tape(tape.getvalue(), "sim")).difference is None


def test_under_slo_drafts_go_to_the_requests_that_need_them():
    requests = workload(*[(0.0, 16, 40) for _ in range(1000)])
    requests = replace(requests, slo_tpot_s=np.where(np.arange(1000) % 100 == 0, 0.02, 10.0))
    chosen = {"max_running_requests": 1000, "slo_ttft_ms": 60_000.0}
    drafts = Speculation(6, (0.5, 0.5))
    tight = {
        policy: simulate(requests, setup(settings={**chosen, "schedule_policy": policy}, speculation=drafts))
        for policy in ("fcfs", "slo")
    }
    found = {policy: (outcome.tpot_s[::100].mean(), outcome.met.mean()) for policy, outcome in tight.items()}
    assert found["slo"][0] < 0.8 * found["fcfs"][0]
    assert found["slo"][1] == 1.0 > found["fcfs"][1]


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"tokens": 65}, {"acceptance": (0.9, 0.3)}, {"coverage": 1.5}, {"draft_s": -1.0}]
)
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        Speculation(**{"tokens": 4, **wrong})


@pytest.mark.part(2)
@pytest.mark.parametrize("overlap", [1, 2])
def test_acceptance_recorded_on_a_tape_serves_the_same_requests_alike(overlap):
    """Each request has its own rate, so that the mean alone would not do."""
    requests = workload(*[(0.01 * index, 64, 150) for index in range(20)])
    chosen = setup(settings={"max_in_flight": overlap}, speculation=Speculation(4, (0.1, 0.95), coverage=0.7))
    tape = io.BytesIO()
    was = simulate(requests, chosen, tape=tape)
    origin = Tape(tape.getvalue(), "sim").header.origin
    history = TapeHistory(origin)
    assert replay(Tape(tape.getvalue(), "sim"), history).difference is None
    again = simulate(requests, replace(chosen, speculation=history.speculation))
    assert again.counters["accepted_draft_tokens"] == pytest.approx(was.counters["accepted_draft_tokens"], rel=0.05)
    assert again.sim_seconds == pytest.approx(was.sim_seconds, rel=0.03)
    plain = io.BytesIO()
    simulate(requests, replace(chosen, speculation=None), tape=plain)
    history = TapeHistory(origin)
    replay(Tape(plain.getvalue(), "sim"), history)
    assert history.speculation is None
