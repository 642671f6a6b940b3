"""Starts the engine's child processes, waits until they are ready, watches them, and leaves none behind."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import ConfigError, EngineDeadError, ExecutorInfo
from tokenyard.engine.processes.config import ChildReport, ChildTask, EngineConfig, decode_report, encode_line
from tokenyard.engine.processes.ipc import SocketDirectory
from tokenyard.engine.processes.libraries import child_environment

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
STOP_WORD = b"stop\n"
LONGEST_REPORT_BYTES = 1 << 20
CHILD_MODULES = {
    "scheduler": "tokenyard.engine.processes.scheduler_process",
    "detokenizer": "tokenyard.engine.processes.detokenizer",
}


@dataclass(slots=True)
class Child:
    """A child process and the pipe on which it reports that it is ready or why it ends."""

    name: str
    process: Process
    reports: asyncio.StreamReader
    pipe: asyncio.ReadTransport


class Supervisor:
    """The scheduler and detokenizer processes of one engine.

    Each child's standard input stays open; a word on it asks the child to end, and its end tells that we are gone.
    `on_death` is called with the reason when the first child ends unasked.
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

        Raises EngineDeadError with the reason of the first child that fails, or ConfigError where the settings are at
        fault; all others are stopped then.
        """
        names = ["scheduler"] if self._config.skip_tokenizer_init else ["scheduler", "detokenizer"]
        try:
            for name in names:
                self._children.append(await self._spawn(name))
            reports = await asyncio.gather(*(_ready(child) for child in self._children))
        except BaseException:
            # Who still loads listens to nobody, and has nothing to lose.
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
            await self.stop()
            raise
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        info = reports[0].info
        assert info is not None
        return info

    async def stop(self) -> None:
        """Ask all children to end, and make those that do not within a few seconds."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        for child in self._children:
            stdin = child.process.stdin
            # The pipe of a child that has died is closed already.
            if stdin is not None and not stdin.is_closing():
                stdin.write(STOP_WORD)
                stdin.close()
        for child in self._children:
            try:
                await asyncio.wait_for(child.process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                logger.warning("the %s did not end by itself", child.name)
                child.process.kill()
                await child.process.wait()
            child.pipe.close()
        self._children = []

    def end_silent(self, reason: str) -> None:
        """End children of which nothing is heard; each leaves the stacks of its threads in the log, if it still can."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGABRT)
                child.process.send_signal(signal.SIGCONT)
        if not self._stopping:
            self._stopping = True
            self._on_death(reason)

    async def _spawn(self, name: str) -> Child:
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", CHILD_MODULES[name], str(write_fd)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd,),
                env=child_environment(),
            )
        finally:
            os.close(write_fd)
        ends = self._sockets.endpoints
        task = ChildTask(self._config, ends.scheduler, ends.detokenizer, ends.api, os.getpid(), str(self._sockets.path))
        assert process.stdin is not None
        process.stdin.write(encode_line(task))
        reader = asyncio.StreamReader(limit=LONGEST_REPORT_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        return Child(name, process, reader, pipe)

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        last_words = await child.reports.readline()
        if self._stopping:
            return
        self._stopping = True
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if last_words:
            how = f"failed: {decode_report(last_words).failure}"
        self._on_death(f"the {child.name} {how}")


async def _ready(child: Child) -> ChildReport:
    """Wait for a child's report. Raises ConfigError or EngineDeadError if it is a failure or never comes."""
    report = decode_report(await child.reports.readline())
    if report.wrong_settings:
        raise ConfigError(report.failure)
    if report.failure:
        raise EngineDeadError(f"the {child.name} did not start: {report.failure}")
    return report
