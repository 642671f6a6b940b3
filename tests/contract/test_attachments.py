"""What the event loop keeps to for every attachment, and every attachment for the event loop."""

import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.engines import mock_config, watched_mock
from tests.engine.test_driver import ScriptedPort, both_loops, submit
from tests.engine.verb_calls import choose, flush, replies, snapshot
from tokenyard.base import (
    NS_PER_S,
    ConfigError,
    InvalidRequestError,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    Store,
    TokenBatch,
)
from tokenyard.engine.processes.engine_config import DisaggConfig, EngineConfig, KvStoreConfig
from tokenyard.engine.processes.messages import NO_REPLY, RpcReply, RpcRequest
from tokenyard.engine.scheduler_process import scheduler_loop
from tokenyard.engine.scheduler_process.attachments.base import Attachment, AttachmentError, DeferredReply
from tokenyard.engine.scheduler_process.attachments.disagg import open_disagg_connector
from tokenyard.engine.scheduler_process.attachments.grammar import GrammarCompiler
from tokenyard.engine.scheduler_process.attachments.hooks import AttachmentHooks
from tokenyard.engine.scheduler_process.attachments.kv_events import KvEvents
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.engine.scheduler_process.attachments.lookahead import LookaheadClient
from tokenyard.engine.scheduler_process.attachments.lora import LoraLoader, NoAdapters
from tokenyard.engine.scheduler_process.attachments.priority import PriorityUpdates
from tokenyard.engine.scheduler_process.attachments.tenant_usage import TenantUsageExchange
from tokenyard.engine.scheduler_process.attachments.weights import WeightUpdater
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.stalls import HELD_REASONS
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.scheduler_process.health.watchdog import Watchdog
from tokenyard.kv_layout.layout import PoolView, map_pages
from tokenyard.kv_store.store import MemoryStore
from tokenyard.scheduler import Scheduler
from tokenyard.scheduler.row_state import HELD_BY

SHARED = {"page_size": 4, "enable_kv_events": True, "enable_priority_scheduling": True}
EACH_TURN = ("poll", "while_device_runs", "on_output", "sent")
"""Hooks that a loop calls without a cause."""


class Noted(Attachment):
    """Overrides every hook, notes each call, and does in `act(hook)` what a test wants."""

    def __init__(self, name, calls, act=lambda hook: None):
        self.name, self.calls, self.act = name, calls, act

    def _note(self, hook):
        self.calls.append((self.name, hook))
        self.act(hook)

    def submitted(self, request, now):
        self._note("submitted")
        return request

    def accepted(self, request, now):
        self._note("accepted")

    def poll(self, now):
        self._note("poll")
        return ()

    def take(self, moves):
        self._note("take")
        return moves

    def while_device_runs(self, now):
        self._note("while_device_runs")
        return ()

    def on_output(self, batch):
        self._note("on_output")

    def sent(self, batch):
        self._note("sent")

    def policy_changed(self, event, now):
        self._note("policy_changed")

    def before_flush(self, now):
        self._note("before_flush")
        return ()

    def verbs(self):
        return {f"ask_{self.name}": lambda now: self._note("verbs")}

    def busy(self):
        self._note("busy")
        return False

    def wakeup_ns(self):
        self._note("wakeup_ns")
        return None

    def held_reasons(self):
        self._note("held_reasons")
        return {}

    def describe(self, now):
        self._note("describe")
        return {}

    def close(self):
        self._note("close")


HOOKS = [name for name in vars(Attachment) if callable(vars(Attachment)[name]) and name not in ("close", "verbs")]
REFUSING = ("submitted", "accepted")
"""Hooks that refuse a request if they raise."""


class NotedScheduler(Scheduler):
    """A scheduler that notes when it plans, and wants one page stored."""

    def __init__(self, settings, info, calls):
        super().__init__(settings, info)
        self.calls, self.moves = calls, [Store(1, "", np.empty(0, np.int32), np.empty(0, np.int32))]

    def plan(self, now):
        self.calls.append(("loop", "plan"))
        return super().plan(now)

    def drain_moves(self):
        moves, self.moves = self.moves, []
        return moves


