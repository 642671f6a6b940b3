"""From a tape to a workload: arrivals, lengths, conversations, costs, and a simulation that comes close."""

import io
import json

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    NS_PER_S,
    Cancel,
    ConfigError,
    SamplingParams,
    SchedulerSettings,
    Slo,
    StepWork,
    StopFound,
    Update,
)
from tokenyard.cost import LinearCost, LinearTerms, get_profile
from tokenyard.executor.mock import MockExecutor
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.conversations import Conversations
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, stream_tokens
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.tape_workload import TapeHistory, write_trace
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import Replay

TRUTH = LinearCost(LinearTerms(1.0, 5.0, 2.0, 0.5, 0.002, 0.0005, row_ms=0.1))
NS_PER_MS = 1_000_000
ONE_STEP_S = 0.0065


class TimedYard(Yard):
    """A yard whose steps take their time, and whose scheduler is on tape."""

    def __init__(self, settings, info):
        executor = MockExecutor(info, TRUTH, sleep=False, check_kv=False)
        super().__init__(settings, info, executor=executor)
        self.file = io.BytesIO()
        self.scheduler = RecordingScheduler(Origin(settings, info), self.file, b"key", "test")

    def _check_pages(self, plan):
        """The recorder hides the pages."""
        self.reads.append({})

    def commit(self):
        if not self.tickets:
            return False
        result = self.executor.collect(self.tickets.popleft())
        self.reads.popleft()
        self.now += round(result.seconds * 1e9)
        self.scheduler.commit(result, self.now)
        self._collect()
        return True

    def turns(self, until):
        while self.now < until and (self.launch() or self.tickets):
            self.commit()
        self.now = max(self.now, until)

    def history(self):
        tape = Tape(self.file.getvalue(), "t")
        history = TapeHistory(tape.header.origin)
        run = Replay(tape, history, False)
        assert run.run().difference is None
        return history, run


def chat(yard, turns=3, users=6):
    """Conversations whose every turn repeats all that was said before."""
    yard.now = 10**9
    said = {user: [7] * 8 + [10 + user] * 5 for user in range(users)}
    for _ in range(turns):
        for user in range(users):
            sampling = SamplingParams(max_new_tokens=6 + user, temperature=0.0, ignore_eos=True, seed=user)
            own = {"slo": Slo(3 * NS_PER_S, 250 * NS_PER_MS), "deadline_ns": 9 * NS_PER_S} if user == 0 else {}
            asked = {"sampling": sampling, "arrival_ns": yard.now - 1000, "tenant": f"user {user}"}
            number = yard.submit(said[user], **asked, **own)
            yard.turns(yard.now + 40 * NS_PER_MS)
            said[user] = [*said[user], number]
        yard.run()
        for user, text in said.items():
            said[user] = text[:-1] + yard.tokens[text[-1]] + [20 + user] * 4


@pytest.fixture(scope="module")
def chatted():
    yard = TimedYard(SchedulerSettings(context_length=256), make_info(4096, 1, 32, 256))
    chat(yard)
    return yard, *yard.history()


def test_the_workload_is_what_was_asked(chatted):
    yard, history, _ = chatted
    workload = history.workload("t")
    assert len(workload) == len(yard.finished) == 18
    assert workload.output_tokens.tolist() == [6 + user for user in range(6)] * 3
    assert workload.max_new_tokens.tolist() == workload.output_tokens.tolist()
    assert workload.prompt_tokens.tolist()[:6] == [13] * 6
    arrivals = np.array([finish.arrival_ns for _, finish in sorted(yard.finished.items())])
    assert workload.arrival_s.tolist() == ((arrivals - arrivals[0]) / 1e9).tolist()
    assert len(set(workload.tenants) - {""}) == 6
    assert history.notes() == []


