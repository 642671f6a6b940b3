"""Blocking code as a coroutine of the world: a thread that runs only while the event loop waits for it."""

import threading
from collections.abc import Callable
from typing import Any

from tests.world.clock import NS, Clock
from tests.world.network import Process


class Killed(BaseException):
    """The thread's process has ended."""


class LockstepThread:
    """Runs `main` in a thread. Of the event loop and all such threads exactly one runs at a time, so that a world is
    the same each time.

    error: what ended `main`; None while it runs and after a kill.
    """

    def __init__(self, loop: Any, clock: Clock, process: Process, main: Callable[[], None]) -> None:
        self._loop, self._clock, self.process, self._main = loop, clock, process, main
        self._turn, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._waking: Any = None
        self._wakes_early = False
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        loop.call_soon(self._resume)

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if self.process.alive:
                self._main()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._yielded.release()

    def _resume(self) -> None:
        """Let the thread run until it waits, unless its process is stopped. Called on the event loop."""
        self._waking, self._wakes_early = None, False
        self.process.run(self._step)

    def _step(self) -> None:
        if not self.ended:
            self._turn.release()
            self._yielded.acquire()

    def wait_until(self, due_ns: int | None, *, wakes_early: bool) -> None:
        """Wait for the time (None: without end), or for `wake` if that counts. Called in the thread."""
        if due_ns is not None:
            self._waking = self._loop.call_at(max(due_ns, self._clock.now_ns) / NS, self._resume)
        self._wakes_early = wakes_early
        self._yielded.release()
        self._turn.acquire()
        if not self.process.alive:
            raise Killed

    def wake(self) -> None:
        """Let a thread that waits for messages go on. Called on the event loop."""
        if self._wakes_early:
            self._wakes_early = False
            if self._waking is not None:
                self._waking.cancel()
            self._waking = self._loop.call_soon(self._resume)

    def kill(self) -> None:
        """Unwind the thread of a process that has ended."""
        if self._waking is not None:
            self._waking.cancel()
        self._step()
        self._thread.join()
