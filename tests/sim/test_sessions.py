"""Sessions in the simulator: closed loops, forks and joins, what they share, and the figures of a run."""

import io
import json
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup
from tokenyard.base import ConfigError, SessionEnded, Submit, TurnEnded
from tokenyard.cost import get_profile
from tokenyard.sim.fleet.fleet_settings import Fault, Fleet
from tokenyard.sim.report.comparison import write_report
from tokenyard.sim.report.session_charts import gantt
from tokenyard.sim.report.session_figures import turn_alone_s
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import REJECTED, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionOptions, SessionRecord, Turn, as_runs, common_blocks
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

CACHED = {"disable_radix_cache": False, "page_size": 64}


def growing(name: str, turns: int = 3, *, gap_s: float = 2.0, start_s: float | None = None) -> SessionRecord:
    """A session each of whose prompts begins with the one before it."""
    made = [
        Turn(
            640 * (index + 1),
            8,
            (index - 1,) if index else (),
            gap_s * bool(index),
            runs=np.array([[0, 10 * index + 10]]),
        )
        for index in range(turns)
    ]
    return SessionRecord(name, made, start_s)


def workload_of(*records: SessionRecord, **options):
    return session_workload(SessionTrace("small", list(records), 64), SessionOptions(**{"concurrent": 1, **options}))


def times(outcome):
    return outcome.arrival_ns / 1e9, outcome.finished_ns / 1e9


def test_a_turn_is_sent_when_the_one_before_it_has_ended_and_its_gap_has_passed():
    workload = workload_of(growing("a", gap_s=2.5))
    arrived, ended = times(simulate(workload, setup()))
    assert arrived[1:].tolist() == pytest.approx((ended[:-1] + 2.5).tolist(), abs=1e-6)
    arrived, ended = times(simulate(workload, setup(host_s=1.0)))
    assert arrived[1:].tolist() == pytest.approx((ended[:-1] + 2.5).tolist(), abs=1e-6)


def test_so_many_sessions_are_active_and_the_next_starts_when_one_ends():
    workload = workload_of(*(growing(f"s{i}", 2 + i % 3, gap_s=200.0) for i in range(12)), concurrent=3)
    outcome = simulate(workload, setup())
    assert outcome.served.all()
    arrived, ended = times(outcome)
    sessions = workload.sessions.session
    begins = np.array([arrived[sessions == i].min() for i in range(12)])
    ends = np.array([ended[sessions == i].max() for i in range(12)])
    assert all(np.isclose(ends, begin).any() for begin in begins[3:])
    middles = (begins[:, None] + 1e-6 >= begins) & (begins[:, None] + 1e-6 < ends)
    assert middles.sum(axis=1)[3:].tolist() == [3] * 9


def test_sessions_start_by_rate_or_as_recorded():
    records = [growing(f"s{i}", 1, start_s=100.0 + 7 * i) for i in range(300)]
    recorded = simulate(workload_of(*reversed(records), concurrent=0), setup())
    assert recorded.arrival_ns.tolist() == [7 * 10**9 * i for i in range(300)]
    drawn = workload_of(*records, concurrent=0, per_hour=120.0)
    assert drawn.sessions.start_s[-1] == pytest.approx(300 * 30.0, rel=0.2)
    assert (np.diff(drawn.sessions.start_s) >= 0.0).all()
    with pytest.raises(ConfigError, match="does not say when its sessions start"):
        workload_of(growing("a"), concurrent=0)


def test_sub_agents_fork_from_their_parent_and_it_waits_for_all_of_them():
    turns = [
        Turn(640, 4, runs=np.array([[0, 10]])),
        Turn(320, 4, (0,), 1.0, "quick", runs=np.array([[100, 5]])),
        Turn(320, 400, (0,), 1.0, "slow", runs=np.array([[200, 5]])),
        Turn(384, 4, (1,), 0.5, "quick", runs=np.array([[100, 6]])),
        Turn(1280, 4, (0, 2, 3), 3.0, runs=np.array([[0, 20]])),
    ]
    workload = workload_of(SessionRecord("parent", turns))
    arrived, ended = times(simulate(workload, setup()))
    assert arrived[1:4].tolist() == pytest.approx([ended[0] + 1, ended[0] + 1, ended[1] + 0.5], abs=1e-6)
    assert ended[2] > ended[3]
    assert arrived[4] == pytest.approx(ended[2] + 3, abs=1e-6)
    told = [(workload.request(i).session, workload.request(i).turn) for i in range(5)]
    assert told == [("parent", 0), ("parent/quick", 0), ("parent/slow", 0), ("parent/quick", 1), ("parent", 1)]
    assert workload.sessions.reusable.tolist() == [0, 0, 0, 320, 640]


