"""The scheduler core: events in, plans out. No IO, no clock, no torch."""

from tokenyard.scheduler.lifecycle import Gate, State
from tokenyard.scheduler.scheduler import Scheduler
from tokenyard.scheduler.snapshot import Counters, Snapshot

__all__ = ["Counters", "Gate", "Scheduler", "Snapshot", "State"]
