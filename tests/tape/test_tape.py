"""Tapes: what is written replays into the same plans, shows no text, and is refused in one line when it is no tape."""

import io
import struct
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    Cancel,
    ConfigError,
    Event,
    Flush,
    LogprobOptions,
    OpenGate,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SessionEnded,
    SetPolicy,
    StopFound,
    Submit,
    TenantSettings,
    TurnEnded,
    Update,
    WeightsUpdated,
)
from tokenyard.cost import LinearCost, get_profile
from tokenyard.executor.mock import MockExecutor
from tokenyard.policy import POLICIES
from tokenyard.tape.anonymizer import Anonymizer
from tokenyard.tape.codec import KINDS, VERSION, Origin, Planned, Raised, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay

KEY = b"a key for all tests"
TENANTS = {
    "secret-tenant": TenantSettings(weight=2.0, tokens_per_s=4000.0, burst_tokens=64, kv_share=0.3),
    "*": TenantSettings(max_running=3, max_queued=6),
}


class OpenRecorder(RecordingScheduler):
    """A recorder that lets the yard look inside."""

    @property
    def state(self):
        return self.scheduler.state


class TapedYard(Yard):
    """A yard whose scheduler is written down."""

    def __init__(self, chosen, info, key=KEY, prior=None, **options):
        super().__init__(chosen, info, **options)
        self.file = io.BytesIO()
        self.scheduler = OpenRecorder(Origin(chosen, info, prior), self.file, key, "test")

    def tape(self):
        return Tape(self.file.getvalue(), "the tape")


def small(policy="fcfs", depth=2, **more):
    return SchedulerSettings(
        page_size=4,
        max_running_requests=4,
        max_queued_requests=12,
        context_length=48,
        chunked_prefill_size=8,
        schedule_policy=policy,
        prefill_decode_interval=2,
        max_in_flight=depth,
        schedule_conservativeness=0.1,
        queue_timeout_s=0.08,
        run_timeout_s=0.05,
        **more,
    )


def small_info(depth=2):
    return make_info(16, 4, 4 + depth, 48)


def assert_replays(tape):
    report = replay(tape)
    assert report.difference is None, report.difference
    assert report.plans == report.equal
    assert not report.last_error
    return report


event_choices = st.one_of(
    st.builds(Cancel, st.lists(st.integers(1, 12), min_size=1, max_size=2)),
    st.builds(Update, st.integers(1, 12), priority=st.sampled_from([None, 3]), boost=st.sampled_from([None, 7])),
    st.builds(Update, st.integers(1, 12), deadline_ns=st.integers(1, 10**9)),
    st.builds(Pause, st.sampled_from(["in_place", "retract", "abort"]), st.lists(st.integers(1, 12), max_size=2)),
    st.builds(Resume, st.lists(st.integers(1, 12), max_size=2)),
    st.builds(OpenGate, st.integers(1, 12), st.just(4)),
    st.builds(SetPolicy, st.sampled_from([*sorted(POLICIES), "priority", "no-such-policy"])),
    st.just(Flush()),
)
submits = st.tuples(
    st.sampled_from([[], [5] * 8, [5, 6, 7, 8] * 4]),
    st.lists(st.integers(3, 9), min_size=1, max_size=16),
    st.integers(0, 16),
    st.fixed_dictionaries(
        {
            "tenant": st.sampled_from(["", "secret-tenant", "other"]),
            "cache_salt": st.sampled_from(["", "", "salt"]),
            "routing_key": st.sampled_from([None, "a", "b"]),
            "priority": st.sampled_from([None, 0, 30]),
            "service_class": st.sampled_from([None, "high", "low", "strict", "of-my-own"]),
            "deadline_ns": st.sampled_from([None, 10**7]),
            "logprobs": st.sampled_from([None, LogprobOptions(prompt_from=1)]),
        }
    ),
    st.sampled_from([1, 1, 3]),
)
steps = st.lists(
    st.one_of(submits, submits, event_choices, st.sampled_from(["launch", "commit", "turns"])), max_size=40
)