class NotedPort(ScriptedPort):
    """Notes when output is sent, and lets a held request wait until the loop has logged why."""

    def __init__(self, calls, *groups):
        super().__init__(*groups)
        self.calls, self.quiet_turns = calls, 8

    def receive(self, timeout_ns):
        if timeout_ns and self.groups and not self.groups[0] and self.quiet_turns:
            self.quiet_turns -= 1
            return []
        return super().receive(timeout_ns)

    def send(self, message):
        super().send(message)
        if isinstance(message, TokenBatch):
            self.calls.append(("loop", "send"))


EVERYTHING = ([submit(1)], [RpcRequest(7, "ask_first")], [flush(8), choose(9, "lpm")])
HELD = ([submit(2), Pause(numbers=[2])], [], [Resume([2])])


def run(loop, depth, attachments, calls, *groups, state=None):
    executor = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    scheduler = NotedScheduler(SchedulerSettings(max_in_flight=depth), executor.info, calls)
    port = NotedPort(calls, *groups)
    loop(Driver(scheduler, executor, port, log=StepLog(0), state=state or LoopState(), attachments=attachments))
    return port, scheduler


@both_loops
def test_hooks_are_called_in_order_and_what_leaves_in_reverse_order(loop, depth):
    calls = []
    attachments = [Noted("first", calls), Noted("second", calls)]
    port, _ = run(loop, depth, attachments, calls, *EVERYTHING, *HELD)
    assert {hook for _, hook in calls} == {*HOOKS, "verbs", "plan", "send"}
    assert len(port.tokens()[1]) == len(port.tokens()[2]) == 4
    for hook in HOOKS:
        names = [name for name, called in calls if called == hook]
        order = ["second", "first"] if hook in ("take", "on_output", "sent") else ["first", "second"]
        assert names == order * (len(names) // 2), hook
    first = [hook for name, hook in calls if name in ("first", "loop")]
    turns = " ".join(hook for hook in first if hook in ("submitted", "accepted", "poll", "plan", "on_output", "send"))
    assert "submitted accepted poll plan on_output send" in turns, "a request is seen before the step with it"
    for place, hook in enumerate(first):
        if hook == "plan":
            assert first[place - 1] == "poll"
        if hook == "send":
            assert first[place - 1] in ("on_output", "take")
            assert first[place + 1] == "sent"
    assert first[first.index("take") - 1] == "plan"


@both_loops
@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in REFUSING])
def test_an_optional_attachment_that_raises_is_left_out(loop, depth, hook, caplog):
    calls = []

    def act(called):
        if called == hook:
            raise RuntimeError("out of luck")

    broken = Noted("broken", calls, act)
    broken.optional = True
    port, _ = run(loop, depth, [broken, Noted("first", calls)], calls, *EVERYTHING, *HELD, [snapshot(3)])
    assert f"the attachment broken failed in {hook}: out of luck; the engine goes on without it" in caplog.text
    assert {number: len(tokens) for number, tokens in port.tokens().items()} == {1: 4, 2: 4}
    assert calls.count(("broken", hook)) == 1
    assert replies(port)[3].refusal == ""
    last = len(calls) - calls[::-1].index(("broken", hook))
    assert "broken" not in {name for name, called in calls[last:] if called in EACH_TURN}


@both_loops
@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in REFUSING])
def test_any_other_attachment_that_raises_ends_the_loop_with_its_name(loop, depth, hook):
    def act(called):
        if called == hook:
            raise RuntimeError("out of luck")

    with pytest.raises(AttachmentError, match=f"the attachment broken failed in {hook}: out of luck"):
        run(loop, depth, [Noted("broken", [], act)], [], *EVERYTHING, *HELD)


class Refuses(Attachment):
    """Refuses requests 2 and 4 in one of its hooks."""

    def __init__(self, where):
        self.where = where

    def _refuse(self, where, request):
        if where == self.where and request.number in (2, 4):
            raise InvalidRequestError("not this one") if request.number == 2 else RuntimeError("out of luck")
        return request

    def submitted(self, request, now):
        return self._refuse("submitted", request)

    def accepted(self, request, now):
        self._refuse("accepted", request)


