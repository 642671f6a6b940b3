"""The bar over answers: its rate moves before the first answer is there."""

import io
import threading
from concurrent.futures import Future

import pytest
from rich.console import Console

from tokenyard.cli import progress


class FakeLLM:
    """An engine that has made ten more tokens at each look, and ends its answer after the fifth."""

    def __init__(self, answer, outcome):
        self.manager = self
        self.looks = 0
        self.answer, self.outcome = answer, outcome

    def snapshot(self):
        return {"counters": {"generated_tokens": 10 * self.looks}}

    def run(self, snapshot):
        self.looks += 1
        if self.looks == 5:
            threading.Thread(target=self.outcome, args=(self.answer,)).start()
        answered = Future()
        answered.set_result(snapshot)
        return answered


@pytest.fixture
def terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "REFRESH_S", 0.01)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    return shown


def test_tokens_are_counted_while_the_first_answer_comes(terminal):
    answer = Future()
    assert progress.follow(FakeLLM(answer, lambda one: one.set_result("text")), [answer]) == ["text"]
    before_the_end = [line for line in terminal.getvalue().replace("\r", "\n").splitlines() if "0/1" in line]
    assert "tokens/s" in terminal.getvalue()
    assert before_the_end


def test_a_failed_answer_is_raised(terminal):
    answer = Future()
    with pytest.raises(ValueError, match="not today"):
        progress.follow(FakeLLM(answer, lambda one: one.set_exception(ValueError("not today"))), [answer])


def test_nothing_is_polled_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO()))
    answer = Future()
    answer.set_result("text")
    llm = FakeLLM(answer, None)
    assert progress.follow(llm, [answer]) == ["text"]
    assert llm.looks == 0
