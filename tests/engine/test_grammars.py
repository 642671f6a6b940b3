"""Requests that wait for their grammar: opened, refused, too slow."""

import threading
import time

import numpy as np
import pytest

from tokenyard.base import Cancel, InvalidRequestError, OpenGate, Request, SamplingParams
from tokenyard.engine.scheduler_process.attachments import grammar as grammars
from tokenyard.engine.scheduler_process.attachments.grammar import GrammarCompiler
from tokenyard.scheduler.row_state import Gate


class Compiling:
    """An executor that takes some grammars, refuses others, and works on the rest until it is released."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def compile_grammar(self, text: str, tokenizer) -> None:
        if text == "bad":
            raise InvalidRequestError("no such rule")
        if text == "broken":
            raise RuntimeError("a fault")
        if text == "slow":
            self.go_on.wait(10)


@pytest.fixture
def compiling():
    executor = Compiling()
    yield executor
    executor.go_on.set()


def outcome(executor, *texts: str, n: int = 1, count: int | None = None):
    events = []
    compiler = GrammarCompiler(executor, events.append, lambda: "")
    for place, text in enumerate(texts):
        sampling = SamplingParams(n=n)
        compiler.accepted(Request(10 * (place + 1), "r", np.array([1], np.int32), sampling, grammar=text), 0)
    until = time.monotonic() + 8
    while len(events) < (count or len(texts)) and time.monotonic() < until:
        time.sleep(0.005)
    compiler.close()
    return events


def test_a_grammar_that_compiles_opens_the_gate_of_every_answer(compiling):
    events = outcome(compiling, "good", n=3, count=3)
    assert events == [OpenGate(10, Gate.GRAMMAR), OpenGate(11, Gate.GRAMMAR), OpenGate(12, Gate.GRAMMAR)]


def test_a_wrong_one_ends_its_request_and_no_other(compiling):
    events = outcome(compiling, "bad", "good", "broken")
    by_number = {event.number if isinstance(event, OpenGate) else event.numbers[0]: event for event in events}
    assert isinstance(by_number[10], Cancel)
    assert (by_number[10].cause, by_number[10].message) == ("invalid", "no such rule")
    assert isinstance(by_number[20], OpenGate)
    assert by_number[30].cause == "failed"


def test_one_that_takes_too_long_is_given_up_and_later_ones_are_refused_as_busy(compiling, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.2)
    events = outcome(compiling, "slow", "slow", "good")
    causes = {event.numbers[0]: event.cause for event in events if isinstance(event, Cancel)}
    assert causes == {10: "invalid", 20: "invalid", 30: "queue_full"}
