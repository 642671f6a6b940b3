"""The events of a simulated fleet, ordered by time."""

from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard.sim.fleet.fleet_settings import Fault, Fleet
from tokenyard.sim.traces.workload import to_ns


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An entry of the fleet's schedule: a fault or a drain that begins or ends.

    factor: slowdown of the replica, or seconds that it is stopped.
    """

    what: str
    replica: int
    factor: float = 1.0


def fleet_events(fleet: Fleet) -> Iterator[tuple[int, FleetEvent]]:
    """The fleet's schedule as (time in ns, event) pairs."""
    for fault in fleet.faults:
        begin, end = _begin_and_end(fault)
        yield to_ns(fault.at_s), begin
        yield to_ns(fault.at_s + fault.for_s), end
    for stop in fleet.stops:
        yield to_ns(stop.at_s), FleetEvent("stop", stop.replica, stop.for_s)
    for drain in fleet.drains:
        yield to_ns(drain.at_s), FleetEvent("close", drain.replica)
        if drain.for_s != float("inf"):
            yield to_ns(drain.at_s + drain.for_s), FleetEvent("open", drain.replica)


def _begin_and_end(fault: Fault) -> tuple[FleetEvent, FleetEvent]:
    if fault.deadly:
        # A replica that is dead from the start has nothing to lose.
        return FleetEvent("kill" if fault.at_s else "close", fault.replica), FleetEvent("open", fault.replica)
    return FleetEvent("slow", fault.replica, fault.factor), FleetEvent("slow", fault.replica)