def play(yard, script, depth):
    """Do what the script says, and stop strings of requests with output, then run to the end."""
    for number, action in enumerate(script):
        if isinstance(action, tuple):
            prefix, tail, tokens, fields, answers = action
            sampling = SamplingParams(
                max_new_tokens=tokens, temperature=0.0, n=answers, stop=["secret"], stop_token_ids=[11]
            )
            yard.submit(prefix + tail, sampling=sampling, **fields)
        elif action == "launch":
            if len(yard.tickets) < depth:
                yard.launch()
        elif action == "commit":
            yard.commit()
        elif action == "turns":
            turns(yard, depth, 4)
        else:
            take(yard, action)
        speakers = [one for one in yard.tokens if one not in yard.finished]
        if speakers and number % 7 == 3:
            yard.apply(StopFound(speakers[0], 1, "secret"))
    take(yard, Resume())
    take(yard, Resume(list(range(1, 60))))
    yard.run(depth)
    yard.scheduler.idle()


def turns(yard, depth, count):
    for _ in range(count):
        while len(yard.tickets) < depth and yard.launch():
            pass
        yard.commit()


def take(yard, event):
    """As the engine does: what the scheduler refuses ends nothing."""
    try:
        yard.apply(event)
    except ConfigError:
        assert isinstance(event, SetPolicy)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    script=steps,
    policy=st.sampled_from(sorted(POLICIES)),
    depth=st.integers(1, 3),
    tenants=st.booleans(),
    around=st.sampled_from([{}, {"enable_priority_scheduling": True}, {"enable_service_levels": True}]),
    key=st.sampled_from([KEY, None]),
)
def test_whatever_happens_a_tape_replays_into_the_same_plans(script, policy, depth, tenants, around, key):
    chosen = small(policy, depth, tenants=TENANTS if tenants else {}, **around)
    yard = TapedYard(chosen, small_info(depth), key=key, answer_tokens=(2, 12))
    play(yard, script, depth)
    report = assert_replays(yard.tape())
    assert report.plans == len(yard.plans)


def load(yard, requests=24):
    """Many requests with shared prefixes and everything that can distinguish them, more than fit at once, in bursts."""
    for number in range(requests):
        stops = list(range(number, number + 9))
        yard.submit(
            [5] * (number % 9) + [3 + number % 7] * 3,
            sampling=SamplingParams(max_new_tokens=5 + number % 11, temperature=0.0, stop_token_ids=stops),
            tenant=f"t{number % 3}",
            cache_salt="salt" * (number % 4 == 3),
            routing_key=f"k{number % 4}",
            service_class=("high", None, "low")[number % 3],
        )
        if number % 4 == 0:
            turns(yard, 2, 3)
        if number % 10 == 9:
            yard.run(2)
            yard.scheduler.idle()
        if number == 19:
            assert yard.scheduler.flush(yard.now)
    yard.run(2)


@pytest.mark.part(6)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_replays_and_so_does_a_learning_cost_model(policy):
    info = small_info()
    truth = get_profile("cpu", "smollm2-135m").cost()
    executor = MockExecutor(info, truth, sleep=False, answer_tokens=(4, 12))
    prior = LinearCost(truth.terms.scaled(0.25))
    yard = TapedYard(small(policy, step_budget="time", slo_tpot_ms=60.0), info, prior=prior, executor=executor)
    load(yard, 80)
    report = assert_replays(yard.tape())
    assert report.plans == len(yard.plans) > 80
    assert yard.tape().header.origin.info.eos_token_ids != info.eos_token_ids