@both_loops
@pytest.mark.parametrize("where", REFUSING)
def test_a_request_that_an_attachment_refuses_ends_and_no_other_does(loop, depth, where):
    ended = []

    class Follows(Attachment):
        def on_output(self, batch):
            ended.extend(finish.number for finish in batch.finished)

    groups = [submit(1), submit(2, n=2), submit(4)], [submit(5)]
    port, scheduler = run(loop, depth, [Follows(), Refuses(where)], [], *groups)
    ends = {number: (finish.cause, finish.message) for number, finish in port.finished().items()}
    assert {number: len(tokens) for number, tokens in port.tokens().items()} == {1: 4, 5: 4}
    assert ends[2] == ends[3] == ("invalid", "not this one")
    assert ends[4] == ("failed", "out of luck")
    assert sorted(ended) == sorted(ends) == [1, 2, 3, 4, 5], "the others hear of each end once"
    assert scheduler.idle() is None


@both_loops
def test_calls_are_answered_refused_or_answered_later(loop, depth):
    later = DeferredReply()

    class Answers(Attachment):
        def verbs(self):
            return {"now": self._now, "later": lambda now: later, "no": self._no, "broken": self._broken}

        def poll(self, now):
            if len(port.groups) == 0 and not later.done():
                later.set_result("at last")
            return ()

        def _now(self, now, word):
            return word * 2

        def _no(self, now):
            raise ConfigError("not now")

        def _broken(self, now):
            raise RuntimeError("out of luck")

    executor = watched_mock(step_ms=0.0, max_total_tokens=128)
    scheduler = Scheduler(SchedulerSettings(max_in_flight=depth), executor.info)
    calls = [RpcRequest(1, "now", {"word": "ab"}), RpcRequest(2, "later"), RpcRequest(3, "no"), RpcRequest(4, "broken")]
    port = ScriptedPort([*calls, RpcRequest(5, "nonsense"), RpcRequest(NO_REPLY, "now", {"word": "c"})], [submit(1)])
    loop(Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), attachments=[Answers()]))
    found = replies(port)
    assert found[1] == RpcReply(1, "abab")
    assert found[2] == RpcReply(2, "at last")
    assert found[3] == RpcReply(3, refusal="not now")
    assert found[4] == RpcReply(4, refusal="broken failed: out of luck")
    assert "nonsense" in found[5].refusal
    assert set(found) == {1, 2, 3, 4, 5}
    order = [message.call_id for message in port.sent if isinstance(message, RpcReply)]
    assert order == [1, 3, 4, 5, 2]


def test_two_attachments_cannot_answer_the_same_call():
    executor = watched_mock(step_ms=0.0)
    scheduler = Scheduler(SchedulerSettings(), executor.info)
    for attachments in ([Noted("a", []), Noted("a", [])], [Flushes()]):
        with pytest.raises(ValueError, match="answered already"):
            Driver(scheduler, executor, ScriptedPort(), log=StepLog(0), state=LoopState(), attachments=attachments)


class Flushes(Attachment):
    name = "flushes"

    def verbs(self):
        return {"flush": lambda now: True}


@pytest.mark.parametrize("hook", [*HOOKS, "verbs"])
def test_an_attachment_that_stalls_is_named(hook):
    state, seen = LoopState(), []

    def act(called):
        if called == hook:
            seen.append(state.beat(time.monotonic_ns() + 60 * NS_PER_S))

    run(event_loop_normal, 1, [Noted("first", [], act), Noted("second", [])], [], *EVERYTHING, *HELD, state=state)
    assert {beat.doing for beat in seen} == {"first"}
    assert state.beat(time.monotonic_ns()).doing in ("host", "idle")

    class Reported(Exception):
        pass

    def report(child):
        raise Reported(child.failure)

    core = Scheduler(SchedulerSettings(), watched_mock(step_ms=0.0).info)
    with pytest.raises(Reported, match="the attachment first has not ended for 6"):
        Watchdog(30.0, core, report, lambda: None).check(seen[0])
    Watchdog(90.0, core, report, lambda: None).check(seen[0])


def test_a_hook_that_is_not_overridden_is_never_called(monkeypatch):
    def never(*_):
        raise AssertionError("a default hook was called")

    for hook in HOOKS:
        monkeypatch.setattr(Attachment, hook, never)
    ends = []

    class OnlyEnds(Attachment):
        def on_output(self, batch):
            ends.extend(batch.finished)

    run(event_loop_normal, 1, [OnlyEnds()], [], *EVERYTHING[::2], *HELD)
    assert [finish.number for finish in ends] == [1, 2]


