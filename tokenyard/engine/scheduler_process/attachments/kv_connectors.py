"""What moves KV to and from the device between steps: PD disaggregation and the KV store."""

from typing import Any

from tokenyard.base import Event, Request, TokenBatch
from tokenyard.engine.scheduler_process.attachments.disagg import DisaggConnector
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.tape.recorder import Core


class KvMultiConnector:
    """Calls the connectors of PD disaggregation (`disagg`) and of the KV store (`kv_store`), if any."""

    def __init__(
        self, core: Core, disagg: DisaggConnector | None, kv_store: KvStoreConnector | None, rank: int = 0
    ) -> None:
        self._core = core
        self._disagg = disagg
        self._kv_store = kv_store
        self._rank = rank
        self._enabled = disagg is not None or kv_store is not None

    def submitted(self, request: Request) -> Request:
        """Decide where the KV of a request comes from; returns the request for the scheduler."""
        if self._disagg is not None:
            request = self._disagg.submitted(request)
        if self._kv_store is not None and not request.awaits_kv:
            request = self._kv_store.submitted(request)
        return request

    def move(self) -> None:
        """Start the loads, stores and handovers that the scheduler requests."""
        if not self._enabled:
            return
        moves = self._core.drain_moves()
        if self._kv_store is not None:
            moves = self._kv_store.take(moves)
        if self._disagg is not None:
            self._disagg.move(moves)

    def poll(self, now: int) -> None:
        """End what has taken too long by `now` (ns)."""
        if self._kv_store is not None:
            for event in self._kv_store.poll(now):
                self._core.apply(event, now)

    def on_output(self, batch: TokenBatch) -> None:
        """Look at the output of a step, and take out what is not for clients of this engine."""
        if self._disagg is not None:
            self._disagg.on_output(batch)
        if self._kv_store is not None:
            self._kv_store.on_output(batch)

    def flush(self, now: int) -> bool:
        """Empty the prefix cache; False if it is in use. That KV is being stored just now does not count as use."""
        if self._kv_store is not None and not self._core.has_work:
            events: list[Event] = self._kv_store.release_all()
            for event in events:
                self._core.apply(event, now)
        return self._core.flush(now)

    def clear_store(self, now: int) -> int:
        """Forget all KV in the KV store; returns how many blocks that was."""
        return 0 if self._kv_store is None else self._kv_store.clear()

    @property
    def busy(self) -> bool:
        """Whether requests wait for KV from other engines or from the KV store."""
        disagg, kv_store = self._disagg, self._kv_store
        return (disagg is not None and disagg.busy) or (kv_store is not None and kv_store.busy)

    def describe(self) -> dict[str, Any]:
        """The state for `/v1/transfer` and `/v1/cache`, by part and rank."""
        parts = {"transfer": self._disagg, "tiers": self._kv_store}
        return {name: {f"rank {self._rank}": part.describe()} for name, part in parts.items() if part is not None}