@pytest.mark.parametrize("close", [False, True])
def test_the_scheduler_is_told_of_turns_and_of_sessions_if_clients_say_so(close):
    records = [growing("a", 2), growing("b", 1)]
    records[0].turns[0].tool = True
    file = io.BytesIO()
    outcome = simulate(workload_of(*records, close=close), setup(settings=CACHED), tape=file)
    seen: list = []
    report = replay(Tape(file.getvalue(), "t"), Watcher(seen))
    assert report.difference is None
    kinds = [(type(event), getattr(event, "kind", "")) for event, _ in seen]
    closing = [(SessionEnded, "")] * close
    assert kinds == [
        *((Submit, ""), (TurnEnded, "tool"), (Submit, ""), (TurnEnded, "user"), *closing),
        *((Submit, ""), (TurnEnded, "user"), *closing),
    ]
    names = [event.request.session if isinstance(event, Submit) else event.session for event, _ in seen]
    assert len(set(names)) == 2
    ends = [now for event, now in seen if isinstance(event, TurnEnded)]
    assert ends == outcome.finished_ns.tolist()


class Watcher:
    def __init__(self, seen):
        self.seen = seen

    def applied(self, event, now):
        self.seen.append((event, now))

    def committed(self, plan, result, now): ...

    def on_output(self, batch): ...


def test_prompts_share_what_their_blocks_share_and_nothing_else():
    first = growing("a", 2)
    forked = SessionRecord("b", [Turn(700, 2, runs=np.array([[0, 3], [50, 2], [7, 5]])), Turn(130, 2, (0,), runs=None)])
    workload = workload_of(first, forked)
    prompts = [workload.content.prompt_ids(i, int(workload.prompt_tokens[i])) for i in range(4)]
    assert [len(prompt) for prompt in prompts] == workload.prompt_tokens.tolist()
    assert (prompts[1][:640] == prompts[0]).all()
    assert not np.isin(prompts[2], np.concatenate(prompts[:2])).any(), "ids are local to a session"
    assert len(np.unique(np.concatenate(prompts[1:]))) == sum(map(len, prompts[1:]))
    everywhere = SessionTrace("small", [growing("a", 1), growing("b", 1)], 64, shared_ids=True)
    same = session_workload(everywhere, SessionOptions(concurrent=1)).content
    assert (same.prompt_ids(0, 640) == same.prompt_ids(1, 640)).all()


def test_ids_far_apart_are_blocks_like_any_other():
    ids = [10**12, 5, 6, 2**60, 7]
    turns = [Turn(320, 1, runs=as_runs(ids)), Turn(320, 1, (0,), runs=as_runs([*ids[:3], 9, 10]))]
    workload = workload_of(SessionRecord("a", turns))
    left, right = (workload.content.prompt_ids(i, 320) for i in range(2))
    assert (left[:192] == right[:192]).all()
    assert not np.isin(right[192:], left).any()


