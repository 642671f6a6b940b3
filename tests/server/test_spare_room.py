"""Lines of a batch take what nobody else uses: steps to an interactive request's first token, with and without one."""

import asyncio
import gc
import random
from types import SimpleNamespace

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import Pause, Resume, SchedulerSettings
from tokenyard.base.fleet_headers import BATCH_LINE_HEADER
from tokenyard.engine.frontend.io_struct import OutputDelta
from tokenyard.server.openai import batches
from tokenyard.server.openai.batches import SpareRoom

CHUNK = 16


class Engine:
    """A scheduler in steps, and what the room of batches sees of it."""

    phase = "ready"

    def __init__(self):
        settings = SchedulerSettings(
            page_size=4, context_length=256, chunked_prefill_size=CHUNK, max_running_requests=8, max_in_flight=1
        )
        self.yard = Yard(settings, make_info(160, 4, 10, 256))
        self.control = self
        self.options = SimpleNamespace(info={"max_running_requests": 8})
        self.numbers = {}
        self.draw = random.Random(3)

    async def snapshot(self, timeout_s):
        found = self.yard.scheduler.snapshot(self.yard.now)
        return {name: getattr(found, name) for name in ("waiting", "running", "used_tokens", "total_tokens")}

    def hold(self, rids, *, held):
        numbers = [self.numbers[rid] for rid in rids if self.numbers[rid] not in self.yard.finished]
        if numbers:
            self.yard.apply(Pause(numbers=numbers) if held else Resume(numbers))

    def submit(self, rid, prompt_tokens, answer_tokens):
        prompt = [self.draw.randrange(3, 90) for _ in range(prompt_tokens)]
        self.numbers[rid] = self.yard.submit(prompt, answer_tokens)
        return self.numbers[rid]


def first_token_steps(engine, room, rid, each_step=lambda: None):
    """The steps until an interactive request has its first token."""
    observer = room.observe(SimpleNamespace(rid=rid), {})
    number = engine.submit(rid, 40, 6)
    steps = 0
    while number not in engine.yard.tokens:
        assert engine.yard.advance()
        each_step()
        steps += 1
        assert steps < 100
    observer.delta(None)
    return steps


def run_lines(engine, room, count):
    """Start lines as the runner does, and watch their first tokens."""
    lines = {}

    def turn():
        room.adapt()
        free = asyncio.run(room.free(sum(number not in engine.yard.finished for number, _ in lines.values())))
        for _ in range(free if len(lines) < count else 0):
            rid = f"batch-{len(lines)}"
            room.started(rid)
            observer = room.observe(SimpleNamespace(rid=rid), {})
            lines[rid] = engine.submit(rid, engine.draw.randrange(20, 120), 30), observer
        for rid, (number, observer) in lines.items():
            if number in engine.yard.tokens:
                finish = engine.yard.finished.get(number)
                sizes = (0, 0) if finish is None else (finish.prompt_tokens, finish.completion_tokens)
                observer.delta(OutputDelta(0, "", [], *sizes, 0, finish))
            if number in engine.yard.finished:
                room.ended(rid)

    return lines, turn


def test_an_interactive_request_waits_at_most_one_step_more_beside_a_batch():
    alone = first_token_steps(Engine(), SpareRoom(Engine()), "alone")
    engine = Engine()
    room = SpareRoom(engine)
    lines, turn = run_lines(engine, room, 60)
    beside = []
    for number in range(30):
        for _ in range(engine.draw.randrange(1, 25)):
            turn()
            engine.yard.advance()
        beside.append(first_token_steps(engine, room, f"chat-{number}", turn))
    for _ in range(3000):
        turn()
        engine.yard.advance()
    assert max(beside) <= 1.2 * alone + 1
    assert len(lines) == 60
    assert all(engine.yard.finished[number].reason == "length" for number, _ in lines.values()), "the batch ends too"


def test_lines_that_run_give_way_to_a_request_that_waits_for_long(monkeypatch):
    monkeypatch.setattr(batches, "HOLD_ALL_S", 0.0)
    engine = Engine()
    room = SpareRoom(engine)
    lines, turn = run_lines(engine, room, 20)
    for _ in range(40):
        turn()
        engine.yard.advance()
    running = engine.yard.scheduler.snapshot(1).running
    waiting = room.observe(SimpleNamespace(rid="chat"), {})
    room.adapt()
    assert asyncio.run(room.free(len(lines))) == 0
    assert running > 0
    assert engine.yard.scheduler.snapshot(1).running == 0
    # A client that goes away without an answer holds nothing back.
    del waiting
    gc.collect()
    room.adapt()
    engine.yard.advance()
    assert engine.yard.scheduler.snapshot(1).running + engine.yard.scheduler.snapshot(1).prefilling > 0


def test_a_line_that_a_router_sends_gives_way_until_it_has_ended(monkeypatch):
    monkeypatch.setattr(batches, "POLL_S", 0.001)

    async def main():
        engine = Engine()
        engine.hold = lambda rids, *, held: held_calls.append((list(rids), held))
        held_calls = []
        room = SpareRoom(engine)
        line = room.observe(SimpleNamespace(rid="line"), {BATCH_LINE_HEADER: "1"})
        chat = room.observe(SimpleNamespace(rid="chat"), {})
        assert held_calls == [(["line"], True)]
        chat.delta(None)
        await asyncio.sleep(0.02)
        assert held_calls[1:] == [(["line"], False)]
        # One that arrives while a request waits is held back as well.
        waiting = room.observe(SimpleNamespace(rid="chat-2"), {})
        second = room.observe(SimpleNamespace(rid="line-2"), {BATCH_LINE_HEADER: "1"})
        await asyncio.sleep(0.02)
        assert held_calls[2:] == [(["line"], True), (["line-2"], True)]
        # Lines whose router is gone are forgotten, and nothing is watched any more.
        del line, second, waiting
        gc.collect()
        await asyncio.sleep(0.02)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
