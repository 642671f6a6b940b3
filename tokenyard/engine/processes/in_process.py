"""An engine in one process: its scheduler loop in a thread, its front end on the running event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tokenyard.base import NS_PER_S, ConfigError, ExecutorInfo
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.scheduler_client import Transmit
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.launch import load_tokenizer_and_template, start_adapters
from tokenyard.engine.processes.messages import Fence, FromScheduler, ToScheduler
from tokenyard.engine.scheduler_process.scheduler_loop import SchedulerLoop

logger = logging.getLogger(__name__)


class QueuePort:
    """A queue of messages to the scheduler loop within this process; also its `ProcessLink`.

    `deliver` gets the scheduler's messages; it is called on the scheduler loop's thread.
    """

    def __init__(self, deliver: Callable[[FromScheduler], None]) -> None:
        self._inbox: queue.SimpleQueue[ToScheduler | None] = queue.SimpleQueue()
        self.send = deliver

    def put(self, message: ToScheduler) -> None:
        """Send a message to the scheduler, from any thread."""
        self._inbox.put(message)

    def stop(self) -> None:
        """Make the scheduler loop end."""
        self._inbox.put(None)

    def receive(self, timeout_ns: int) -> list[ToScheduler] | None:
        """Return the received messages, waiting up to `timeout_ns` for the first; None means stop."""
        messages: list[ToScheduler] = []
        with contextlib.suppress(queue.Empty):
            while True:
                wait = timeout_ns > 0 and not messages
                message = self._inbox.get(timeout=timeout_ns / NS_PER_S) if wait else self._inbox.get_nowait()
                if message is None:
                    return None
                messages.append(message)
        return messages

    def connect(self, source: int) -> Transmit:
        """Return the function that sends to the only scheduler."""
        return self.put

    def disconnect(self, source: int) -> None:
        """Nothing is to be closed."""

    def fence(self, fence: Fence) -> None:
        """The text side is in this process and is asked there."""

    def reset_detokenizer(self) -> None:
        """The text side ends with this process only."""

    def close(self) -> None:
        """Nothing is to be closed."""


@asynccontextmanager
async def engine_in_process(config: EngineConfig) -> AsyncIterator[TokenizerManager]:
    """Load a model into this process and yield the engine's front; end its thread at the end.

    Raises ConfigError for settings or files that cannot work, and what loading the model raises.
    """
    if config.ranks > 1:
        raise ConfigError("an engine within one process has one rank; use `tokenyard serve` for --dp-size")
    tokenizer, template = load_tokenizer_and_template(config)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[ExecutorInfo] = loop.create_future()
    ended = asyncio.Event()
    managers: list[TokenizerManager] = []

    def deliver(message: FromScheduler) -> None:
        loop.call_soon_threadsafe(receive, message)

    def receive(message: FromScheduler) -> None:
        managers[0].outputs.receive(message, 0)

    def died(reason: str) -> None:
        for manager in managers:
            manager.failover.engine_dead(reason)

    def run() -> None:
        try:
            scheduler = SchedulerLoop(config, port, port.put)
        except BaseException as error:
            loop.call_soon_threadsafe(ready.set_exception, error)
            loop.call_soon_threadsafe(ended.set)
            return
        loop.call_soon_threadsafe(ready.set_result, scheduler.info)
        try:
            scheduler.run()
        except Exception as error:
            logger.exception("the engine failed")
            loop.call_soon_threadsafe(died, f"the engine failed: {error}")
        finally:
            scheduler.close()
            loop.call_soon_threadsafe(ended.set)

    port = QueuePort(deliver)
    thread = threading.Thread(target=run, name="tokenyard", daemon=True)
    thread.start()
    try:
        info = await ready
        manager = TokenizerManager(info, tokenizer, template, port, assembler=TextAssembler(tokenizer))
        managers.append(manager)
        manager.failover.rank_ready(0, 0)
        await start_adapters(manager, config)
        yield manager
    finally:
        for manager in managers:
            await manager.close("the engine was closed")
        port.stop()
        # Not by a thread of asyncio's pool, which takes nothing more once the interpreter ends.
        await ended.wait()
        thread.join()
