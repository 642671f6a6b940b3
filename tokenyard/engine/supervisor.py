"""Starts the engine's child processes, waits until they are ready, watches them, and leaves none behind."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import EngineDeadError, ExecutorInfo
from tokenyard.engine.config import ChildReport, ChildTask, EngineConfig, decode_report, encode_line
from tokenyard.engine.ipc import SocketDirectory

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
STOP_WORD = b"stop\n"
LONGEST_REPORT_BYTES = 1 << 20


@dataclass(slots=True)
class Child:
    """A child process and the pipe on which it reports once."""

    name: str
    process: Process
    report_fd: int


class Supervisor:
    """The scheduler and detokenizer processes of one engine.

    Each child's standard input stays open; a word on it asks the child to end, and its end tells that we are gone.
    `on_death` is called with the reason when a child ends unasked.
    """

    def __init__(self, config: EngineConfig, sockets: SocketDirectory, on_death: Callable[[str], None]) -> None:
        self._config = config
        self._sockets = sockets
        self._on_death = on_death
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> ExecutorInfo:
        """Start all children and return what the scheduler says of its model, when all are ready.

        Raises EngineDeadError with the reason of the first child that fails; all others are stopped then.
        """
        modules = {"scheduler": "tokenyard.engine.scheduler_process"}
        if not self._config.skip_tokenizer_init:
            modules["detokenizer"] = "tokenyard.engine.detokenizer"
        try:
            for name, module in modules.items():
                self._children.append(await self._spawn(name, module))
            reports = await asyncio.gather(*(self._report(child) for child in self._children))
        except BaseException:
            await self.stop()
            raise
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        info = reports[0].info
        assert info is not None
        return info

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.process.pid for child in self._children}

    async def stop(self) -> None:
        """Ask all children to end, and make those that do not within a few seconds."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.write(STOP_WORD)
                child.process.stdin.close()
        for child in self._children:
            try:
                await asyncio.wait_for(child.process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                logger.warning("the %s did not end by itself", child.name)
                child.process.kill()
                await child.process.wait()
        self._children = []

    async def _spawn(self, name: str, module: str) -> Child:
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(write_fd)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd,),
            )
        finally:
            os.close(write_fd)
        ends = self._sockets.endpoints
        task = ChildTask(self._config, ends.scheduler, ends.detokenizer, ends.api, os.getpid(), str(self._sockets.path))
        assert process.stdin is not None
        process.stdin.write(encode_line(task))
        return Child(name, process, read_fd)

    async def _report(self, child: Child) -> ChildReport:
        """Wait for a child's report. Raises EngineDeadError if it is a failure or never comes."""
        reader = asyncio.StreamReader(limit=LONGEST_REPORT_BYTES)
        pipe = os.fdopen(child.report_fd, "rb")
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            report = decode_report(await reader.readline())
        finally:
            transport.close()
        if report.failure:
            raise EngineDeadError(f"the {child.name} did not start: {report.failure}")
        return report

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        if not self._stopping:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._on_death(f"the {child.name} {how}")
