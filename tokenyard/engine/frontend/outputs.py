"""Delivers the output of schedulers and the detokenizer to streams."""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from tokenyard.base import NS_PER_S, Cancel, TenantUsage, TokenBatch
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.request_submitter import RequestSubmitter
from tokenyard.engine.processes.messages import Fenced, Heartbeat, RpcReply, TextBatch, ToApi

logger = logging.getLogger(__name__)


class OutputHandler:
    """Handles messages and delivers deltas to streams. Used from one event loop, on which it runs a task.

    `assembler` is set if token ids become text in this process. `on_fenced` is called with the output of a scheduler
    that has ended, once the streams have all of it.
    """

    def __init__(self, submitter: RequestSubmitter, assembler: TextAssembler | None) -> None:
        self.on_fenced: Callable[[Fenced], None] = lambda fenced: None
        self._submitter = submitter
        self._ranks = submitter.ranks
        self._assembler = assembler
        self._text_beat_ns = 0
        self._pending_batches: list[TextBatch] = []
        self._fenced: list[Fenced] = []
        self._delivery_waiters: list[asyncio.Future[None]] = []
        self._ignored_sources: set[int] = set()
        self._batch_ready = asyncio.Event()
        self._deliverer = asyncio.get_running_loop().create_task(self._deliver())

    def receive(self, message: ToApi, source: int) -> None:
        """Handle a message of the text side or of scheduler process `source`."""
        match message:
            case TextBatch() if source not in self._ignored_sources:
                self.add(self._submitter.retry_refused(message, source))
            case Heartbeat() | RpcReply():
                if (client := self._ranks.find(source)) is not None:
                    client.handle_message(message)
                elif isinstance(message, Heartbeat) and self._assembler is None and not self._ranks.all_restarting:
                    self._text_beat_ns = message.sent_ns
            case TokenBatch():
                self._assemble(message, source)
            case TenantUsage():
                for client in self._ranks.clients:
                    if client.source != source:
                        client.send(message)
            case Fenced():
                self._fenced.append(message)
                self._batch_ready.set()

    def _assemble(self, batch: TokenBatch, source: int) -> None:
        """Handle tokens that become text in this process."""
        client = self._ranks.find(source)
        if client is None or self._assembler is None:
            return
        text_batch, stops = self._assembler.step(batch, source)
        for stop in stops:
            client.send(stop)
        self.add(self._submitter.retry_refused(text_batch, source))

    def add(self, batch: TextBatch) -> None:
        """Queue this output for its streams."""
        self._pending_batches.append(batch)
        self._batch_ready.set()

    def ignore(self, source: int) -> None:
        """Drop further output of a scheduler process that has ended."""
        self._ignored_sources.add(source)

    async def delivered(self) -> None:
        """Wait until the streams have all output received so far."""
        waiter = asyncio.get_running_loop().create_future()
        self._delivery_waiters.append(waiter)
        self._batch_ready.set()
        await waiter

    async def _deliver(self) -> None:
        """Deliver output until closed; what arrives during one round is the next round."""
        while True:
            await self._batch_ready.wait()
            self._batch_ready.clear()
            batches, self._pending_batches = self._pending_batches, []
            fenced, self._fenced = self._fenced, []
            waiters, self._delivery_waiters = self._delivery_waiters, []
            try:
                for stream in await self._submitter.streams.deliver(batches):
                    stream.client.send(Cancel(stream.numbers, "the client reads too slowly", "slow_reader"))
                for one in fenced:
                    self.on_fenced(one)
            except Exception:
                logger.exception("output of the engine could not be delivered")
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def detokenizer_age_s(self) -> float:
        """Return the seconds since the detokenizer was known to be well; infinite before its first heartbeat."""
        return (time.monotonic_ns() - self._text_beat_ns) / NS_PER_S if self._text_beat_ns else math.inf

    def detokenizer_lost(self) -> None:
        """The detokenizer has ended; wait for the first heartbeat of the next one."""
        self._text_beat_ns = 0

    async def close(self) -> None:
        """Stop the delivery."""
        self._deliverer.cancel()
        await asyncio.gather(self._deliverer, return_exceptions=True)
        for waiter in self._delivery_waiters:
            waiter.cancel()
