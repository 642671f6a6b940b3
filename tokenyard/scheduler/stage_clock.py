"""The clock of one request: it counts its time by stage."""

from dataclasses import replace

from tokenyard.base import RequestTimings, Stage


class StageClock:
    """Fills in the times of a `RequestTimings`.

    A stage that is entered while the request is held back begins when it resumes. Negative spans (an arrival stamped by
    another clock) count as 0.
    """

    __slots__ = ("_held", "_since_ns", "_stage", "timings")

    def __init__(self, arrival_ns: int) -> None:
        self.timings = RequestTimings()
        self._stage: Stage = "queue"
        self._since_ns = arrival_ns
        self._held = False

    @property
    def stage(self) -> Stage:
        """The stage that time is counted for now."""
        return "paused" if self._held else self._stage

    def enter(self, stage: Stage, now: int) -> None:
        """From `now` (ns) on the request is in `stage`."""
        self._count(now)
        self._stage = stage

    def hold(self, held: bool, now: int) -> None:
        """From `now` (ns) on the request is held back, or resumes its stage."""
        self._count(now)
        self._held = held

    def read(self, now: int) -> RequestTimings:
        """The timings up to `now` (ns), a copy."""
        self._count(now)
        return replace(self.timings)

    def _count(self, now: int) -> None:
        timings, spent = self.timings, max(0, now - self._since_ns)
        self._since_ns = max(now, self._since_ns)
        match self.stage:
            case "queue":
                timings.queue_ns += spent
            case "loading":
                timings.loading_ns += spent
            case "prefill":
                timings.prefill_ns += spent
            case "decode":
                timings.decode_ns += spent
            case "requeued":
                timings.requeued_ns += spent
            case "recompute":
                timings.recompute_ns += spent
            case "paused":
                timings.paused_ns += spent