def test_calls_that_found_nothing_to_plan_are_on_the_tape_too():
    """Such a call may end who waited for too long, and so make room in a full queue."""
    yard = TapedYard(replace(small(depth=1), max_queued_requests=1), small_info(1))
    yard.apply(Pause())
    late = yard.submit([5, 6])
    yard.now += 10**9
    assert not yard.launch()
    assert yard.finished[late].cause == "queue_timeout"
    next_one = yard.submit([5, 6])
    yard.apply(Resume())
    yard.run()
    assert yard.finished[next_one].reason == "length"
    assert_replays(yard.tape())


def test_idle_moments_are_on_the_tape():
    """The share that is reserved for answers is reset when nothing is left to do."""
    chosen = replace(small(depth=1), schedule_conservativeness=1.0, new_token_ratio_decay_steps=5, run_timeout_s=-1.0)
    yard = TapedYard(chosen, small_info(1))
    for _ in range(2):
        for number in range(4):
            yard.submit([3 + number, 4, 5], max_new=24)
        yard.run()
        assert yard.scheduler.idle() is None
    assert_replays(yard.tape())


def test_a_disguised_tape_holds_no_text_no_names_and_other_ids():
    yard = TapedYard(small(tenants=TENANTS), small_info())
    sampling = SamplingParams(max_new_tokens=3, stop=["secret"], stop_token_ids=[11], logit_bias={12: 1.0})
    yard.submit([41, 42, 43] * 4, sampling=sampling, tenant="secret-tenant", cache_salt="secret-salt", lora="secret-l")
    yard.submit([41, 42, 43], routing_key="secret-key", service_class="secret-class")
    yard.run(2)
    yard.apply(Cancel([1], "secret message"))
    data = yard.file.getvalue()
    assert b"secret" not in data
    assert np.array([41, 42, 43], np.int32).tobytes() not in data
    tape = yard.tape()
    first = next(iter(tape.records())).body.request
    assert first.prompt_ids.tolist() == first.prompt_ids[:3].tolist() * 4
    assert len(set(first.prompt_ids.tolist())) == 3
    assert first.tenant in tape.header.origin.settings.tenants
    assert tape.header.anonymized
    assert_replays(tape)


def test_a_plain_tape_keeps_ids_and_names():
    yard = TapedYard(small(), small_info(), key=None)
    yard.submit([41, 42, 43], tenant="me")
    request = next(iter(yard.tape().records())).body.request
    assert request.prompt_ids.tolist() == [41, 42, 43]
    assert (request.tenant, yard.tape().header.anonymized) == ("me", False)


def test_a_disguise_is_a_permutation_that_leaves_foreign_ids_alone():
    anonymizer = Anonymizer(97, KEY)
    everything = anonymizer.ids(np.arange(97, dtype=np.int32))
    assert sorted(everything.tolist()) == list(range(97))
    assert everything.tolist() != list(range(97))
    assert anonymizer.ids(np.array([-1, 5], np.int32)).tolist() == [-1, everything[5]]
    assert anonymizer.ids(np.array([-1, 5, 97, 500, -7], np.int32)).tolist() == [-1, everything[5], 97, 500, -7]
    assert anonymizer.few_ids([5, 10**12]) == [everything[5], 10**12]
    assert Anonymizer(97, b"another key").few_ids(range(97)) != everything.tolist()


def test_the_tape_ends_with_the_call_that_went_wrong():
    """What a scheduler raised, a replay raises again: a tape of a crash is a way to debug it."""
    yard = TapedYard(small(), small_info())
    yard.submit([5, 6], max_new=4)
    yard.launch()
    with pytest.raises(ValueError, match="arrived before that of"):
        yard.scheduler.commit(replace(yard.executor.collect(yard.tickets[0]), step=9), yard.now)
    *_, last = yard.tape().records()
    assert last.body == Raised("ValueError")
    assert replay(yard.tape()).difference is None
    cut = Tape(yard.file.getvalue()[: -len(b"\xaaValueError") - 14], "cut")
    assert "arrived before that of" in replay(cut).last_error


def recording():
    yard = TapedYard(small(), small_info())
    load(yard, 6)
    return yard


