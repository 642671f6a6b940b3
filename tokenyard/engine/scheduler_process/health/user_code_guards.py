"""Time limits for user code. The scheduler core has no clock, so the driver enforces them."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from tokenyard.base import NS_PER_S
from tokenyard.engine.scheduler_process.health.liveness import POLICY
from tokenyard.policy.user_policy import ASK_CODE

MAX_VIOLATIONS = 3
WINDOW_CALLS = 100
STALL_NS = NS_PER_S // 20
"""What a policy may take for one step."""

MAX_HOOK_S = 1.0
"""A longer call is interrupted, as it may never return."""

REINTERRUPT_S = 0.05

Clock = Callable[[], int]


class StalledError(BaseException):
    """Raised inside user code that does not return. Not an Exception, as user code may catch those."""


@contextmanager
def interrupt_after(
    seconds: float = MAX_HOOK_S, inside: CodeType | None = None, due: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raise StalledError in a block that takes longer, once `due` says so.

    With `inside`, only in what a function of that code calls, so that no other code is interrupted.

    Works by a signal, so only in the main thread, where the scheduler process has its loop; elsewhere it does nothing.
    Code that does not return to the interpreter cannot be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, frame: FrameType | None) -> None:
        if due() and (inside is None or _is_called_by(frame, inside)):
            raise StalledError(f"it took longer than {seconds:g} s and was interrupted")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, REINTERRUPT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _is_called_by(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False


class ViolationCounter:
    """Says when there have been too many: the third within a hundred calls.

    A window, since a busy machine makes any call slow now and then.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._latest: deque[int] = deque(maxlen=MAX_VIOLATIONS)

    def count(self, mistaken: bool) -> bool:
        """Count one call; True if it is one mistake too many."""
        self._calls += 1
        if not mistaken:
            return False
        self._latest.append(self._calls)
        return len(self._latest) == MAX_VIOLATIONS and self._calls - self._latest[0] < WINDOW_CALLS


class StallGuard:
    """Measures how long a user-defined policy takes, and interrupts one that does not return. Other work of the
    scheduler in the same call, such as writing a tape, does not count.

    `enter` is called when such a call begins ("policy") and ends ("host"): the watchdog ends the process if the policy
    catches the interrupt.
    """

    def __init__(self, enter: Callable[[str], None] = lambda doing: None, clock: Clock = time.monotonic_ns) -> None:
        self._enter = enter
        self._clock = clock
        self._watched = False
        self._mistakes = ViolationCounter()
        self._asked_ns: int | None = None
        self._spent_ns = 0
        self.stalled = False

    def asked(self) -> None:
        """The policy is asked something."""
        self._asked_ns = self._clock()

    def answered(self) -> None:
        """It has answered, or failed to."""
        if self._asked_ns is not None:
            self._spent_ns += self._clock() - self._asked_ns
        self._asked_ns = None

    def _overlong(self) -> bool:
        asked_ns = self._asked_ns
        answering_ns = 0 if asked_ns is None else self._clock() - asked_ns
        return self._spent_ns + answering_ns >= MAX_HOOK_S * NS_PER_S

    def begin(self, policy: str) -> None:
        """Start with the policy of this description; only user-defined ones (module:name) are guarded."""
        self._watched = ":" in policy
        self._mistakes = ViolationCounter()
        self.stalled = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a call of the scheduler; `stalled` then says whether the policy has been too slow too often."""
        if not self._watched:
            yield
            return
        self._spent_ns = 0
        self._enter(POLICY)
        try:
            with interrupt_after(inside=ASK_CODE, due=self._overlong):
                yield
        finally:
            self._enter("host")
        self.stalled |= self._mistakes.count(self._spent_ns > STALL_NS)
