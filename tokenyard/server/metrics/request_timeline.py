"""Request streams of a profile, as events of the Trace Event Format."""

from collections.abc import Mapping

from tokenyard.base import Finish
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.scheduler_process.health.profiler import NS_PER_US, name_tracks
from tokenyard.server.metrics.tracing import stages

API_PID = 2
MAX_ANSWERS = 20_000


class StreamProfile:
    """The streams of one profile, as nested asynchronous events, added when an answer ends."""

    def __init__(self) -> None:
        self.events = name_tracks(API_PID, "requests", {})
        self._answers = 0

    def watcher(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> "_StreamObserver":
        """An observer for one request."""
        return _StreamObserver(self, spec)

    def add(self, rid: str, index: int, finish: Finish) -> None:
        """Add an answer with its stages, up to `MAX_ANSWERS`."""
        self._answers += 1
        if self._answers > MAX_ANSWERS:
            return
        facts = {"reason": finish.reason, "prompt": finish.prompt_tokens, "output": finish.completion_tokens}
        spans = [(f"{rid}/{index}", finish.arrival_ns, finish.finished_ns), *stages(finish)]
        for depth, (name, begin_ns, end_ns) in enumerate(spans):
            common = {"name": name, "cat": "request", "id": finish.number, "pid": API_PID, "tid": 0}
            args = {"args": facts} if depth == 0 else {}
            self.events.append({**common, "ph": "b", "ts": begin_ns / NS_PER_US, **args})
            self.events.append({**common, "ph": "e", "ts": end_ns / NS_PER_US})


class _StreamObserver:
    """Adds the answers of one request to a profile."""

    def __init__(self, profile: StreamProfile, spec: GenerateReqInput) -> None:
        self._profile = profile
        self._spec = spec

    def delta(self, delta: OutputDelta) -> None:
        """Add an answer once it has finished."""
        if delta.finish is not None:
            self._profile.add(self._spec.rid, delta.index, delta.finish)