def test_the_first_difference_is_reported():
    data = bytearray(recording().file.getvalue())
    tape = Tape(bytes(data), "t")
    plans = [record for record in tape.records() if isinstance(record.body, Planned) and record.body.rows]
    place = data.index(plans[5].body.digest)
    data[place] ^= 1
    report = replay(Tape(bytes(data), "t"))
    assert (report.plans, report.equal) == (6, 5)
    assert report.difference is not None
    assert f"step {plans[5].body.step}: " in report.difference.here


def test_other_settings_show_as_a_difference():
    tape = recording().tape()
    origin = tape.header.origin
    tape.header = replace(
        tape.header, origin=replace(origin, settings=replace(origin.settings, chunked_prefill_size=4))
    )
    difference = replay(tape).difference
    assert difference is not None
    assert difference.tape != difference.here


@pytest.mark.parametrize("lost", [1, 7, 40, 333])
def test_a_truncated_tape_is_good_up_to_its_last_whole_record(lost):
    data = recording().file.getvalue()
    whole = Tape(data, "whole")
    cut = Tape(data[:-lost], "cut")
    assert whole.truncated_bytes == 0
    count = replay(cut).records
    assert replay(cut).difference is None
    assert count < replay(whole).records
    if lost == 1:
        assert cut.truncated_bytes > 0


def with_header(data, change):
    """A tape whose header `change` has changed."""
    magic, begin = data[: data.index(b"\n") + 1], data.index(b"\n") + 5
    size = struct.unpack_from("<I", data, len(magic))[0]
    header = msgspec.msgpack.decode(data[begin : begin + size])
    change(header)
    body = msgspec.msgpack.encode(header)
    return magic + struct.pack("<I", len(body)) + body + data[begin + size :]


def as_version(data, version, change):
    """A tape as an older version wrote it: `change` gets the class and the fields of each record."""
    begin = data.index(b"\n") + 1
    place = begin + 4 + struct.unpack_from("<I", data, begin)[0]
    parts = [b"tokenyard tape %d\n" % version, data[begin:place]]
    while place < len(data):
        length, kind, now = struct.unpack_from("<IBq", data, place)
        fields = msgspec.msgpack.decode(data[place + 13 : place + 13 + length])
        place += 13 + length
        change(KINDS[kind], fields)
        body = msgspec.msgpack.encode(fields)
        parts += [struct.pack("<IBq", len(body), kind, now), body]
    return b"".join(parts)


def as_version_1(data):
    """A tape as version 1 wrote it: each `Cancel` carries an HTTP status."""
    return as_version(data, 1, lambda kind, fields: fields.update(status=499) if kind is Cancel else None)


def test_a_tape_of_version_1_replays():
    yard = recording()
    yard.apply(Cancel([yard.submit([5, 6, 7])]))
    yard.run()
    old = as_version_1(yard.file.getvalue())
    assert b"status" in old
    report = replay(Tape(old, "old"))
    assert (report.difference, report.last_error) == (None, "")
    assert report.records == replay(yard.tape()).records


def test_sessions_stand_on_the_tape_and_change_no_plan():
    plain, with_facts = recording(), recording()
    for yard, facts in ((plain, {}), (with_facts, {"session": "s-1", "turn": 3, "age_ns": 250_000_000, "tenant": "t"})):
        number = yard.submit([5, 6, 7, 8], **facts)
        if facts:
            for event in (TurnEnded("s-1", "tool", 10**9, "t"), SessionEnded("s-1", "t")):
                yard.apply(event)
        yard.run()
        assert number in yard.finished
    bodies = [record.body for record in with_facts.tape().records()]
    plans = [
        [body for body in (r.body for r in yard.tape().records()) if type(body) is Planned]
        for yard in (plain, with_facts)
    ]
    assert plans[0] == plans[1]
    request = next(body.request for body in bodies if type(body) is Submit and body.request.session)
    assert (request.turn, request.age_ns) == (3, 250_000_000)
    named = [(body.session, body.tenant) for body in bodies if isinstance(body, TurnEnded | SessionEnded)]
    assert named == [(request.session, request.tenant)] * 2
    assert request.session != "s-1"
    assert request.tenant != "t"
    assert replay(with_facts.tape()).difference is None


