"""Looking ahead: the forward run from a moment of a running scheduler, and policy `adaptive` in virtual time."""

import io
import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import NS_PER_S, Pause, Request, SamplingParams, SchedulerSettings, SetPolicy, Slo, Submit
from tokenyard.policy.adaptive import CANDIDATES, CandidateScore
from tokenyard.scheduler.lookahead_state import (
    MAX_WAITING,
    LookaheadQuery,
    LookaheadReply,
    RequestArrived,
    RequestEnded,
    decode,
    decode_reply,
    encode,
)
from tokenyard.scheduler.row_state import RowState
from tokenyard.sim.engine.forecast import RecentTraffic, forecast
from tokenyard.sim.engine.lookahead import CandidateRun, look_ahead, make_drafter
from tokenyard.sim.engine.sim_scheduler import SimExecutor, SimScheduler
from tokenyard.sim.simulate import executor_info, simulate
from tokenyard.sim.traces.synthetic import plain, shared_prefix
from tokenyard.sim.traces.workload import Workload
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.replay import replay

NAMES = list(CANDIDATES)


class Yard:
    """A replica that serves a workload up to some moment, and the traffic that it saw."""

    def __init__(self, work: Workload, until_s: float, **settings):
        self.traffic = RecentTraffic()
        context = work.max_prompt_tokens + work.max_output_tokens + 1
        chosen = SchedulerSettings(page_size=16, context_length=context, **settings)
        run = replace(setup(), settings=chosen)
        origin = Origin(chosen, executor_info(run), run.prior(), learns=False)
        self.scheduler = origin.scheduler()
        executor = SimExecutor(origin.info, run.prior(), work.output_tokens, distinct_tokens=True)
        self.replica = SimScheduler(self.scheduler, executor, lambda finish: self.traffic.take(RequestEnded.of(finish)))
        self.now = round(until_s * NS_PER_S)
        for index in range(len(work)):
            request = work.request(index)
            if request.arrival_ns >= self.now:
                break
            self.replica.advance(request.arrival_ns)
            self.replica.submit(request, request.arrival_ns)
            self.traffic.take(RequestArrived.of(request, request.arrival_ns, blocks=True))
        self.replica.advance(self.now)

    def future(self, horizon_s=10.0, number=0):
        return forecast(self.traffic, self.scheduler.lookahead_state(self.now), horizon_s, number)

    def look(self, number=0, horizon_s=4.0, names=NAMES):
        return look_ahead(self.traffic, self.scheduler.lookahead_state(self.now), names, horizon_s, number)


@pytest.fixture(scope="module")
def busy():
    """Chat that has come too fast for a while."""
    return Yard(plain(500, 30.0, 1), 15.0)


@pytest.mark.slow
def test_a_forecast_repeats_and_another_seed_draws_another_future(busy):
    names = ["fcfs", "slo"]
    first = busy.look(names=names)
    assert [score.name for score in first] == names
    assert first == busy.look(names=names)
    assert first != busy.look(names=names, number=1)


def test_a_forecast_predicts_the_effect_of_a_change(busy):
    scores = {score.name: score for score in busy.look()}
    assert scores["slo"].met > 1.2 * scores["fcfs"].met
    assert scores["slo"].requests > 100


def test_a_forecast_includes_drafts(busy):
    state = busy.scheduler.lookahead_state(busy.now)
    assert make_drafter(state, 10, 10) is None
    running = state.rows["state"] == RowState.RUNNING
    plain_score = look_ahead(busy.traffic, state, ["fcfs"], 4.0, 0)[0]
    state.rows["drafts"] = np.where(running, 4, 0)
    state.rows["acceptance_rate"] = np.where(running, 950, 0)
    with_drafts = look_ahead(busy.traffic, state, ["fcfs"], 4.0, 0)[0]
    assert with_drafts.ttft_s < plain_score.ttft_s
    assert with_drafts.met > plain_score.met
    assert look_ahead(busy.traffic, state, ["fcfs"], 4.0, 0)[0] == with_drafts


def test_a_forecast_changes_nothing():
    before = Yard(plain(400, 25.0, 1), 10.0)
    record_lookahead = Yard(plain(400, 25.0, 1), 10.0)
    record_lookahead.look(horizon_s=3.0)
    for yard in (before, record_lookahead):
        yard.replica.advance(40 * NS_PER_S)
    assert before.replica.decision_hash() == record_lookahead.replica.decision_hash()


def test_a_forecast_does_not_know_future_lengths():
    work = plain(400, 25.0, 1)
    seen = Yard(work, 8.0)
    open_numbers = [row for row in range(400) if seen.scheduler.state.table.row_of(row) is not None]
    other = work.output_tokens.copy()
    other[open_numbers] = np.maximum(other[open_numbers], 1000)
    longest = other.max()
    # Both ask for as many tokens at most.
    pair = [
        replace(work, output_tokens=np.append(tokens[:-1], longest).astype(np.int32))
        for tokens in (work.output_tokens, other)
    ]
    first, second = (Yard(one, 8.0) for one in pair)
    assert first.traffic.outputs().tolist() == second.traffic.outputs().tolist()
    assert first.look(names=["fcfs", "slo"]) == second.look(names=["fcfs", "slo"])