@pytest.mark.parametrize("seed", range(5))
def test_runs_count_as_their_blocks_do(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        left = rng.integers(0, 4, rng.integers(0, 12)).cumsum().tolist()
        right = left[: rng.integers(0, len(left) + 1)] + rng.integers(0, 50, 4).tolist()
        same = next(
            (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
            min(len(left), len(right)),
        )
        assert common_blocks(as_runs(left), as_runs(right)) == same
        assert [b for first, n in as_runs(left).tolist() for b in range(first, first + n)] == left


def test_with_room_for_all_every_turn_hits_what_its_session_sent_before():
    workload = workload_of(growing("a", 6, gap_s=100.0), growing("b", 5, gap_s=100.0), concurrent=2)
    outcome = simulate(workload, setup(settings=CACHED))
    assert outcome.cached_tokens.tolist() == workload.sessions.reusable.tolist()
    figures = summary(outcome)["sessions"]
    assert figures["recomputed_tokens"] == 0
    small = simulate(workload, setup(settings=CACHED, kv_pool_tokens=4096))
    lost = summary(small)["sessions"]["recomputed_tokens"]
    assert lost == int((workload.sessions.reusable - small.cached_tokens).clip(0).sum()) > 0


def test_the_figures_of_sessions_by_hand():
    workload = workload_of(growing("a", 3, gap_s=10.0), growing("b", 2, gap_s=10.0), growing("c", 1))
    outcome = simulate(workload, setup(settings=CACHED))
    figures = summary(outcome)["sessions"]
    arrived, ended = times(outcome)
    lasted = [ended[2] - arrived[0], ended[4] - arrived[3], ended[5] - arrived[5]]
    assert figures["mean_session_s"] == pytest.approx(np.mean(lasted), abs=1e-5)
    # The last session starts when the second ends, and is the next to end.
    load_s = ended[5] - arrived[0]
    assert figures["full_load_s"] == pytest.approx(load_s, abs=1e-5)
    assert figures["turns_per_hour"] == pytest.approx(6 / load_s * 3600, rel=1e-5)
    assert figures["sessions_per_hour"] == pytest.approx(3 / load_s * 3600, rel=1e-5)
    prompts = workload.prompt_tokens.sum()
    assert figures["hit_share"] == pytest.approx(outcome.cached_tokens.sum() / prompts, abs=1e-6)
    waits = (outcome.admitted_ns - outcome.arrival_ns) / 1e9
    assert figures["longest_wait_s"] == pytest.approx(waits.max(), abs=1e-6)
    assert [(group["turns"], group["count"]) for group in figures["by_turn"]][:2] == [("0", 3), ("1-4", 3)]
    # Sessions that come one after the other have the engine to themselves, but for the last turn's one odd token.
    assert figures["mean_slowdown"] == pytest.approx(1.0, abs=0.01)


def test_time_alone_is_the_rest_of_the_prompt_and_the_decodes():
    cost = get_profile("h100", "llama-3-8b").cost()
    whole, rest = turn_alone_s(cost, 0, 20_000, 1), turn_alone_s(cost, 16_384, 20_000, 1)
    assert 0.0 < rest < whole / 2
    assert turn_alone_s(cost, 0, 20_000, 101) - whole == pytest.approx(100 * 0.0066, rel=0.5)


def test_sessions_beyond_the_context_are_counted_or_cut_never_silent():
    records = [growing("short", 2), growing("long", 5), growing("too long", 1)]
    records[2].turns[0].prompt_tokens = 5000
    left = workload_of(*records, context_length=2000)
    assert set(left.sessions.names) == {"short"}
    assert "2 of 3 sessions need a context longer than 2000 tokens" in left.notes[0]
    cut = workload_of(*records, context_length=2000, cut_long=True)
    assert np.bincount(cut.sessions.session).tolist() == [2, 3]
    assert "1 of 3 sessions are cut" in cut.notes[0]
    assert "3 turns are left out, and 1 sessions as a whole" in cut.notes[0]
    with pytest.raises(ConfigError, match="no session; 1 of 1 sessions need a context"):
        workload_of(records[2], context_length=2000)


def test_a_cut_takes_what_waits_for_the_turn_that_is_cut():
    turns = [Turn(10, 1), Turn(900, 1, (0,), agent="x"), Turn(20, 1, (0, 1)), Turn(30, 1, (0,), agent="y")]
    assert [turn.prompt_tokens for turn in SessionRecord("a", turns).cut(100).turns] == [10, 30]


def test_sessions_are_drawn_by_the_seed():
    records = [growing(f"s{i}", 1) for i in range(50)]
    names = [workload_of(*records, sessions=20, seed=seed).sessions.names for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == 20
    with pytest.raises(ConfigError, match="--sessions is 51; small has 50 sessions"):
        workload_of(*records, sessions=51)


@pytest.mark.parametrize(
    "wrong", [{"concurrent": -1}, {"per_hour": -1.0}, {"sessions": 0}, {"think_cap_s": -1.0}, {"per_hour": 2.0}]
)
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match="--"):
        SessionOptions(**{"concurrent": 1, **wrong})


def test_gaps_are_capped_and_a_rate_changes_starts_only():
    records = [growing(f"s{i}", 3, gap_s=30.0, start_s=100.0 * i) for i in range(4)]
    workload = workload_of(*records, concurrent=0, think_cap_s=20.0)
    assert set(workload.sessions.gap_s.tolist()) == {0.0, 20.0}
    twice = workload.scaled(2.0)
    assert twice.sessions.start_s.tolist() == [0.0, 50.0, 100.0, 150.0]
    assert twice.sessions.gap_s.tolist() == workload.sessions.gap_s.tolist()
    assert simulate(twice, setup()).served.all()


def test_a_shrunk_trace_has_the_same_hits_of_smaller_prompts():
    records = [growing("a", 3, gap_s=32.0, start_s=5.0), growing("b", 2, gap_s=800.0, start_s=37.0)]
    whole, small = (workload_of(*records, concurrent=0, think_cap_s=80.0, shrink=factor) for factor in (1, 16))
    assert (small.prompt_tokens * 16).tolist() == whole.prompt_tokens.tolist()
    assert (small.sessions.reusable * 16).tolist() == whole.sessions.reusable.tolist()
    assert small.sessions.gap_s.tolist() == [0.0, 2.0, 2.0, 0.0, 5.0]
    assert small.sessions.start_s.tolist() == [0.0, 2.0]
    assert "divided by 16" in small.notes[0]
    ids = [small.content.prompt_ids(index, int(small.prompt_tokens[index])) for index in range(2)]
    assert (ids[1][:40] == ids[0]).all()
    with pytest.raises(ConfigError, match="a factor that divides the size of blocks"):
        workload_of(*records, shrink=10)


def test_the_first_requests_of_sessions_run():
    workload = workload_of(*(growing(f"s{i}", 3) for i in range(4)), concurrent=2)
    for count in (1, 4, 5, 12):
        outcome = simulate(workload.limited(count), setup(settings=CACHED))
        assert outcome.served.tolist() == [True] * count
    assert workload.limited(4).sessions.count == 2
    with pytest.raises(ConfigError, match="cannot be chosen one by one"):
        workload.only(workload.prompt_tokens > 700)


def test_a_refused_turn_does_not_stop_its_session():
    workload = workload_of(growing("a", 4))
    outcome = simulate(workload, setup(settings={"context_length": 1300}))
    assert outcome.status.tolist() == [1, 1, REJECTED, REJECTED]
    assert "2 prompts do not fit the context of 1300 tokens" in summary(outcome)["trace_notes"][-1]


def test_sessions_run_through_a_fleet_with_a_fault():
    workload = workload_of(*(growing(f"s{i}", 5, gap_s=1.0) for i in range(20)), concurrent=8, close=True)
    outcome = simulate(workload, setup(settings=CACHED, replicas=3, router="round_robin"))
    assert outcome.served.all()
    assert len(set(outcome.place.tolist())) == 3


@pytest.mark.parametrize("router", ["predicted_ttft", "cache_aware"])
def test_a_dead_engine_costs_its_sessions_their_own_recomputation_once(router):
    """Of four engines, one dies for good. Its sessions compute their contexts again, at several other engines.

    Of the other sessions, `predicted_ttft` may move some that would wait longer than their contexts take to compute.
    """
    workload = workload_of(*(growing(f"s{i}", 8, gap_s=10.0) for i in range(32)), concurrent=32)
    dead, reusable = 1, workload.sessions.reusable
    fleet = Fleet(faults=(Fault(90.0, dead, 1e6),))
    outcome = simulate(workload, setup(settings=CACHED, replicas=4, router=router, fleet=fleet))
    assert outcome.served.all()
    recomputed = np.maximum(reusable - outcome.cached_tokens, 0)
    refuges = []
    for session in range(32):
        turns = np.flatnonzero(workload.sessions.session == session)
        places, lost = outcome.place[turns], recomputed[turns]
        leaves = np.flatnonzero((places[:-1] == dead) & (places[1:] != dead)) + 1
        if len(leaves):
            assert np.flatnonzero(lost).tolist() == leaves[:1].tolist(), (places, lost)
            assert lost[leaves[0]] == reusable[turns[leaves[0]]]
            refuges.append(int(places[leaves[0]]))
        elif router == "cache_aware":
            assert not lost.any(), (places, lost)
    assert len(refuges) >= 4
    assert len(set(refuges)) > 1, "all went to one engine"


SESSION = {
    "id": "one",
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "system_tokens": 32,
    "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 200, "out": 5, "hash_ids": [1, 2, 3], "stop": "tool_use",
         "api_time": 2.0, "think_time": 0.0},
        {"t": 9.0, "type": "subagent", "agent_id": "agent_1", "duration_ms": 6000, "requests": [
            {"t": 0.0, "type": "n", "model": "n", "in": 70, "out": 1, "hash_ids": [9], "stop": "end_turn"}]},
        {"t": 10.0, "type": "s", "model": "m", "in": 330, "out": 7, "hash_ids": [1, 2, 3, 4, 5], "stop": "end_turn",
         "api_time": 2.0, "think_time": 8.0},
    ],
}  # fmt: skip


