"""The scheduler core, a function from events to plans. No IO, no clock, no torch."""

from tokenyard.scheduler.request_observer import Counters
from tokenyard.scheduler.row_state import Gate, RowState
from tokenyard.scheduler.scheduler import Scheduler
from tokenyard.scheduler.snapshot import Snapshot

__all__ = ["Counters", "Gate", "RowState", "Scheduler", "Snapshot"]