def test_weights_stand_on_the_tape_by_another_name_and_replay():
    yard = recording()
    first = yard.submit([5, 6, 7, 8], max_new=6)
    for _ in range(3):
        yard.advance()
    yard.apply(WeightsUpdated("secret#v2"))
    second = yard.submit([5, 6, 7, 8])
    yard.run()
    assert {first, second} <= yard.finished.keys()
    assert b"secret" not in yard.file.getvalue()
    assert replay(yard.tape()).difference is None


def as_version_7(data):
    """A tape as version 7 wrote it: requests have no session, no turn and no age."""

    def change(kind, fields):
        if kind is Submit:
            for name in ("session", "turn", "age_ns"):
                del fields["request"][name]

    return as_version(data, 7, change)


def test_a_tape_of_version_7_replays():
    yard = recording()
    yard.submit([5, 6, 7])
    yard.run()
    report = replay(Tape(as_version_7(yard.file.getvalue()), "old"))
    assert (report.difference, report.last_error) == (None, "")
    assert report.records == replay(yard.tape()).records


def test_what_is_no_tape_is_refused_in_one_line():
    data = recording().file.getvalue()
    header = data[: data.index(b"\n") + 5]
    damaged = bytearray(data)
    begin = len(b"tokenyard tape 2\n") + 4
    damaged[begin : begin + 8] = b"\xc1" * 8
    for wrong, complaint in (
        (b"", "is not a tape"),
        (b"PK\x03\x04 something else", "is not a tape"),
        (data.replace(b"tape %d\n" % VERSION, b"tape 99\n", 1), "version 99"),
        (with_header(data, lambda header: header["origin"]["settings"].update(warp=9)), r"origin\.settings\.warp"),
        (header, "cut off within the header"),
        (bytes(damaged), "does not decode"),
    ):
        with pytest.raises(ConfigError, match=complaint) as caught:
            Tape(wrong, "x.tape")
        assert "\n" not in caught.value.message
        assert "x.tape" in caught.value.message


@pytest.mark.parametrize("frame", [struct.pack("<IBq", 2, 200, 5) + b"ab", struct.pack("<IBq", 2, 0, 5) + b"\xc1\xc1"])
def test_a_damaged_record_is_named(frame):
    tape = Tape(recording().file.getvalue() + frame, "x.tape")
    with pytest.raises(ConfigError, match=r"x\.tape: the record at byte \d+"):
        replay(tape)


def test_policies_that_are_code_are_loaded_only_when_allowed():
    tape = recording().tape()
    origin = tape.header.origin
    tape.header = replace(
        tape.header, origin=replace(origin, settings=replace(origin.settings, schedule_policy="os:system"))
    )
    with pytest.raises(ConfigError, match="--user-policies"):
        replay(tape)
    yard = recording()
    with pytest.raises(ConfigError):
        yard.scheduler.apply(SetPolicy("os:system"), yard.now)
    with pytest.raises(ConfigError, match="--user-policies"):
        replay(yard.tape())
    assert replay(yard.tape(), own_policies=True).difference is None


def test_every_event_there_is_has_its_kind():
    assert set(get_args(Event)) <= set(KINDS)


def test_a_number_in_use_is_refused_on_both_sides():
    yard = TapedYard(small(), small_info())
    for _ in range(2):
        request = Request(1, "r", np.array([5, 6], np.int32), SamplingParams(max_new_tokens=4))
        try:
            yard.scheduler.apply(Submit(request), 5)
        except ValueError as error:
            refusal = str(error)
    assert "in use" in refusal
    yard.run(2)
    assert_replays(yard.tape())