def read(path, **options):
    session_options = SessionOptions(**{"concurrent": 1, **options.pop("sessions", {})})
    return read_trace(path, "kv-cache-tester", ReadOptions(sessions=session_options, **options))


def test_kv_cache_tester_with_every_field(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(SESSION))
    workload = read(path)
    sessions = workload.sessions
    assert workload.prompt_tokens.tolist() == [200, 70, 330]
    assert workload.output_tokens.tolist() == [5, 1, 7]
    assert sessions.names == ("one", "one/agent_1")
    assert sessions.tool.tolist() == [True, False, False]
    assert sessions.reusable.tolist() == [0, 0, 192]
    # The sub-agent starts 1 s after the first answer and takes 6 of the 8 s that the client took.
    assert sessions.gap_s.tolist() == [0.0, 1.0, 1.0]
    assert [sessions.waits_for(i) for i in range(3)] == [[], [0], [0, 1]]


def test_tools_and_system_prompt_are_shared_if_asked(tmp_path):
    for name, tools in (("one", 64), ("two", 64), ("three", 128)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**SESSION, "id": name, "tool_tokens": tools}))
    apart, shared = read(tmp_path), read(tmp_path, share_system_prompt=True)
    firsts = [
        index for index in range(len(shared)) if shared.sessions.turn[index] == 0 and shared.prompt_tokens[index] == 200
    ]
    order = [shared.sessions.names[shared.sessions.conversation[index]] for index in firsts]
    prompts = {name: shared.content.prompt_ids(index, 200) for name, index in zip(order, firsts, strict=True)}
    same = {name: int((prompts["one"] == prompts[name]).cumprod().sum()) for name in ("two", "three")}
    assert same == {"two": 96, "three": 64}
    assert not np.isin(*(apart.content.prompt_ids(index, 200) for index in firsts[:2])).any()
    later = shared.content.prompt_ids(firsts[0] + 2, 330)
    assert (later[:192] == shared.content.prompt_ids(firsts[0], 200)[:192]).all()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"requests": []}, "holds no request"),
        ({"requests": [{"type": "n", "in": 0, "out": 1}]}, "request 0: a prompt of 0 tokens"),
        ({"requests": [{"type": "n", "in": "many"}]}, "no session of kv-cache-tester"),
        ({"requests": [{"type": "n", "in": 5, "out": 2000000}]}, "an answer of 2000000"),
        ({"block_size": 0}, "block_size must be above 0"),
        ({"hash_id_scope": "galactic"}, "hash_id_scope one of"),
    ],
)  # fmt: skip
def test_a_bad_session_is_one_clear_line(tmp_path, wrong, complaint):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**SESSION, **wrong}))
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(path)
    assert "bad.json" in caught.value.message
    assert "\n" not in caught.value.message
    (tmp_path / "good.json").write_text(json.dumps(SESSION))
    assert "1 sessions are left out" in read(tmp_path, skip_bad=True).notes[0]


