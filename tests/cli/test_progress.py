"""The bar over answers: its rate moves before the first answer is there."""

import io
import threading
from concurrent.futures import Future

import pytest
from rich.console import Console

from tokenyard import progress


class FakeEngine:
    """An engine that has made ten more tokens at each look, and ends its answer after the fifth."""

    def __init__(self, answer, outcome):
        self.looks = 0
        self.answer, self.outcome = answer, outcome

    def generated_tokens(self):
        self.looks += 1
        if self.looks == 5:
            threading.Thread(target=self.outcome, args=(self.answer,)).start()
        return 10 * self.looks


@pytest.fixture
def terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "REFRESH_S", 0.01)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    return shown


def test_tokens_are_counted_while_the_first_answer_comes(terminal):
    answer = Future()
    engine = FakeEngine(answer, lambda one: one.set_result("text"))
    assert progress.follow([answer], engine.generated_tokens) == ["text"]
    before_the_end = [line for line in terminal.getvalue().replace("\r", "\n").splitlines() if "0/1" in line]
    assert "tokens/s" in terminal.getvalue()
    assert before_the_end


def test_a_failed_answer_is_raised(terminal):
    answer = Future()
    engine = FakeEngine(answer, lambda one: one.set_exception(ValueError("not today")))
    with pytest.raises(ValueError, match="not today"):
        progress.follow([answer], engine.generated_tokens)


def test_nothing_is_polled_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO()))
    answer = Future()
    answer.set_result("text")
    engine = FakeEngine(answer, None)
    assert progress.follow([answer], engine.generated_tokens) == ["text"]
    assert engine.looks == 0