def test_a_simulation_with_fitted_costs_comes_close_to_what_happened(chatted):
    yard, history, run = chatted
    workload = history.workload("t")
    profile = history.profile()
    assert profile.error < 0.02
    setup = Setup(profile, run.scheduler.state.settings, host_s=history.host_s)
    lived = history.outcome(workload, setup, run.scheduler.snapshot(0).counters)
    played = simulate(workload, setup)
    assert np.median(played.tpot_s) == pytest.approx(np.median(lived.tpot_s), rel=0.05)
    assert np.median(played.e2e_s) == pytest.approx(np.median(lived.e2e_s), rel=0.05)
    assert np.abs(played.ttft_s - lived.ttft_s).max() < ONE_STEP_S  # who comes at its very end may just miss a step
    hits = [finish.cached_tokens for _, finish in sorted(yard.finished.items())]
    assert lived.cached_tokens.tolist() == hits
    assert played.cached_tokens.tolist() == hits
    assert sum(hits) > 300


def test_the_trace_file_simulates_like_the_tape(chatted, tmp_path):
    _, history, run = chatted
    workload = history.workload("t")
    write_trace(workload, tmp_path / "t.jsonl")
    again = read_trace(tmp_path / "t.jsonl", "tokenyard", ReadOptions())
    assert (again.priority == workload.priority).all()
    assert "priority" not in (tmp_path / "t.jsonl").read_text()
    setup = Setup(history.profile(), run.scheduler.state.settings)
    assert simulate(again, setup).decision_hash == simulate(workload, setup).decision_hash
    for one in (again, workload):
        targets = np.stack((one.slo_ttft_s, one.slo_tpot_s, one.deadline_s), axis=1)
        assert (targets[one.tenant == one.tenant[0]] == [3.0, 0.25, 9.0]).all()
        assert np.isnan(targets[one.tenant != one.tenant[0]]).all()


def test_what_a_simulation_leaves_out_is_reported():
    yard = TimedYard(SchedulerSettings(context_length=64, max_queued_requests=2), make_info(64, 1, 1, 64))
    first = yard.submit([5, 6], max_new=20)
    for _ in range(3):
        yard.launch()
        yard.commit()
    stopped = yard.submit([8, 9], max_new=20)
    gone, refused = yard.submit([5, 7], cache_salt="x"), yard.submit([5, 8])
    yard.apply(Cancel([first]))
    yard.apply(Update(gone, priority=3))
    yard.launch()
    yard.commit()
    yard.launch()
    yard.commit()
    yard.apply(StopFound(stopped, 1, "x"))
    yard.submit([], max_new=3)
    yard.launch()
    history, run = yard.history()
    notes = " ".join(history.notes())
    for words in ("1 answers were given up", "1 answers had a cache"):
        assert words in notes
    assert "1 changes of urgency" in notes
    workload = history.workload("t")
    seen = len(yard.tokens[first])
    assert workload.seen_tokens.tolist() == [seen, -1, 0, 0]
    assert workload.output_tokens.tolist() == [seen, 1, 1, 1]  # drawn from the one that ended, after a token
    assert workload.unknown_lengths == 3
    assert "3 of 4 answers were refused or broken off" in workload.notes[0]
    assert workload.max_new_tokens.tolist()[:2] == [20, 20]
    assert workload.request(0).sampling.max_new_tokens == 20
    setup = Setup(history.profile(), SchedulerSettings())
    lived = history.outcome(workload, setup, run.scheduler.snapshot(0).counters)
    assert lived.status.tolist() == [1, 1, 0, 2]
    assert yard.finished[refused].cause == "queue_full"


def test_a_tape_without_requests_gives_no_workload():
    yard = TimedYard(SchedulerSettings(), make_info())
    history, _ = yard.history()
    with pytest.raises(ConfigError, match="no request"):
        history.workload("t")
    assert history.host_s == 0.0


def ids(*values):
    return np.array(values, np.int32)


