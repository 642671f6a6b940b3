"""The engine's front in the API process: text to token ids on the way in, deltas of text on the way out."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import zmq
from tokenizers import Tokenizer

from tokenyard.base import (
    AbortCause,
    Cancel,
    ConfigError,
    EngineDeadError,
    ExecutorInfo,
    Explanation,
    OverloadedError,
    Pause,
    PauseMode,
    Resume,
    Submit,
    TokenBatch,
    Update,
)
from tokenyard.engine.processes.ipc import TO_API, TO_SCHEDULER, Endpoints, ProtocolError, pull_socket, push_socket
from tokenyard.engine.processes.messages import (
    ChoosePolicy,
    Explain,
    ExplainReply,
    FlushCache,
    FlushReply,
    GetSnapshot,
    Heartbeat,
    PolicyReply,
    Profile,
    ProfileReply,
    SnapshotReply,
    TextBatch,
    ToApi,
    ToScheduler,
)
from tokenyard.engine.recent import RecentRequests
from tokenyard.engine.requests import RequestMaker, check_priority, ns_from_ms
from tokenyard.engine.spec import GenerateSpec, OutputDelta
from tokenyard.engine.streams import Ended, Reader, Stream, StreamTable
from tokenyard.engine.text.chat_messages import Message
from tokenyard.engine.text.chat_template import ChatTemplate, render_within
from tokenyard.engine.text.text_side import TextAssembler
from tokenyard.engine.watch.liveness import heartbeat_age_s

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 30.0
SNAPSHOT_TIMEOUT_S = 2.0


class TokenizerManager:
    """Sends requests to the scheduler and hands out what comes back. One per engine, used from one event loop.

    `tokenizer` is None where the engine takes and gives token ids only.
    """

    def __init__(
        self, info: ExecutorInfo, tokenizer: Tokenizer | None, template: ChatTemplate, endpoints: Endpoints
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._template = template
        self._requests = RequestMaker(info, tokenizer, template.special_tokens.get("eos_token", ""))
        # Without a detokenizer process the scheduler's own messages arrive here.
        self._assembler = TextAssembler(None)
        self._streams = StreamTable()
        self._recent = RecentRequests()
        self._next_number = 1
        self._reply_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._heartbeat: Heartbeat | None = None
        self._death: str | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox = pull_socket(self._context, endpoints.api)
        self._outbox = push_socket(self._context, endpoints.scheduler)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fileno(), self._receive)
        self._news: list[TextBatch] = []
        self._has_news = asyncio.Event()
        self._deliverer = self._loop.create_task(self._deliver())

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._requests.longest

    @property
    def template_sources(self) -> dict[str, str]:
        """The Jinja sources of the chat templates by name, which tell how the model writes."""
        return self._template.sources

    @property
    def open_requests(self) -> int:
        """Requests whose answers have not all ended."""
        return len(self._streams)

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[OutputDelta, None]:
        """Answer one request. Closing the iterator before its end cancels the request.

        Yields deltas until each of the n answers has had one with `finish`; a request that the scheduler refuses ends
        with a finish of reason "abort" and a cause. Raises InvalidRequestError or ContextLengthError
        for a wrong spec, OverloadedError for a reader that is too slow and EngineDeadError if the engine goes.
        """
        stream = await self._submit(spec)
        try:
            while True:
                if (delta := stream.take()) is not None:
                    yield delta
                elif stream.open_answers:
                    await stream.arrival()
                else:
                    break
        finally:
            self._close_stream(stream)

    async def feed(self, spec: GenerateSpec, reader: Reader, ended: Ended) -> None:
        """Answer one request as `generate` does, and give each delta to `reader`, which must not wait for long.

        Where the reader goes or is too slow, `ended` is told how each answer that was still open came to its end.
        """
        stream = await self._submit(spec)
        try:
            await stream.feed(reader)
        finally:
            self._close_stream(stream, ended)

    async def render_chat(self, messages: list[Message], **options: Any) -> str:
        """Return the prompt of a conversation; `options` are those of `ChatTemplate.render`.

        Raises InvalidRequestError if the template refuses, takes too long, or is not there.
        """
        return await render_within(self._template, messages, **options)

    async def abort(self, rid: str | None = None, cause: AbortCause = "cancelled") -> None:
        """End the requests with this id, or all for None; each ends with a finish of reason "abort" and this cause."""
        for stream in self._streams.with_rid(rid):
            self._send(Cancel(stream.numbers, cause=cause))

    async def update(self, rid: str, *, priority: int | None = None, deadline_ms: float | None = None) -> bool:
        """Change how urgent a request is; `deadline_ms` counts from its arrival. False if there is none with this id.

        Raises InvalidRequestError for values out of range.
        """
        check_priority(priority)
        deadline_ns = ns_from_ms(deadline_ms, "deadline_ms")
        streams = self._streams.with_rid(rid)
        for stream in streams:
            for number in stream.numbers:
                self._send(Update(number, priority, deadline_ns))
        return bool(streams)

    async def pause_request(self, rid: str) -> bool:
        """Let a request give up its place until `resume_request`; False if there is none with this id."""
        streams = self._streams.with_rid(rid)
        for stream in streams:
            self._send(Pause(numbers=stream.numbers))
        return bool(streams)

    async def resume_request(self, rid: str) -> bool:
        """Let a paused request go on; False if there is none with this id."""
        streams = self._streams.with_rid(rid)
        for stream in streams:
            self._send(Resume(stream.numbers))
        return bool(streams)

    async def explain(self, rid: str) -> list[Explanation]:
        """Where the time of each answer to a request went; empty for one that is not known, or not any more."""
        told = []
        for number in self._recent.numbers(rid):
            reply_id, reply = self._expect_reply()
            self._send(Explain(reply_id, number))
            told.append(await self._reply(reply_id, reply, REPLY_TIMEOUT_S))
        return [explanation for explanation in told if explanation is not None]

    async def start_profile(self) -> bool:
        """Begin a timeline of the event loop's steps; False if one runs already."""
        return (await self._profile(start=True)).done

    async def stop_profile(self) -> bytes | None:
        """End the timeline and return its events as a JSON list (Trace Event Format); None if none runs."""
        reply = await self._profile(start=False)
        return reply.events if reply.done else None

    async def _profile(self, *, start: bool) -> ProfileReply:
        reply_id, reply = self._expect_reply()
        self._send(Profile(reply_id, start))
        answer: ProfileReply = await self._reply(reply_id, reply, REPLY_TIMEOUT_S)
        return answer

    def recent_rids(self) -> list[str]:
        """The ids of requests that are open or ended not long ago."""
        return self._recent.rids()

    def rid_of(self, number: int) -> str | None:
        """The id of the request with this number, None if it is not known."""
        return self._recent.rid(number)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop all work until `continue_`; new requests wait."""
        self._send(Pause(mode))

    async def continue_(self) -> None:
        """Go on after `pause`."""
        self._send(Resume())

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order the queue by another policy. Raises ConfigError, and nothing changes, if that cannot be."""
        reply_id, reply = self._expect_reply()
        self._send(ChoosePolicy(reply_id, name, options))
        refusal = await self._reply(reply_id, reply, REPLY_TIMEOUT_S)
        if refusal:
            raise ConfigError(refusal)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests run or wait."""
        reply_id, reply = self._expect_reply()
        self._send(FlushCache(reply_id))
        return bool(await self._reply(reply_id, reply, REPLY_TIMEOUT_S))

    async def snapshot(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> dict[str, Any]:
        """Return the scheduler's counters; those of the last heartbeat if it is in a step for longer than that."""
        reply_id, reply = self._expect_reply()
        self._send(GetSnapshot(reply_id))
        try:
            return dict(await self._reply(reply_id, reply, timeout_s))
        except OverloadedError:
            return self.load

    @property
    def load(self) -> dict[str, Any]:
        """The scheduler's counters of the last heartbeat, without asking; empty before the first."""
        return dict(self._heartbeat.counters) if self._heartbeat is not None else {}

    @property
    def last_heard(self) -> str:
        """What the scheduler was doing as of its last heartbeat, with its queue, in words."""
        beat = self._heartbeat
        return f"{beat.doing}, {beat.steps} steps done, queue {beat.counters}" if beat is not None else "nothing"

    def health(self) -> float:
        """Return the seconds since the scheduler was known to be well; infinite if it never was or is dead.

        A scheduler that waits for a long step of the device counts as well.
        """
        if self._death is not None or self._heartbeat is None:
            return math.inf
        return heartbeat_age_s(self._heartbeat, time.monotonic_ns())

    def engine_died(self, reason: str) -> None:
        """End everything that is open with EngineDeadError, and refuse everything from now on."""
        self._death = self._death or reason
        error = EngineDeadError(f"the engine stopped: {self._death}")
        self._streams.fail_all(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def close(self) -> None:
        """Cancel what is open and close the sockets."""
        self.engine_died("the server is shutting down")
        self._deliverer.cancel()
        await asyncio.gather(self._deliverer, return_exceptions=True)
        self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()

    async def _submit(self, spec: GenerateSpec) -> Stream:
        self._check_alive()
        arrival_ns = time.monotonic_ns()
        rid = spec.rid or uuid.uuid4().hex
        prompt_ids = await self._requests.prompt_ids(spec)
        self._check_alive()
        number = self._next_number
        request = self._requests.make(spec, prompt_ids, number=number, rid=rid, arrival_ns=arrival_ns)
        self._next_number += request.sampling.n
        stream = Stream(number, rid, request.sampling.n, len(prompt_ids))
        self._streams.add(stream)
        self._recent.add(stream)
        self._send(Submit(request))
        return stream

    def _close_stream(self, stream: Stream, ended: Ended | None = None) -> None:
        """Forget a stream; if its request may still run, cancel it."""
        self._streams.remove(stream)
        if (stream.open_answers or stream.error is not None) and self._death is None:
            if ended is not None:
                self._streams.leave(stream, ended)
            self._send(Cancel(stream.numbers, "the client went away", "client_gone"))

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine stopped: {self._death}")

    def _send(self, message: ToScheduler) -> None:
        self._check_alive()
        self._outbox.send(TO_SCHEDULER.encode(message))

    def _expect_reply(self) -> tuple[int, asyncio.Future[Any]]:
        self._check_alive()
        reply_id = next(self._reply_ids)
        self._replies[reply_id] = asyncio.get_running_loop().create_future()
        return reply_id, self._replies[reply_id]

    async def _reply(self, reply_id: int, reply: asyncio.Future[Any], timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError as error:
            raise OverloadedError(f"the scheduler did not answer within {timeout_s:g} s") from error
        finally:
            del self._replies[reply_id]

    def _receive(self) -> None:
        """Take in all that the socket holds: its descriptor tells of new messages only once none is left."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._take_frame(self._inbox.recv(zmq.NOBLOCK))

    def _take_frame(self, frame: bytes) -> None:
        """Take in one message; whatever goes wrong with it costs that one only."""
        try:
            self._take(TO_API.decode(frame))
        except ProtocolError as error:
            logger.error("dropped a message: %s", error)
        except Exception:
            logger.exception("a message from the engine could not be taken in")

    def _take(self, message: ToApi) -> None:
        match message:
            case TextBatch():
                self._add_news(message)
            case TokenBatch():
                self._add_news(self._assembler.step(message)[0])
            case Heartbeat():
                self._heartbeat = message
            case (
                FlushReply(reply_id=reply_id, done=value)
                | SnapshotReply(reply_id=reply_id, counters=value)
                | PolicyReply(reply_id=reply_id, refusal=value)
                | ExplainReply(reply_id=reply_id, explanation=value)
                | (ProfileReply(reply_id=reply_id) as value)
            ):
                reply = self._replies.get(reply_id)
                if reply is not None and not reply.done():
                    reply.set_result(value)

    def _add_news(self, batch: TextBatch) -> None:
        self._news.append(batch)
        self._has_news.set()

    async def _deliver(self) -> None:
        """Hand news to their streams until closed; all that came during one round is the next one."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            batches, self._news = self._news, []
            try:
                for stream in await self._streams.deliver(batches):
                    self._send(Cancel(stream.numbers, "the client reads too slowly", "slow_reader"))
            except Exception:
                logger.exception("news from the engine could not be handed on")
