"""All that moves KV in and out of the device beside steps: other engines, and the KV store."""

from typing import Any

from tokenyard.base import Event, Request, TokenBatch
from tokenyard.engine.scheduler_process.attachments.disagg import DisaggConnector
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.tape.recorder import Core


class KvMultiConnector:
    """What an event loop calls for KV transfer (`transfers`) and the KV store (`tiers`), where there are any."""

    def __init__(
        self, core: Core, transfers: DisaggConnector | None, tiers: KvStoreConnector | None, rank: int = 0
    ) -> None:
        self._core = core
        self._transfers = transfers
        self._tiers = tiers
        self._rank = rank
        self._enabled = transfers is not None or tiers is not None

    def submitted(self, request: Request) -> Request:
        """Decide where the KV of a request comes from; returns the request as the scheduler shall see it."""
        if self._transfers is not None:
            request = self._transfers.submitted(request)
        if self._tiers is not None and not request.awaits_kv:
            request = self._tiers.submitted(request)
        return request

    def move(self) -> None:
        """Have moved what the scheduler wants loaded, stored or handed over."""
        if not self._enabled:
            return
        wanted = self._core.drain_moves()
        if self._tiers is not None:
            wanted = self._tiers.take(wanted)
        if self._transfers is not None:
            self._transfers.move(wanted)

    def poll(self, now: int) -> None:
        """End what has taken too long by `now` (ns)."""
        if self._tiers is not None:
            for event in self._tiers.poll(now):
                self._core.apply(event, now)

    def on_output(self, batch: TokenBatch) -> None:
        """Look at the output of a step, and take out what is not for clients of this engine."""
        if self._transfers is not None:
            self._transfers.on_output(batch)
        if self._tiers is not None:
            self._tiers.on_output(batch)

    def flush(self, now: int) -> bool:
        """Empty the prefix cache; False if it is in use. That KV is being stored just now does not count as use."""
        if self._tiers is not None and not self._core.has_work:
            events: list[Event] = self._tiers.release_all()
            for event in events:
                self._core.apply(event, now)
        return self._core.flush(now)

    def clear_store(self, now: int) -> int:
        """Forget all KV in the KV store; returns how many blocks that was."""
        return 0 if self._tiers is None else self._tiers.clear()

    @property
    def busy(self) -> bool:
        """Whether requests wait for KV from other engines or from the KV store."""
        transfers, tiers = self._transfers, self._tiers
        return (transfers is not None and transfers.busy) or (tiers is not None and tiers.busy)

    def describe(self) -> dict[str, Any]:
        """What people and other engines should know, by part and rank."""
        parts = {"transfer": self._transfers, "tiers": self._tiers}
        return {name: {f"rank {self._rank}": part.describe()} for name, part in parts.items() if part is not None}