def test_earlier_answers_in_a_prompt_are_replaced_by_the_simulated_ones():
    talks = Conversations()
    first, answer = ids(1, 2, 3), ids(50, 51, 52)
    assert talks.add(0, first, answer).tolist() == [1, 2, 3]
    assert talks.add(1, ids(1, 2), ids(3, 9)).tolist() == [1, 2]
    made = stream_tokens(ANSWER_STREAM + 0, np.arange(3)).tolist()
    second = ids(1, 2, 3, 50, 51, 52, 60)
    assert talks.add(2, second, ids(70, 71)).tolist() == [1, 2, *stream_tokens(ANSWER_STREAM + 1, [0]), *made, 60]
    third = np.concatenate((second, ids(70, 71, 80)))
    rebuilt = talks.add(3, third, ids()).tolist()
    assert rebuilt[3:7] == [*made, 60]
    assert rebuilt[7:] == [*stream_tokens(ANSWER_STREAM + 2, np.arange(2)), 80]
    assert talks.add(4, ids(1, 2, 3, 50, 99), ids()).tolist()[3:] == [made[0], 99]
    assert talks.add(5, ids(4, 2, 3, 50), ids()).tolist() == [4, 2, 3, 50]


@pytest.mark.parametrize("learn", [False, True])
def test_a_simulated_run_leaves_a_tape_like_a_served_one(learn):
    workload = synthetic("plain", 60, 40.0, 1)
    settings = SchedulerSettings(context_length=8192, max_in_flight=2, schedule_policy="slo")
    setup = Setup(get_profile("h100", "llama-3-8b"), settings, prior_scale=1.3, learn=learn)
    file = io.BytesIO()
    taped = simulate(workload, setup, tape=file)
    assert taped.decision_hash == simulate(workload, setup).decision_hash
    report = Replay(Tape(file.getvalue(), "t"), None, False).run()
    assert report.difference is None
    assert report.plans == taped.counters["steps"] > 100


def test_the_hosts_share_leaves_out_rests_and_counts_slow_turns():
    yard = TimedYard(SchedulerSettings(context_length=256), make_info(4096, 1, 32, 256))
    for user in range(3):
        yard.now += 10 * NS_PER_S
        yard.submit([user + 1] * 20, max_new=10)
        turns = 0
        while yard.launch() or yard.tickets:
            turns += 1
            yard.now += (1 + 2 * (turns % 2)) * NS_PER_MS
            yard.commit()
    assert yard.history()[0].host_s == pytest.approx(0.002, rel=0.1)


def test_a_tape_of_a_few_steps_is_fitted_too():
    yard = TimedYard(SchedulerSettings(context_length=256), make_info(4096, 1, 32, 256))
    yard.submit([5] * 20, max_new=10)
    yard.run()
    profile = yard.history()[0].profile()
    work = StepWork(tokens=1, rows=1, decode_rows=1, decode_context=25)
    assert profile.cost().step(work) == pytest.approx(TRUTH.step(work), rel=0.05)


def test_unknown_lengths_stay_unknown_in_a_trace_file(tmp_path):
    yard = TimedYard(SchedulerSettings(context_length=64, max_queued_requests=1), make_info(64, 1, 1, 64))
    whole = yard.submit([5, 6], max_new=7)
    for _ in range(2):
        yard.launch()
        yard.commit()
    refused = [yard.submit([5, 8 + place], max_new=9) for place in range(3)][1:]
    while yard.launch() or yard.tickets:
        yard.commit()
    assert {yard.finished[number].cause for number in refused} == {"queue_full"}
    assert len(yard.tokens[whole]) == 7
    write_trace(yard.history()[0].workload("t"), tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [line.get("complete", True) for line in lines] == [True, True, False, False]
    assert [line["output_tokens"] for line in lines] == [7, 9, 0, 0]
    drawn = read_trace(tmp_path / "t.jsonl", "tokenyard", ReadOptions())
    assert set(drawn.output_tokens[2:].tolist()) <= {7, 9}
    left = read_trace(tmp_path / "t.jsonl", "tokenyard", ReadOptions(skip_unknown=True))
    assert left.output_tokens.tolist() == [7, 9]
    assert left.notes == ["2 of 4 requests were refused or broken off and are left out"]
