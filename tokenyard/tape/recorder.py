"""A scheduler that records every call."""

from collections.abc import Callable
from typing import Protocol

from tokenyard.base import (
    CostModel,
    Event,
    Explanation,
    Flush,
    KvMove,
    Request,
    StepPlan,
    StepResult,
    TenantUsage,
    TokenBatch,
)
from tokenyard.cache.kv_events import KvRecord
from tokenyard.policy.priority_function import RequestView
from tokenyard.scheduler.live_view import LiveView
from tokenyard.scheduler.lookahead_state import LookaheadState
from tokenyard.scheduler.scheduler import RequeuedRequest, Scheduler
from tokenyard.scheduler.snapshot import Snapshot
from tokenyard.tape.anonymizer import Anonymizer
from tokenyard.tape.codec import Header, Idled, Origin, Planned, Raised, TapeEncoder


class Sink(Protocol):
    """Where the bytes of a tape go: a file, or an object with its methods."""

    def write(self, data: bytes, /) -> object:
        """Write some bytes; they may be buffered."""

    def flush(self) -> object:
        """Write out the buffered bytes."""


class RecordingScheduler:
    """Replaces the scheduler that `origin` describes, with the same methods; `Scheduler` documents them.

    A call is written before it is made, so a tape ends with the call that failed. The sink is flushed whenever there is
    nothing to plan. With a `key`, ids and names are anonymized by it (see `Anonymizer`).
    """

    def __init__(self, origin: Origin, sink: Sink, key: bytes | None, written_by: str) -> None:
        """Writes the header. Raises ConfigError for settings that cannot work."""
        self.scheduler: Scheduler = origin.scheduler()
        self._sink = sink
        self._now = 0
        anonymizer = Anonymizer(origin.info.vocab_size, key)
        self._encoder = TapeEncoder(anonymizer)
        shown = origin.recorded(anonymizer.settings(origin.settings), anonymizer.info(origin.info))
        sink.write(self._encoder.header(Header(shown, written_by, key is not None)))

    def apply(self, event: Event, now: int) -> None:
        """Write an event and apply it."""
        self._now = now
        self._sink.write(self._encoder.event(now, event))
        try:
            self.scheduler.apply(event, now)
        except Exception as error:
            self._note_raised(error)
            raise

    def flush(self, now: int) -> bool:
        """Empty the prefix cache; False if it is in use."""
        self._now = now
        self._sink.write(self._encoder.event(now, Flush()))
        return self.scheduler.flush(now)

    def plan(self, now: int) -> StepPlan | None:
        """Plan, and write the outcome."""
        self._now = now
        try:
            plan = self.scheduler.plan(now)
        except Exception as error:
            self._sink.write(self._encoder.record(now, Planned()))
            self._note_raised(error)
            raise
        self._sink.write(self._encoder.planned(now, plan))
        if plan is None:
            self._sink.flush()
        return plan

    def multi_step(self, max_steps: int) -> int:
        """1, because a tape has single steps."""
        return 1

    def possible_steps(self, max_steps: int) -> int:
        """1; see `multi_step`."""
        return 1

    def repeats_until_ns(self) -> int | None:
        """None; see `multi_step`."""
        return None

    def commit(self, result: StepResult, now: int) -> None:
        """Write a result and commit it."""
        self._now = now
        self._sink.write(self._encoder.committed(now, result))
        try:
            self.scheduler.commit(result, now)
        except Exception as error:
            self._note_raised(error)
            raise

    def request_number(self, plan: StepPlan, place: int) -> int | None:
        """The number of the request in row `place` of a plan."""
        return self.scheduler.request_number(plan, place)

    def idle(self) -> str | None:
        """Let the scheduler check its page accounting."""
        self._sink.write(self._encoder.record(self._now, Idled()))
        return self.scheduler.idle()

    @property
    def has_output(self) -> bool:
        """See `Scheduler.has_output`."""
        return self.scheduler.has_output

    def drain(self) -> TokenBatch:
        """All output since the last call."""
        return self.scheduler.drain()

    def drain_moves(self) -> list[KvMove]:
        """Loads, handovers and stores requested since the last call."""
        return self.scheduler.drain_moves()

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request's prompt that the prefix cache holds now."""
        return self.scheduler.cached_tokens(request)

    def requeued(self, max_requests: int) -> list[RequeuedRequest]:
        """The first retracted requests that wait."""
        return self.scheduler.requeued(max_requests)

    def outputs(self, numbers: list[int]) -> dict[int, list[int]]:
        """The output tokens so far of requests that wait."""
        return self.scheduler.outputs(numbers)

    def prefill_load(self, cost: CostModel, now: int) -> tuple[float, float]:
        """Seconds until the prompts that wait now are computed, and how many a second of prefill takes here."""
        return self.scheduler.prefill_load(cost, now)

    def uses_adapter(self, adapter: str) -> bool:
        """Whether any request that waits or runs has this adapter."""
        return self.scheduler.uses_adapter(adapter)

    def time_policy(self, asked: Callable[[], None], answered: Callable[[], None]) -> None:
        """Have `asked` called before each call of a user-defined policy, and `answered` after it."""
        self.scheduler.time_policy(asked, answered)

    def held_back(self) -> dict[str, int]:
        """How many waiting rows gates hold back, by cause."""
        return self.scheduler.held_back()

    def awaits_admission(self, number: int) -> bool:
        """Whether a request waits, or its KV is being loaded."""
        return self.scheduler.awaits_admission(number)

    def store_whole_cache(self, now: int) -> None:
        """Offer the whole prefix cache to the KV store; nothing is recorded, as the engine ends."""
        self.scheduler.store_whole_cache(now)

    def drain_tenant_usage(self) -> TenantUsage | None:
        """Tenant usage on this rank since the last call, for the other ranks."""
        return self.scheduler.drain_tenant_usage()

    def kv_records(self) -> list[KvRecord]:
        """KV events since the last call, in wire form."""
        return self.scheduler.kv_records()

    def kv_snapshot(self) -> list[KvRecord]:
        """The whole prefix cache as KV events, in wire form."""
        return self.scheduler.kv_snapshot()

    @property
    def in_flight(self) -> int:
        """Plans that wait for their commit."""
        return self.scheduler.in_flight

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a plan is in flight."""
        return self.scheduler.has_work

    def wakeup_ns(self) -> int | None:
        """The time (ns) to call `plan` next even without an event; None for no such time."""
        return self.scheduler.wakeup_ns()

    @property
    def weights(self) -> str:
        """The weights in use, "" for those that the executor started with."""
        return self.scheduler.weights

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the scheduler."""
        return self.scheduler.cost

    def waiting_numbers(self) -> list[int]:
        """The numbers of all requests that wait."""
        return self.scheduler.waiting_numbers()

    def request_view(self, number: int, now: int) -> RequestView | None:
        """What a priority function may see of a waiting request."""
        return self.scheduler.request_view(number, now)

    def explain(self, number: int, now: int) -> Explanation | None:
        """Where the time of a request went."""
        return self.scheduler.explain(number, now)

    def lookahead_state(self, now: int) -> LookaheadState:
        """The state that a forecast of lookahead starts from."""
        return self.scheduler.lookahead_state(now)

    def live_view(self, now: int, *, prefixes: bool) -> LiveView:
        """Who waits and runs, who holds KV, and which prefixes are hot."""
        return self.scheduler.live_view(now, prefixes=prefixes)

    def snapshot(self, now: int) -> Snapshot:
        """Counters and gauges at `now`."""
        return self.scheduler.snapshot(now)

    def _note_raised(self, error: Exception) -> None:
        self._sink.write(self._encoder.record(self._now, Raised(type(error).__name__)))
        self._sink.flush()


Core = Scheduler | RecordingScheduler
"""What an event loop drives."""
