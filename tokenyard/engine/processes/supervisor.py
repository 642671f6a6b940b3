"""Starts the engine's child processes, watches them, starts schedulers again that end, and leaves none behind."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from tokenyard.base import ConfigError, EngineDeadError, ExecutorInfo, TokenyardError
from tokenyard.engine.processes.child import child_environment
from tokenyard.engine.processes.engine_config import ChildReport, ChildTask, EngineConfig, decode_report, encode_line
from tokenyard.engine.processes.ipc import SocketDirectory

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
RENDEZVOUS_NAME = "ranks"
"""Socket in the engine's folder by which ranks that compute together find each other."""

STOP_MESSAGE = b"stop\n"
MAX_REPORT_BYTES = 1 << 20
RESTART_PAUSES_S = (0.0, 1.0, 5.0, 20.0, 60.0)
"""Delay before each restart of a scheduler; after the last one the rank is abandoned."""

DETOKENIZER_START_S = 60.0
"""How long a detokenizer may take to start again. A scheduler may take any time, as models are of any size."""

STABLE_S = 300.0
"""A scheduler that ran for this long gets all restarts again."""

CHILD_MODULES = {
    "scheduler": "tokenyard.engine.scheduler_process.process",
    "detokenizer": "tokenyard.engine.detokenizer.process",
}


class Listener(Protocol):
    """Is notified when processes start and end."""

    def rank_ready(self, rank: int, source: int) -> None:
        """The scheduler of a rank runs again, as process number `source`."""

    def rank_lost(self, source: int, reason: str, *, suspect_user_code: bool) -> None:
        """A scheduler process has ended; it is started again if that is possible, without user code if
        `suspect_user_code`.
        """

    def rank_abandoned(self, rank: int) -> None:
        """The rank is abandoned; others are left."""

    def detokenizer_lost(self) -> None:
        """The detokenizer has ended; it is started again, and all schedulers with it."""

    def detokenizer_ready(self) -> None:
        """The detokenizer runs again."""

    def engine_dead(self, reason: str) -> None:
        """The engine cannot go on."""