def test_running_requests_continue_from_what_is_computed(busy):
    moment, future = busy.scheduler.lookahead_state(busy.now), busy.future()
    running = int((moment.rows["state"] == 3).sum())
    assert future.running == running > 20
    fork = CandidateRun(moment, future, SetPolicy("fcfs"))
    state = fork.scheduler.state
    assert len(state.running) + len(fork.scheduler.drain().finished) == running
    for row in state.running.rows.tolist():
        number = int(state.table.number[row])
        assert state.table.computed[row] == moment.rows["planned"][number]
        # The next token is due when it was.
        tpot = future.tpot_ns[number]
        due = moment.rows["first_token_ns"][number] + (future.written[number] + 1) * tpot
        assert state.table.first_token_ns[row] + tpot == due or not moment.rows["first_token_ns"][number]


@pytest.mark.parametrize("work", [plain(300, 30.0, 2), shared_prefix(300, 30.0, 2)], ids=["plain", "shared"])
def test_a_forward_run_drains(work):
    yard = Yard(work, 8.0)
    yard.traffic.arrivals.clear()
    moment = yard.scheduler.lookahead_state(yard.now)
    for name in NAMES:
        fork = CandidateRun(moment, yard.future(), CANDIDATES[name])
        fork.score(name, yard.now + 10_000 * NS_PER_S)
        assert not fork.scheduler.has_work
        assert fork.scheduler.idle() is None
        assert len(fork.finishes) == len(moment.rows["number"])


def test_arrivals_have_the_recent_rate():
    yard = Yard(plain(1000, 10.0, 3), 50.0)
    come = [len(future) - future.running - future.waiting for future in (yard.future(10.0, n) for n in range(20))]
    assert 80 < np.mean(come) < 120
    assert np.std(come) > 2


def test_more_arrivals_than_are_kept_count_at_their_rate():
    yard = Yard(workload((0.0, 10, 1)), 20.0)
    for number in range(1, 10_000):
        one = msgspec.structs.replace(yard.traffic.arrivals[0], number=number, arrival_ns=2_000_000 * number)
        yard.traffic.take(one)
    assert len(yard.traffic.arrivals) == 4096
    future = yard.future(2.0)
    assert 850 < len(future) - future.running - future.waiting < 1150


def test_old_arrivals_are_discarded():
    yard = Yard(workload(*((0.1 * i, 100, 2) for i in range(50)), (100.0, 100, 2)), 101.0)
    yard.future()
    assert [one.number for one in yard.traffic.arrivals] == [50]


def test_common_prefixes_hit_in_the_forward_run():
    yard = Yard(shared_prefix(400, 20.0, 1), 15.0)
    future = yard.future()
    fork = CandidateRun(yard.scheduler.lookahead_state(yard.now), future, SetPolicy("lpm"))
    seated = fork.scheduler.state.observer.counters.hit_tokens
    fork.score("lpm", yard.now + 10 * NS_PER_S)
    counters = fork.scheduler.state.observer.counters
    come = sum(len(request.prompt_ids) for request in future.requests[future.running :])
    assert (counters.hit_tokens - seated) / come > 0.6
    # What only one request had is no shared prefix.
    alone = Yard(plain(400, 20.0, 1), 15.0)
    fork = CandidateRun(alone.scheduler.lookahead_state(alone.now), alone.future(), SetPolicy("lpm"))
    fork.score("lpm", alone.now + 10 * NS_PER_S)
    assert fork.scheduler.state.observer.counters.hit_tokens == 0


def test_the_cache_holds_what_ended_lately_and_open_requests_keep_their_prefixes():
    work = shared_prefix(400, 30.0, 1)
    yard = Yard(work, 12.0, max_running_requests=8)
    moment, future = yard.scheduler.lookahead_state(yard.now), yard.future()
    tree = CandidateRun(moment, future, SetPolicy("lpm")).scheduler.state.memory.tree
    real = yard.scheduler.state.memory.tree
    assert 0.7 < tree.total_pages / real.total_pages < 1.1
    numbers = moment.rows["number"].tolist()
    assert future.waiting > 20
    for first, second in itertools.pairwise(range(future.running, future.running + future.waiting)):
        here = [future.requests[place].prompt_ids[:2048] for place in (first, second)]
        there = [work.request(numbers[place]).prompt_ids[:2048] for place in (first, second)]
        assert np.array_equal(*here) == np.array_equal(*there)


def test_own_targets_and_deadlines_count():
    base = Request(0, "", np.arange(1, 101, dtype=np.int32), SamplingParams(max_new_tokens=50))
    cases = {
        "none": (base, 1_000_000_000),
        "own": (replace(base, slo=Slo(ttft_ns=5)), 5),
        "deadline": (replace(base, deadline_ns=7), 7),
        "both": (replace(base, slo=Slo(ttft_ns=5), deadline_ns=7), 5),
    }
    for name, (request, due) in cases.items():
        yard = Yard(workload((0.0, 200, 1)), 1.0)
        yard.traffic.arrivals.clear()
        yard.scheduler.submit(Submit(request), 10**9)
        yard.traffic.take(RequestArrived.of(request, 10**9, blocks=True))
        future = yard.future(5.0)
        assert future.waiting == 1, name
        assert {due_ns - one.arrival_ns for due_ns, one in zip(future.due_ns, future.requests, strict=True)} == {due}, (
            name
        )


