"""Policy `adaptive` in a server: a second process runs the lookahead, and its result comes back as `SetPolicy`.

The event loop never waits for it. What goes there lies in a buffer until the pipe takes it, what comes back is looked
for now and then; one that ends, stalls or answers nonsense is started again later, and the policy stays as it is.
"""

import contextlib
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tokenyard.base import NS_PER_S, Request, SchedulerSettings, SetPolicy, TokenBatch, TokenyardError
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.policy.adaptive import AdaptiveOptions, AdaptivePolicy, CandidateSelector, LookaheadPacer
from tokenyard.scheduler.lookahead_state import (
    LookaheadQuery,
    LookaheadReply,
    RequestArrived,
    RequestEnded,
    decode_reply,
    encode,
)
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "tokenyard.cli.lookahead_worker")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
POLL_NS = NS_PER_S // 50
STALL_NS = 60 * NS_PER_S
"""Longest time for an answer. The process has a low priority, so on a busy machine it may take long."""

MIN_BACKOFF_NS = 5 * NS_PER_S
MAX_BACKOFF_NS = 300 * NS_PER_S
MAX_UNSENT_BYTES = 8 << 20
MAX_RESPONSE_BYTES = 1 << 16
READ_BYTES = 1 << 16
END_TIMEOUT_S = 2.0
LENGTH = struct.Struct("<I")


class LookaheadError(TokenyardError):
    """The lookahead process failed."""

    code = "lookahead_failed"


