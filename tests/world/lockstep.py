"""Blocking code in the world: threads of which one runs at a time, and only while the event loop waits for it."""

import contextvars
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.world.clock import NS, Clock
from tests.world.loop import current
from tests.world.network import Process

running: contextvars.ContextVar["LockstepThread | None"] = contextvars.ContextVar("running", default=None)
"""The thread that the caller is in; None on the event loop."""


class Killed(BaseException):
    """The thread's process has ended."""


ROOMS = ("engine/scheduler_process/attachments", "executor/distributed", "kv_store", "disagg")
"""Whose code threads share with the scheduler's loop."""


class Preemption:
    """Where threads lose the processor between two lines, so that others go on from there: anywhere in ROOMS, which is
    more often than a real kernel does it, and the same each time.
    """

    def __init__(self, rng: random.Random, chance: float = 0.01, longest_s: float = 0.003) -> None:
        self._rng, self._chance, self._longest_s = rng, chance, longest_s
        self._shared: dict[str, bool] = {}

    def shared(self, file: str) -> bool:
        """Whether the code of a file is in ROOMS."""
        found = self._shared.get(file)
        if found is None:
            found = self._shared[file] = any(f"/tokenyard/{room}/" in file for room in ROOMS)
        return found

    def pause_ns(self) -> int:
        """How long the thread that has come to a line stops there, 0 for not at all."""
        return 1 + round(self._rng.uniform(0, self._longest_s) * NS) if self._rng.random() < self._chance else 0


class LockstepThread:
    """Runs `main` in a thread. Of the event loop and all such threads exactly one runs at a time, so that a world is
    the same each time.

    error: what ended `main`; None while it runs and after a kill.
    """

    def __init__(self, loop: Any, clock: Clock, process: Process, main: Callable[[], None]) -> None:
        self._loop, self._clock, self.process, self._main = loop, clock, process, main
        self._turn, self._yielded = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._yielded.acquire()
        self._waking: Any = None
        self._wakes_early = False
        self.ended = False
        self.error: BaseException | None = None
        self._context = contextvars.Context()
        self._context.run(current.set, process)
        self._thread = threading.Thread(target=self._context.copy().run, args=(self._run,), daemon=True)
        self._thread.start()
        process.threads.append(self)
        loop.call_soon(self._step, context=self._context)

    def _run(self) -> None:
        running.set(self)
        self._turn.acquire()
        if self._loop.preemption is not None:
            sys.settrace(self._called)
        try:
            if self.process.alive:
                self._main()
        except Killed:
            pass
        except BaseException as error:
            if self.process.alive:
                self.error = error
        sys.settrace(None)
        self.ended = True
        self._yielded.release()

    def _called(self, frame: Any, event: str, given: Any) -> Any:
        return self._traced if self._loop.preemption.shared(frame.f_code.co_filename) else None

    def _traced(self, frame: Any, event: str, given: Any) -> Any:
        if event == "line" and self.process.alive and (pause_ns := self._loop.preemption.pause_ns()):
            self.wait_until(self._clock.now_ns + pause_ns, wakes_early=False)
        return self._traced

    def _step(self) -> None:
        """Let the thread run until it waits or ends. Called on the event loop."""
        self._waking, self._wakes_early = None, False
        if not self.ended:
            self._turn.release()
            self._yielded.acquire()

    def wait_until(self, due_ns: int | None, *, wakes_early: bool) -> None:
        """Wait for the time (None: without end), or for `wake` if that counts. Called in the thread."""
        if due_ns is not None:
            due_s = max(due_ns, self._clock.now_ns) / NS
            self._waking = self._loop.call_at(due_s, self._step, context=self._context)
        self._wakes_early = wakes_early
        self._yielded.release()
        self._turn.acquire()
        if not self.process.alive:
            raise Killed

    def wake(self) -> None:
        """Let a thread that waits for messages go on. Called by whoever runs."""
        if self._wakes_early:
            self._wakes_early = False
            if self._waking is not None:
                self._waking.cancel()
            self._waking = self._loop.call_soon(self._step, context=self._context)

    def kill(self) -> None:
        """Unwind the thread of a process that has ended. Called on the event loop."""
        while not self.ended:
            if self._waking is not None:
                self._waking.cancel()
            # Once for each wait on the way out.
            self._step()
        self._thread.join()