def test_archives_hold_one_session_a_file(tmp_path):
    with tarfile.open(tmp_path / "sessions.tar", "w") as archive:
        for name in ("b", "a"):
            raw = json.dumps({**SESSION, "id": name}).encode()
            info = tarfile.TarInfo(f"sessions/{name}.json")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    assert read(tmp_path / "sessions.tar").sessions.names == ("a", "a/agent_1", "b", "b/agent_1")


def test_equal_runs_of_sessions_have_equal_hashes():
    workload = workload_of(*(growing(f"s{i}", 4, gap_s=0.5) for i in range(10)), concurrent=4)
    one, two = (simulate(workload, setup(settings=CACHED)).decision_hash for _ in range(2))
    assert one == two
    assert simulate(replace(workload, name="other"), setup(settings=CACHED, kv_pool_tokens=4096)).decision_hash != one


def test_a_page_has_a_gantt_chart_with_a_stroke_per_phase_of_a_turn(tmp_path):
    workload = workload_of(*(growing(f"s{i}", 3, gap_s=4.0) for i in range(6)), concurrent=6)
    outcome = simulate(workload, setup(settings=CACHED))
    root = ElementTree.fromstring(gantt(outcome))
    strokes = {path.get("stroke"): path.get("d", "").count("M") for path in root.iter("path") if path.get("fill")}
    assert strokes["var(--line)"] == 6
    assert strokes["var(--s1)"] == strokes["var(--s2)"] == 18
    write_report(tmp_path / "r.html", {"fcfs": outcome, "lpm": outcome})
    page = (tmp_path / "r.html").read_text()
    assert "Sessions over time: lpm" in page
    assert "longest wait of a turn" in page