def test_requests_already_late_and_those_with_time_left_are_not_judged():
    yard = Yard(workload((0.0, 100, 2000)), 1.0, max_running_requests=1)
    yard.traffic.arrivals.clear()
    for number, targets in ((1, {"slo": Slo(ttft_ns=1)}), (2, {"deadline_ns": 100 * NS_PER_S})):
        request = Request(number, "", np.full(10, 5, np.int32), SamplingParams(max_new_tokens=5), **targets)
        yard.scheduler.submit(Submit(request), yard.now - 10)
    assert yard.future().waiting == 2
    (score,) = yard.look(names=["fcfs"], horizon_s=0.2)
    assert (score.requests, score.met) == (1, 1.0)


def test_a_part_of_a_long_queue_is_sampled_and_held_requests_are_left_out():
    yard = Yard(workload((0.0, 50, 10)), 0.5, max_running_requests=4)
    for number in range(1, 2001):
        request = Request(number, "", np.full(10, 5, np.int32), SamplingParams(max_new_tokens=5))
        yard.scheduler.submit(Submit(request), number)
    yard.scheduler.pause(Pause(numbers=[2000, 1999]), yard.now)
    rows = yard.scheduler.lookahead_state(yard.now).rows
    waiting = rows["number"][rows["state"] == 1]
    assert len(waiting) == MAX_WAITING
    assert (waiting[0], waiting[-1]) == (1, 1998)
    assert np.diff(waiting).max() <= 5


def test_messages_survive_encoding(busy):
    moment = busy.scheduler.lookahead_state(busy.now)
    for message in (
        *list(busy.traffic.arrivals)[:2],
        RequestEnded(3, 4, 5, True),
        LookaheadQuery(1, NAMES, 10.0, moment),
    ):
        found = decode(encode(message))
        assert encode(found) == encode(message)
    answer = LookaheadReply(7, [CandidateScore("slo", 0.5, 0.1, 10, 5)], 0.25)
    assert decode_reply(encode(answer)) == answer


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x00", b"\x02abc", b"\x01" + msgspec.msgpack.encode([1])])
def test_what_is_no_message_is_refused(data):
    for read in (decode, decode_reply):
        with pytest.raises(ValueError):
            read(data)


def adaptive(work, tape=None, among="fcfs+slo", **changes):
    options = {"among": among, "interval_s": 5.0, "horizon_s": 5.0}
    return simulate(
        work, setup("vllm-default", {"schedule_policy": "adaptive", "policy_options": options, **changes}), tape=tape
    )


def test_adaptive_changes_when_traffic_shifts():
    calm, rush = plain(60, 3.0, 1), plain(600, 30.0, 2)
    parts = [
        *zip(calm.arrival_s, calm.prompt_tokens, calm.output_tokens, strict=True),
        *zip(rush.arrival_s + 25.0, rush.prompt_tokens, rush.output_tokens, strict=True),
    ]
    work = workload(*parts)
    outcome = adaptive(work)
    assert [switch.candidate for switch in outcome.switches] == ["slo"]
    assert 25.0 < outcome.switches[0].at_ns / NS_PER_S < 45.0
    fcfs = simulate(work, setup("vllm-default"))
    assert outcome.met.mean() > fcfs.met.mean() + 0.1


@pytest.mark.slow
def test_a_tape_of_adaptive_replays_without_looking_ahead():
    sink = io.BytesIO()
    outcome = adaptive(plain(300, 30.0, 1), sink)
    assert adaptive(plain(300, 30.0, 1)).decision_hash == outcome.decision_hash
    tape = Tape(sink.getvalue(), "tape")
    events = [record.body for record in tape.records() if isinstance(record.body, SetPolicy)]
    assert [event.name for event in events] == ["fcfs", "slo"]
    report = replay(tape)
    assert report.difference is None
    assert report.plans == report.equal == outcome.counters["steps"]


def test_adaptive_begins_with_its_first_candidate_and_serves_after_idle_times():
    gap = workload(*((0.01 * i, 3000, 40) for i in range(100)), *((500 + 0.01 * i, 3000, 40) for i in range(100)))
    outcome = adaptive(gap, among="slo+fcfs")
    assert outcome.served.all()
    assert outcome.switches == []


@pytest.mark.slow
def test_every_replica_looks_ahead_for_itself():
    chosen = {"schedule_policy": "adaptive", "policy_options": {"interval_s": 2.0, "among": "fcfs+slo"}}
    outcome = simulate(plain(500, 60.0, 1), setup("vllm-default", chosen, replicas=2))
    assert outcome.served.all()
    assert [switch.candidate for switch in outcome.switches] == ["slo", "slo"]