def test_hooks_have_lists_of_those_that_override_them():
    class OnlyPolls(Attachment):
        def poll(self, now):
            return ()

    hooks = AttachmentHooks([OnlyPolls(), OnlyPolls()], LoopState())
    assert {hook: len(getattr(hooks, hook)) for hook in HOOKS} == {**dict.fromkeys(HOOKS, 0), "poll": 2}


@both_loops
def test_a_wakeup_bounds_the_wait(loop, depth):
    waits = []

    class Wakes(Attachment):
        due = time.monotonic_ns() + NS_PER_S // 2

        def wakeup_ns(self):
            return self.due

    class Port(ScriptedPort):
        def receive(self, timeout_ns):
            waits.append(timeout_ns)
            return super().receive(timeout_ns)

    for attachments in ([], [Wakes()]):
        executor = watched_mock(step_ms=0.0)
        scheduler = Scheduler(SchedulerSettings(max_in_flight=depth), executor.info)
        loop(Driver(scheduler, executor, Port(), log=StepLog(0), state=LoopState(), attachments=attachments))
    assert waits[-1] <= NS_PER_S // 2 < waits[len(waits) // 2 - 1]


def test_a_policy_that_an_attachment_sets_is_not_reported_to_attachments():
    changes = []

    class Chooses(Attachment):
        def poll(self, now):
            return [SetPolicy("lpm")] if scheduler.snapshot(now).policy == "fcfs" else []

        def policy_changed(self, event, now):
            changes.append(event.name)

    executor = watched_mock(step_ms=0.0)
    scheduler, port = Scheduler(SchedulerSettings(), executor.info), ScriptedPort([submit(1)], [choose(2, "sjf")])
    event_loop_normal(Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), attachments=[Chooses()]))
    assert changes == ["sjf"]
    assert len(port.tokens()[1]) == 4


