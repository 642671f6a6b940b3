"""A timeline of the event loop for Perfetto or chrome://tracing (the Trace Event Format's JSON).

The profile wraps the driver's methods while it runs and unwraps them at the end. A driver that is not profiled has no
overhead.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tokenyard.base import NS_PER_S, StepPlan, StepResult

MAX_EVENTS = 200_000
NS_PER_US = 1000
SCHEDULER_PID = 1
FURTHER_RANKS_PID = 1000
"""The timeline's process number of rank r above 0 is this plus r; the API process has 2."""

LOOP, DEVICE = 1, 2
VERBS = {
    "receive": "receive",
    "plan": "plan",
    "while_device_runs": "attachments",
    "launch": "launch",
    "collect": "wait for the device",
    "commit": "commit",
    "send": "send",
}
"""Methods of the driver that are timed, and what the timeline calls them."""


def name_tracks(pid: int, process: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    """Events that give a process and its tracks their names."""
    names = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}]
    for tid, thread in threads.items():
        names.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}})
    return names


class StepProfile:
    """The events of one profile, at most MAX_EVENTS; later ones are counted and dropped."""

    def __init__(self, driver: Any, rank: int = 0) -> None:
        """Begin to time the verbs of `driver`, the scheduler of this rank."""
        self._driver = driver
        self._pid = FURTHER_RANKS_PID + rank if rank else SCHEDULER_PID
        self._name = f"scheduler {rank}" if rank else "scheduler"
        self._events = name_tracks(self._pid, self._name, {LOOP: "event loop", DEVICE: "device"})
        self._dropped = 0
        self._launches: dict[int, tuple[int, StepPlan]] = {}
        self._device_free_ns = 0
        for verb, label in VERBS.items():
            setattr(driver, verb, self._timed(getattr(driver, verb), label))

    def stop(self) -> bytes:
        """Unwrap the methods and return the events as a JSON list."""
        for verb in VERBS:
            delattr(self._driver, verb)
        if self._dropped:
            self._events += name_tracks(self._pid, f"{self._name} ({self._dropped} events dropped)", {})
        return msgspec.json.encode(self._events)

    def _timed(self, verb: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(verb)
        def run(*args: Any, **options: Any) -> Any:
            begin_ns = time.monotonic_ns()
            outcome = verb(*args, **options)
            end_ns = time.monotonic_ns()
            self._span(label, LOOP, begin_ns, end_ns, {})
            if verb.__name__ == "launch":
                self._launches[args[0].step] = (begin_ns, args[0])
            elif isinstance(outcome, StepResult):
                self._device_step(outcome, end_ns)
            return outcome

        return run

    def _device_step(self, result: StepResult, collected_ns: int) -> None:
        """The device began when the step was launched or the one before was done, and worked for `result.seconds`."""
        launched = self._launches.pop(result.step, None)
        if launched is None:
            return
        begin_ns, plan = launched
        begin_ns = max(begin_ns, self._device_free_ns)
        end_ns = min(begin_ns + round(result.seconds * NS_PER_S), collected_ns)
        self._device_free_ns = end_ns
        sizes = {"step": plan.step, "rows": len(plan.pool_rows), "decode_rows": plan.decode_rows}
        self._span(plan.forward_mode, DEVICE, begin_ns, end_ns, {**sizes, "tokens": len(plan.tokens)})

    def _span(self, name: str, tid: int, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._dropped += 1
            return
        times = {"ts": begin_ns / NS_PER_US, "dur": max(0, end_ns - begin_ns) / NS_PER_US}
        self._events.append({"name": name, "ph": "X", "pid": self._pid, "tid": tid, **times, "args": args})


class Profiler:
    """The calls that start and stop a profile of `driver`, the scheduler of this rank."""

    def __init__(self, driver: Any, rank: int) -> None:
        self._driver = driver
        self._rank = rank
        self._profile: StepProfile | None = None

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """The handlers by verb."""
        return {"start_profile": self._start, "stop_profile": self._stop}

    def _start(self, now: int) -> bool:
        """Begin a timeline; False if one runs already."""
        if self._profile is not None:
            return False
        self._profile = StepProfile(self._driver, self._rank)
        return True

    def _stop(self, now: int) -> bytes | None:
        """End the timeline and return its events as a JSON list; None if none runs."""
        profile, self._profile = self._profile, None
        return None if profile is None else profile.stop()