class FramePipe:
    """A child process with frames (length as uint32, then bytes) in and out, none of which is waited for."""

    def __init__(self, command: tuple[str, ...]) -> None:
        """Start it. Raises OSError if that cannot be."""
        environment = ENVIRONMENT | os.environ
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
        self._unsent = bytearray()
        self._unread = bytearray()

    def send(self, data: bytes) -> None:
        """Send a frame as soon as it can be."""
        self._unsent += LENGTH.pack(len(data)) + data

    def pump(self) -> list[bytes]:
        """Send what can be sent now and return the frames that have come. Raises LookaheadError if the process is gone,
        does not read, or sends frames that are too long.
        """
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise LookaheadError("it does not read what it is sent")
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent[:READ_BYTES])]
        with contextlib.suppress(BlockingIOError):
            while len(self._unread) <= MAX_RESPONSE_BYTES:
                data = os.read(self._out, READ_BYTES)
                if not data:
                    raise LookaheadError("it has ended")
                self._unread += data
        return self._frames()

    def _frames(self) -> list[bytes]:
        frames = []
        while len(self._unread) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread)
            if length > MAX_RESPONSE_BYTES:
                raise LookaheadError("it answers at too great length")
            end = LENGTH.size + length
            if len(self._unread) < end:
                break
            frames.append(bytes(self._unread[LENGTH.size : end]))
            del self._unread[:end]
        return frames

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """End the process without waiting for it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def gone(self, timeout_s: float = 0.0) -> bool:
        """Whether the process is gone, after waiting for it up to `timeout_s`."""
        if timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        return self._process.poll() is not None


class LookaheadClient(Attachment):
    """Looks ahead for one scheduler while its policy is `adaptive`."""

    name = "lookahead"
    optional = True

    def __init__(self, core: Core, settings: SchedulerSettings, command: tuple[str, ...] = COMMAND) -> None:
        self._core, self._settings, self._command = core, settings, command
        self._adaptive_options: AdaptiveOptions | None = None
        self._selector = CandidateSelector([""])
        self._pacer: LookaheadPacer | None = None
        self.pipe: FramePipe | None = None
        self._ending: list[FramePipe] = []
        self._initial_policy: SetPolicy | None = None
        self._query_sent_ns: int | None = None
        self._poll_ns = self._restart_ns = 0
        self.pause_ns = MIN_BACKOFF_NS
        self._queries, self._failures, self._cpu_s, self._note = 0, 0, 0.0, ""
        if settings.schedule_policy == AdaptivePolicy.name:
            self.policy_changed(SetPolicy(AdaptivePolicy.name, settings.policy_options), time.monotonic_ns())

    def policy_changed(self, event: SetPolicy, now: int) -> None:
        """An operator chose a policy: start, restart or stop. Raises ConfigError for options that cannot be."""
        if event.name != AdaptivePolicy.name:
            self._adaptive_options = None
            self._drop()
            return
        settings = replace(self._settings, schedule_policy=event.name, policy_options=event.options)
        self._adaptive_options = adaptive_options = AdaptiveOptions.of(settings)
        self._selector = CandidateSelector(adaptive_options.candidates, switches=self._selector.switches)
        self._pacer = LookaheadPacer(adaptive_options, now)
        self._initial_policy = self._selector.begin()
        self._query_sent_ns = None
        if self.pipe is None:
            self._start(now)

    def accepted(self, request: Request, now: int) -> None:
        """A request has come."""
        if self.pipe is not None:
            self.pipe.send(encode(RequestArrived.of(request, now, blocks=not self._settings.disable_radix_cache)))

    def on_output(self, batch: TokenBatch) -> None:
        """The scheduler says what became of requests."""
        if self.pipe is not None:
            for finish in batch.finished:
                self.pipe.send(encode(RequestEnded.of(finish)))

    def while_device_runs(self, now: int) -> Sequence[SetPolicy]:
        """Take what has come and ask what is to be asked; the change to make, if any."""
        if now < self._poll_ns:
            return ()
        self._poll_ns = now + POLL_NS
        self._ending = [pipe for pipe in self._ending if not pipe.gone()]
        if self._adaptive_options is None:
            return ()
        event, self._initial_policy = self._initial_policy, None
        try:
            event = self._exchange(now) or event
        except (LookaheadError, OSError, ValueError) as error:
            self._fail(error, now)
        return () if event is None else (event,)

    def _exchange(self, now: int) -> SetPolicy | None:
        if self.pipe is None:
            if now >= self._restart_ns:
                self._start(now)
            return None
        event = None
        for frame in self.pipe.pump():
            event = self._take(decode_reply(frame), now)
        if self._query_sent_ns is not None and now - self._query_sent_ns > STALL_NS:
            raise LookaheadError(f"it has not answered for {STALL_NS // NS_PER_S} s")
        assert self._pacer is not None
        if self._query_sent_ns is None and now >= self._pacer.next_ns and self._core.has_work:
            self._send_query(now)
        return event

    def _send_query(self, now: int) -> None:
        assert self.pipe is not None
        assert self._adaptive_options is not None
        self._queries += 1
        query = LookaheadQuery(
            self._queries, self._selector.wanted(), self._adaptive_options.horizon_s, self._core.lookahead_state(now)
        )
        self.pipe.send(encode(query))
        self._query_sent_ns = now

    def _take(self, reply: LookaheadReply, now: int) -> SetPolicy | None:
        """Judge an answer; one to a question from before the policy changed is dropped."""
        if reply.number > self._queries or not 0.0 <= reply.cpu_s < 1e6:
            raise ValueError("it answers what was not asked")
        self._cpu_s += reply.cpu_s
        if self._query_sent_ns is None or reply.number < self._queries:
            return None
        assert self._pacer is not None
        event = self._selector.take(reply.scores, now)
        self._pacer.record_lookahead(self._query_sent_ns, reply.cpu_s)
        self._query_sent_ns = None
        self.pause_ns = MIN_BACKOFF_NS
        if self._note:
            self._note = ""
            logger.info("the lookahead works again")
        if event is not None:
            logger.info("the policy becomes %s: %s", self._selector.current, self._selector.latest[-1].reason)
        return event

    def _start(self, now: int) -> None:
        try:
            self.pipe = FramePipe(self._command)
        except OSError as error:
            self._fail(error, now)

    def _fail(self, error: Exception, now: int) -> None:
        """Do without it for a while."""
        self._drop()
        self._failures += 1
        self._restart_ns = now + self.pause_ns
        self.pause_ns = min(2 * self.pause_ns, MAX_BACKOFF_NS)
        if not self._note:
            logger.error(
                "the lookahead process failed: %s; the policy stays, and the process is restarted later", error
            )
        self._note = f"the lookahead process failed: {error}"

    def _drop(self) -> None:
        if self.pipe is not None:
            self.pipe.kill()
            self._ending.append(self.pipe)
        self.pipe, self._query_sent_ns = None, None

    def describe(self, now: int) -> Mapping[str, Any]:
        """What is known and was done, for people; empty while another policy was chosen."""
        return {"adaptive": self._describe(now)}

    def _describe(self, now: int) -> dict[str, Any]:
        if self._adaptive_options is None:
            return {}
        selector = self._selector
        return {
            "current": selector.current,
            "candidates": list(selector.candidates),
            "looks": selector.looks,
            "cpu_s": round(self._cpu_s, 3),
            "failures": self._failures,
            "note": self._note,
            "scores": [asdict(score) for score in selector.scores],
            "switches": [{"candidate": name, "times": times} for name, times in selector.switches.items()],
            "latest": [
                {"candidate": one.candidate, "reason": one.reason, "ago_s": round((now - one.at_ns) / NS_PER_S, 1)}
                for one in selector.latest
            ],
        }

    def close(self) -> None:
        """End the process."""
        self._adaptive_options = None
        self._drop()
        for pipe in self._ending:
            if not pipe.gone(END_TIMEOUT_S):
                logger.warning("the lookahead process (%d) is slow to end", pipe.pid)
