"""Sends what tenants use at this rank to the other ranks, so that limits and shares hold for all of them."""

import time
from collections.abc import Callable

from tokenyard.base import NS_PER_S, TenantUsage, TokenBatch
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.tape.recorder import Core

INTERVAL_NS = NS_PER_S // 10


class TenantUsageExchange(Attachment):
    """The tenant usage of one of several ranks, sent ten times a second and before the rank becomes idle."""

    name = "tenant_usage"
    optional = True

    def __init__(self, core: Core, send: Callable[[TenantUsage], None]) -> None:
        self._core = core
        self._send = send
        self._sent_ns = 0

    def sent(self, batch: TokenBatch) -> None:
        """Send the usage if it is due."""
        now = time.monotonic_ns()
        if now - self._sent_ns >= INTERVAL_NS or not self._core.has_work:
            self._sent_ns = now
            if (usage := self._core.drain_tenant_usage()) is not None:
                self._send(usage)
