"""Compiles grammars in threads. The result reaches the scheduler as an event, like all that depends on wall time."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from tokenyard.base import Cancel, Executor, InvalidRequestError, OpenGate, Request
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.scheduler.row_state import Gate

logger = logging.getLogger(__name__)

WORKERS = 2
"""A compilation cannot be broken off, so a few hostile ones must not take all cores."""

MAX_COMPILE_S = 5.0

Deliver = Callable[[OpenGate | Cancel], None]


class _GrammarTask:
    """One request that waits for its grammar. Only the first outcome counts."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request = request
        self.begun = False
        self._deliver = deliver
        self._lock = threading.Lock()
        self._ended = False
        self._timer = threading.Timer(MAX_COMPILE_S, self._too_long)
        self._timer.daemon = True
        self._timer.start()

    def end(self, refusal: Cancel | None) -> None:
        """Let the request go on, or end it."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._timer.cancel()
        numbers = _numbers(self.request)
        if refusal is not None:
            self._deliver(refusal)
            return
        for number in numbers:
            self._deliver(OpenGate(number, Gate.GRAMMAR))

    def _too_long(self) -> None:
        numbers = _numbers(self.request)
        if self.begun:
            message = f"compiling the grammar takes longer than {MAX_COMPILE_S:g} s; make it smaller"
            self.end(Cancel(numbers, message, "invalid"))
        else:
            self.end(Cancel(numbers, "other grammars are being compiled; try again later", "queue_full"))


class GrammarCompiler(Attachment):
    """Compiles the grammars of requests that wait behind `Gate.GRAMMAR`.

    deliver: takes events to the scheduler, from any thread. tokenizer: gives the text of tokenizer.json.
    """

    name = "grammar"

    def __init__(self, executor: Executor, deliver: Deliver, tokenizer: Callable[[], str]) -> None:
        self._executor = executor
        self._deliver = deliver
        self._tokenizer = tokenizer
        self._jobs: queue.SimpleQueue[_GrammarTask | None] = queue.SimpleQueue()
        self._workers = 0

    def accepted(self, request: Request, now: int) -> None:
        """Begin with the grammar of a request, if it has one."""
        if not request.grammar:
            return
        if self._workers < WORKERS:
            # Daemons, as the process must not wait at its end for one that is stuck.
            threading.Thread(target=self._work, name=f"grammar-{self._workers}", daemon=True).start()
            self._workers += 1
        self._jobs.put(_GrammarTask(request, self._deliver))

    def held_reasons(self) -> Mapping[str, str]:
        """Requests wait for their grammars."""
        return {"grammar": "until a grammar is compiled"}

    def close(self) -> None:
        """Begin nothing more; what runs is left alone."""
        for _ in range(self._workers):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._compile(job)

    def _compile(self, job: _GrammarTask) -> None:
        job.begun = True
        refusal: Cancel | None = None
        numbers = _numbers(job.request)
        try:
            self._executor.compile_grammar(job.request.grammar, self._tokenizer)
        except InvalidRequestError as error:
            refusal = Cancel(numbers, error.message, "invalid")
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            refusal = Cancel(numbers, f"the grammar could not be compiled: {error}", "failed")
        job.end(refusal)


def _numbers(request: Request) -> list[int]:
    return list(range(request.number, request.number + request.sampling.n))
