"""What happens to the engines of a simulated fleet, in the order of time."""

from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard.sim.fleet import Fault, Fleet
from tokenyard.sim.workload import to_ns


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that is on the fleet's schedule: a fault or a drain that begins or ends. factor: how much slower
    everything is, or how many seconds it stops.
    """

    what: str
    replica: int
    factor: float = 1.0


def happenings(fleet: Fleet) -> Iterator[tuple[int, Happening]]:
    """The fleet's schedule as (time in ns, what happens)."""
    for fault in fleet.faults:
        begin, end = _begin_and_end(fault)
        yield to_ns(fault.at_s), begin
        yield to_ns(fault.at_s + fault.for_s), end
    for stop in fleet.stops:
        yield to_ns(stop.at_s), Happening("stop", stop.replica, stop.for_s)
    for drain in fleet.drains:
        yield to_ns(drain.at_s), Happening("close", drain.replica)
        if drain.for_s != float("inf"):
            yield to_ns(drain.at_s + drain.for_s), Happening("open", drain.replica)


def _begin_and_end(fault: Fault) -> tuple[Happening, Happening]:
    if fault.deadly:
        # What is dead from the beginning on has nothing to lose.
        return Happening("kill" if fault.at_s else "close", fault.replica), Happening("open", fault.replica)
    return Happening("slow", fault.replica, fault.factor), Happening("slow", fault.replica)
