"""Virtual time: while it is installed, the clocks of the `time` module read it and nothing waits on the real one."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

NS = 1_000_000_000
BEGIN_NS = 1_790_000_000 * NS


class Clock:
    """Nanoseconds since the world began. `sleep` is set by what can let a thread wait.

    wall_offset_ns: what the wall clock shows more; it may jump.
    """

    def __init__(self) -> None:
        # Not 0, which some code takes for "never".
        self.now_ns = NS
        self.wall_offset_ns = BEGIN_NS
        self.sleep: Callable[[float], None] = _refuse_sleep

    def advance_to(self, ns: int) -> None:
        """Move on; time never goes back."""
        self.now_ns = max(self.now_ns, ns)


def _refuse_sleep(seconds: float) -> None:
    raise AssertionError(f"time.sleep({seconds}) on the event loop")


@contextlib.contextmanager
def installed(clock: Clock, more: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Have the process read `clock`, and find `more` under those names of modules. How servers tune the garbage
    collector has no effect here.
    """
    fakes: dict[tuple[Any, str], Any] = {
        (time, "monotonic_ns"): lambda: clock.now_ns,
        (time, "monotonic"): lambda: clock.now_ns / NS,
        (time, "perf_counter"): lambda: clock.now_ns / NS,
        (time, "time_ns"): lambda: clock.now_ns + clock.wall_offset_ns,
        (time, "time"): lambda: (clock.now_ns + clock.wall_offset_ns) / NS,
        (time, "sleep"): lambda seconds: clock.sleep(seconds),
        (gc, "collect"): lambda generation=2: 0,
        (gc, "freeze"): lambda: None,
        (gc, "set_threshold"): lambda *thresholds: None,
        **more,
    }
    real = {place: getattr(*place) for place in fakes}
    for (module, name), fake in fakes.items():
        setattr(module, name, fake)
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)