@dataclass(slots=True)
class Child:
    """A child process and the connection on which it reports that it is ready or why it ends.

    name: of the process, for logs.
    process: the process; its standard input carries the message to stop.
    rank, source: of a scheduler, as in `ChildTask`.
    silent: why the supervisor killed it; "" if it did not.
    restarted_with_detokenizer: whether that was because the detokenizer ended.
    culprit: as in its last report.
    """

    name: str
    process: Process
    reports: asyncio.StreamReader
    pipe: asyncio.StreamWriter
    rank: int = 0
    source: int = 0
    silent: str = ""
    restarted_with_detokenizer: bool = False
    culprit: str = ""

    def write(self, message: bytes) -> None:
        """Write to its standard input, unless it has died: its pipe is closed then."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(message)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def ready(self) -> ChildReport:
        """Wait for its report. Raises ConfigError or EngineDeadError if it is a failure or never comes."""
        report = decode_report(await self.reports.readline())
        if report.wrong_settings:
            raise ConfigError(report.failure)
        if report.failure:
            raise EngineDeadError(f"the {self.name} did not start: {report.failure}")
        return report

    async def end(self) -> str:
        """Wait for its end and return the reason."""
        code = await self.process.wait()
        last_report = await self.reports.readline()
        self.pipe.close()
        if self.silent:
            return self.silent
        if last_report:
            report = decode_report(last_report)
            self.culprit = report.culprit
            return f"the {self.name} failed: {report.failure}"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the {self.name} {how}"


class Supervisor:
    """The scheduler processes, one per rank, and the detokenizer process of one engine.

    Each child's standard input stays open: a message on it asks the child to end, and end of file means that the parent
    is gone. A scheduler that ends unexpectedly is restarted a few times, without user code if that did not return or
    if it is the second end in a short time (fcfs replaces a user-defined policy). A detokenizer that ends is restarted
    together with all schedulers. The engine dies when all ranks, or the detokenizer, have used up their restarts.
    """

    def __init__(self, config: EngineConfig, sockets: SocketDirectory) -> None:
        self._config = config
        self._sockets = sockets
        self._listener: Listener | None = None
        self._children: dict[int, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._next_source = 0
        self._abandoned_ranks = 0
        self._stopping = False
        self._detokenizer_up = asyncio.Event()
        self._detokenizer_up.set()

    async def start(self) -> ExecutorInfo:
        """Start all children, wait until they are ready, and return the executor info of a scheduler.

        Raises EngineDeadError with the reason of the first child that fails, or ConfigError if the settings are wrong;
        the other children are stopped then.
        """
        try:
            for rank in range(self._config.ranks):
                await self._spawn("scheduler", rank)
            if not self._config.skip_tokenizer_init:
                await self._spawn("detokenizer")
            reports = await asyncio.gather(*(child.ready() for child in self._children.values()))
        except BaseException:
            # A process that is still loading does not read the message to stop, and has nothing to lose.
            for child in self._children.values():
                child.kill()
            await self.stop()
            raise
        info = reports[0].info
        assert info is not None
        return info

    def watch(self, listener: Listener) -> None:
        """Notify `listener` of the schedulers that run, and from now on when children start and end."""
        self._listener = listener
        for child in self._children.values():
            is_scheduler = child.name == "scheduler"
            if is_scheduler:
                listener.rank_ready(child.rank, child.source)
            watch = self._watch_rank(child) if is_scheduler else self._watch_detokenizer(child)
            self._watchers.append(asyncio.create_task(watch))

    async def stop(self) -> None:
        """Ask all children to end, and make those that do not within a few seconds."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for child in self._children.values():
            child.write(STOP_MESSAGE)
            if child.process.stdin is not None:
                child.process.stdin.close()
        for child in self._children.values():
            try:
                await asyncio.wait_for(child.process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                logger.warning("the %s did not end by itself", child.name)
                child.kill()
                await child.process.wait()
            child.pipe.close()
        self._children = {}

    def kill_silent(self, source: int, reason: str) -> None:
        """End a child process that sends no heartbeats; it logs the stacks of its threads, if it can."""
        child = self._children.get(source)
        if child is not None:
            child.silent = reason
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGABRT)
                child.process.send_signal(signal.SIGCONT)

    def kill_silent_detokenizer(self, reason: str) -> None:
        """End a detokenizer that sends no heartbeats, in the same way."""
        for child in self._children.values():
            if child.name == "detokenizer":
                self.kill_silent(child.source, reason)

    async def _spawn(self, name: str, rank: int = 0, *, config: EngineConfig | None = None, note: str = "") -> Child:
        """Start a process, which is among the children from then on."""
        source, self._next_source = self._next_source, self._next_source + 1
        # No pipe: uvloop closes the number of one twice, and in between it may belong to a socket of another thread.
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", CHILD_MODULES[name], str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )
        child_config = config or self._config
        if name == "scheduler":
            child_config = child_config.for_rank(rank)
            if child_config.enable_dp_attention:
                meeting = {"meeting": str(self._sockets.path / RENDEZVOUS_NAME)}
                child_config = replace(child_config, executor_options=child_config.executor_options | meeting)
        task = ChildTask(child_config, os.getpid(), str(self._sockets.path), rank, source, note)
        reader, pipe = await asyncio.open_connection(sock=ours, limit=MAX_REPORT_BYTES)
        child = self._children[source] = Child(name, process, reader, pipe, rank, source)
        child.write(encode_line(task))
        return child

    async def _watch_detokenizer(self, child: Child) -> None:
        """Wait for the end of the detokenizer, then restart it and all schedulers, as part of their output is lost."""
        assert self._listener is not None
        tries, clock = iter(RESTART_PAUSES_S), asyncio.get_running_loop().time
        while True:
            began_s = clock()
            reason = await child.end()
            if self._stopping:
                return
            del self._children[child.source]
            if clock() - began_s > STABLE_S:
                tries = iter(RESTART_PAUSES_S)
            self._detokenizer_up.clear()
            self._listener.detokenizer_lost()
            for scheduler in self._children.values():
                scheduler.silent, scheduler.restarted_with_detokenizer = (
                    f"{reason}, so the schedulers start again",
                    True,
                )
                scheduler.kill()
            started, reason = await self._start_again(child, reason, tries, self._config, "")
            if started is None:
                self._die(reason)
                return
            child = started
            self._detokenizer_up.set()
            self._listener.detokenizer_ready()
            logger.warning("the detokenizer runs again")

    async def _watch_rank(self, child: Child) -> None:
        """Wait for the end of a rank's scheduler and start it again, until all tries are used up."""
        assert self._listener is not None
        config, note, clock = self._config, "", asyncio.get_running_loop().time
        tries, ends = iter(RESTART_PAUSES_S), 0
        while True:
            began_s = clock()
            reason = await child.end()
            del self._children[child.source]
            if self._stopping:
                return
            if clock() - began_s > STABLE_S:
                tries, ends = iter(RESTART_PAUSES_S), 0
            ends += not child.restarted_with_detokenizer
            suspect_user_code = bool(child.culprit) or (ends > 1 and not child.restarted_with_detokenizer)
            self._listener.rank_lost(child.source, reason, suspect_user_code=suspect_user_code)
            if suspect_user_code and has_user_code(config):
                note = f"without user-defined policy and priority function, as they may be why {reason}"
                config = without_user_code(config)
            if child.restarted_with_detokenizer:
                await self._detokenizer_up.wait()
                tries = chain((0.0,), tries)
            started, reason = await self._start_again(child, reason, tries, config, note)
            if started is None:
                self.give_up(child.rank, reason)
                return
            child = started
            self._listener.rank_ready(child.rank, child.source)
            logger.warning("the scheduler of rank %d runs again", child.rank)

    async def _start_again(
        self, ended: Child, reason: str, tries: Iterator[float], config: EngineConfig, note: str
    ) -> tuple[Child | None, str]:
        """Start a process in place of one that has ended; None, with the latest reason, once no try is left."""
        name, rank = ended.name, ended.rank
        which = f"rank {rank}" if name == "scheduler" else "it"
        for pause_s in tries:
            logger.critical("%s; %s starts again in %g s%s", reason, which, pause_s, note and f" ({note})")
            await asyncio.sleep(pause_s)
            child = await self._spawn(name, rank, config=config, note=note)
            try:
                await asyncio.wait_for(child.ready(), DETOKENIZER_START_S if name == "detokenizer" else None)
                return child, ""
            except (TokenyardError, TimeoutError) as error:
                reason = str(error) or f"the {name} did not start within {DETOKENIZER_START_S:g} s"
                child.kill()
                await child.end()
                del self._children[child.source]
                if isinstance(error, ConfigError):
                    break
        return None, reason

    def give_up(self, rank: int, reason: str) -> None:
        """Do without a rank that cannot be restarted; ends the engine with the last one."""
        self._abandoned_ranks += 1
        # Ranks that compute together cannot go on without one of them.
        if self._abandoned_ranks == self._config.ranks or self._config.enable_dp_attention:
            self._die(reason)
        else:
            left = self._config.ranks - self._abandoned_ranks
            logger.critical("%s; rank %d is abandoned, %d of %d are left", reason, rank, left, self._config.ranks)
            assert self._listener is not None
            self._listener.rank_abandoned(rank)

    def _die(self, reason: str) -> None:
        assert self._listener is not None
        if not self._stopping:
            self._stopping = True
            self._listener.engine_dead(reason)


def has_user_code(config: EngineConfig) -> bool:
    """Whether the policy or the priority function is user-defined."""
    return ":" in config.scheduler.schedule_policy or bool(config.priority_function)


def without_user_code(config: EngineConfig) -> EngineConfig:
    """The same settings without a priority function, and with fcfs instead of a user-defined policy."""
    scheduler = config.scheduler
    if ":" in scheduler.schedule_policy:
        scheduler = replace(scheduler, schedule_policy="fcfs", policy_options={})
    return replace(config, scheduler=scheduler, priority_function="")