def test_the_example_of_the_page_works():
    page = (Path(__file__).resolve().parents[2] / "docs/attachments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    block = RpcRequest(1, "block_tenant", {"tenant": "b"})
    groups = [by("a", 1), by("b", 2)], [block], [by("b", 3), by("a", 4), snapshot(5)]
    port, _ = run(event_loop_normal, 1, [names["TenantGuard"]()], [], *groups)
    assert {number: len(tokens) for number, tokens in port.tokens().items()} == {1: 4, 2: 4, 4: 4}
    assert (port.finished()[3].cause, port.finished()[3].message) == ("invalid", "the tenant 'b' is blocked")
    assert replies(port)[5].value["requests_by_tenant"] == {"a": 2, "b": 1}


def by(tenant, number):
    event = submit(number)
    event.request.tenant = tenant
    return event


# ---- every attachment of the package ---------------------------------------------------------------------------


class Publisher:
    """A publisher of KV events that keeps what it is given."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events

    publish_snapshot = publish


@dataclass
class Parts:
    """What attachments are made of."""

    core: Scheduler
    executor: object
    port: ScriptedPort

    def config(self, **fields):
        return EngineConfig(model_path="", executor="mock", **fields)

    def deliver(self, message):
        self.port.groups.insert(0, [message])


def make_disagg(parts):
    config = parts.config(disagg=DisaggConfig(role="both", host="127.0.0.1"))
    return open_disagg_connector(config, parts.core, parts.executor, parts.deliver)


def make_kv_store(parts):
    executor = parts.executor
    pool = PoolView(map_pages(executor.pieces), executor.info.num_pages)
    config = KvStoreConfig(enabled=True, backend="disk")
    return KvStoreConnector(config, MemoryStore(100), pool, parts.core, executor.info, parts.deliver)


MAKERS = {
    "adapters off": lambda parts: NoAdapters(),
    "weights": lambda parts: WeightUpdater(parts.executor, parts.core, parts.deliver),
    "lora": lambda parts: LoraLoader(parts.executor, parts.core, parts.deliver, None),
    "disagg": make_disagg,
    "kv_store": make_kv_store,
    "grammar": lambda parts: GrammarCompiler(parts.executor, parts.deliver, str),
    "priority": lambda parts: PriorityUpdates(lambda view, system: view.number % 3, "mod:f", parts.core),
    "lookahead": lambda parts: LookaheadClient(parts.core, SchedulerSettings()),
    "tenant_usage": lambda parts: TenantUsageExchange(parts.core, parts.port.send),
    "kv_events": lambda parts: KvEvents(parts.core, Publisher()),
}
every_attachment = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def make_parts(depth=1, *groups):
    executor = watched_mock(step_ms=0.0, page_size=4, max_total_tokens=256, max_pool_rows=8)
    settings = SchedulerSettings(max_in_flight=depth, enable_hierarchical_cache=True, **SHARED)
    return Parts(Scheduler(settings, executor.info), executor, ScriptedPort(*groups))


def serve(loop, depth, makers):
    """The tokens of a few requests, some with the same prompt and one with two answers."""
    prompt = range(5, 70)
    first, second = [submit(1, prompt), submit(2, prompt)], [submit(3, prompt), submit(4, (9, 9, 9), n=2)]
    parts = make_parts(depth, first, second, [flush(6), snapshot(7)])
    attachments = [make(parts) for make in makers]
    loop(Driver(parts.core, parts.executor, parts.port, log=StepLog(0), state=LoopState(), attachments=attachments))
    for attachment in reversed(attachments):
        attachment.close()
    assert not parts.core.has_work
    assert replies(parts.port)[7].refusal == ""
    return parts.port.tokens()


@both_loops
@pytest.mark.parametrize("names", [*([name] for name in MAKERS), list(MAKERS)[1:]], ids=[*MAKERS, "all"])
def test_answers_are_the_same_with_it(loop, depth, names):
    assert serve(loop, depth, [MAKERS[name] for name in names]) == serve(loop, depth, [])


@every_attachment
def test_an_idle_attachment_answers_every_hook(make):
    threads = set(threading.enumerate())
    parts = make_parts()
    attachment = make(parts)
    try:
        now = time.monotonic_ns()
        hooks = AttachmentHooks([attachment], LoopState())
        request = Request(1, "r", np.arange(3, 9, dtype=np.int32), SamplingParams())
        for submitted in hooks.submitted:
            assert submitted(replace(request), now).number == 1
        for hook in (*hooks.poll, *hooks.while_device_runs, *hooks.before_flush):
            assert list(hook(now)) == []
        moves = [object()]
        assert all(take(moves) == moves for take in hooks.take), "a move that is not its own is left to others"
        assert not any(busy() for busy in hooks.busy)
        assert all(wakeup() is None or wakeup() > now for wakeup in hooks.wakeup_ns)
        assert all(set(reasons()) <= set(HELD_BY.values()) - set(HELD_REASONS) for reasons in hooks.held_reasons)
        for describe in hooks.describe:
            assert msgspec.msgpack.encode(describe(now))
        assert attachment.name not in ("", "host", "idle", "step", "policy")
    finally:
        attachment.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads, "threads that it left"


def test_every_cause_of_a_wait_has_a_text():
    parts = make_parts()
    attachments = [make(parts) for make in list(MAKERS.values())[1:]]
    texts = [reasons() for reasons in AttachmentHooks(attachments, LoopState()).held_reasons]
    for attachment in attachments:
        attachment.close()
    assert set(HELD_REASONS).union(*texts) == set(HELD_BY.values())


def closes(monkeypatch, **changes):
    """A scheduler loop with an attachment of a test; returns the loop, and the calls of its hooks."""
    calls = []
    monkeypatch.setattr(scheduler_loop, "create_priority_updates", lambda path, core: Noted("first", calls))
    for name, value in changes.items():
        monkeypatch.setattr(scheduler_loop, name, value)
    return calls, lambda port: scheduler_loop.SchedulerLoop(mock_config(), port, lambda message: None)


def test_an_attachment_is_closed_once_after_its_last_hook(monkeypatch):
    calls, make = closes(monkeypatch)
    loop = make(ScriptedPort([submit(1)]))
    loop.run()
    assert ("first", "close") not in calls
    loop.close()
    assert calls.count(("first", "close")) == 1
    assert calls[-1] == ("first", "close")


def test_an_attachment_is_closed_if_a_later_one_cannot_be_opened(monkeypatch):
    def refuse(core, settings):
        raise ConfigError("no lookahead today")

    calls, make = closes(monkeypatch, LookaheadClient=refuse)
    with pytest.raises(ConfigError, match="no lookahead today"):
        make(ScriptedPort())
    assert calls == [("first", "close")]
