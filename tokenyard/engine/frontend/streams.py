"""The open streams of the API process, with a bound on the output that waits for a slow reader."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from tokenyard.base import NS_PER_S, Finish, OverloadedError, Request, TokenLogprobs, TokenyardError
from tokenyard.engine.frontend.io_struct import OutputDelta
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.processes.messages import TextBatch
from tokenyard.routing.balance import Assignment

Ended = Callable[[OutputDelta], None]
"""Called with the end of an answer whose reader is gone."""

MAX_PENDING_TOKENS = 4096
STREAMS_AT_ONCE = 32


class Reader(Protocol):
    """Takes the deltas of a stream as asyncio's `StreamWriter` takes bytes: `write`, then `drain` where it is slow."""

    def write(self, delta: OutputDelta) -> None:
        """Take a delta, without waiting."""

    @property
    def slow(self) -> bool:
        """Whether `drain` is needed before the next `write`. Deltas are merged meanwhile."""

    async def drain(self) -> None:
        """Wait for the client."""


class Stream:
    """The output of one request's answers on its way to the reader.

    Deltas of an answer that the reader has not taken yet are merged, so a slow reader gets fewer and larger ones.

    request: as submitted.
    client: the scheduler that has it.
    place: its assignment to a rank, None while no scheduler has it.
    paused: whether it is paused.
    resubmits: how often its scheduler ended.
    tokens: all received tokens of each answer.
    tried: ranks that refused it for lack of room.
    first: for each started answer, time of its first token (ns) and cached prompt tokens.
    shown: tokens of a continued answer that the client already has.
    """

    def __init__(self, request: Request, client: SchedulerClient, place: Assignment | None = None) -> None:
        self.request = request
        self.client = client
        self.place = place
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.tried: set[int] = set()
        self.first: dict[int, tuple[int, int]] = {}
        self.paused = False
        begun = len(request.output_ids)
        self.shown = begun if request.text.shown < 0 else min(request.text.shown, begun)
        self.resubmits = 0
        self.number = request.number
        self.rid = request.rid
        self.answers = request.sampling.n
        self.prompt_tokens = len(request.prompt_ids)
        self.open_answers = set(range(self.answers))
        """Indices of the answers that have not ended."""
        self.error: TokenyardError | None = None
        self._unread_ends: list[OutputDelta] = []
        self._pending: dict[int, OutputDelta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Reader | None = None

    @property
    def numbers(self) -> list[int]:
        """The numbers of all answers."""
        return list(range(self.number, self.number + self.answers))

    @property
    def open_numbers(self) -> list[int]:
        """The numbers of the answers that have not ended."""
        return [self.number + index for index in sorted(self.open_answers)]

    @property
    def delivered_tokens(self) -> dict[int, list[int]]:
        """The tokens that the client has of each answer of which some have come, by its number."""
        before = self.request.output_ids[: self.shown].tolist()
        return {self.number + index: before + tokens for index, tokens in enumerate(self.tokens) if tokens}

    def put(self, delta: OutputDelta) -> bool:
        """Add a delta; return whether it is the first one that waits, so that the reader should be woken.

        A reader that is too far behind loses its stream (`error`).
        """
        first = not self._pending
        if delta.token_ids:
            if delta.index not in self.first:
                self._begin(delta)
            self.tokens[delta.index] += delta.token_ids
        if delta.finish is not None:
            self.open_answers.discard(delta.index)
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        elif len(waiting.token_ids) < MAX_PENDING_TOKENS:
            waiting.extend(delta)
        else:
            self.fail(OverloadedError(f"the client reads too slowly: {MAX_PENDING_TOKENS} tokens are waiting for it"))
            return False
        return first

    def _begin(self, delta: OutputDelta) -> None:
        """Record the first tokens of an answer."""
        now = time.monotonic_ns()
        if not self.first and self.place is not None:
            self.place.first_token(now / NS_PER_S if delta.finish is None else None)
            self.place.hit(delta.cached_tokens)
        self.first[delta.index] = now, delta.cached_tokens

    def as_continued(self, delta: OutputDelta) -> OutputDelta:
        """Correct a delta of an answer that has moved to another scheduler: time of the first token and cache hits are
        those of the scheduler that began it, as the later one computed the prompt again.
        """
        if delta.index in self.first:
            first_ns, delta.cached_tokens = self.first[delta.index]
            if (finish := delta.finish) is not None:
                delta.finish = replace(
                    finish,
                    first_token_ns=first_ns,
                    admitted_ns=min(finish.admitted_ns, first_ns),
                    cached_tokens=delta.cached_tokens,
                )
        return delta

    def detach(self) -> None:
        """Release the request's assignment to its rank."""
        if self.place is not None:
            self.place.end()
            self.place = None

    def fail(self, error: TokenyardError) -> None:
        """End the stream with an error immediately."""
        self.error = self.error or error
        self._unread_ends += self._ends_pending()
        self._pending.clear()
        self.wake()

    def unread_ends(self) -> list[OutputDelta]:
        """The last deltas of answers that have ended, but that no reader has taken and none will."""
        return self._unread_ends + self._ends_pending()

    def _ends_pending(self) -> list[OutputDelta]:
        return [delta for delta in self._pending.values() if delta.finish is not None]

    def take(self) -> OutputDelta | None:
        """Return the next delta, None if there is none now. Raises the error of a failed stream."""
        if self._pending:
            return self._pending.pop(next(iter(self._pending)))
        if self.error is not None:
            raise self.error
        return None

    async def arrival(self) -> None:
        """Wait until `take` should be tried again."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def feed(self, reader: Reader) -> None:
        """Write each delta to `reader` until the last answer ends. Raises the error of a failed stream or reader.

        `wake` writes where the output arrives, which saves a task switch for each delta. This task waits until the
        reader is slow, fails or has all.
        """
        try:
            while True:
                while (delta := self.take()) is not None:
                    reader.write(delta)
                    while reader.slow:
                        await reader.drain()
                if not self.open_answers:
                    return
                self._reader = reader
                await self.arrival()
                self._reader = None
                while reader.slow:
                    await reader.drain()
        finally:
            self._reader = None

    def wake(self) -> None:
        """Write what there is, or let the task that waits for it take it."""
        error, slow = None, False
        if (reader := self._reader) is not None:
            try:
                while not slow and (delta := self.take()) is not None:
                    reader.write(delta)
                    slow = reader.slow
            except Exception as failure:
                error = failure
            if error is None and not slow and self.open_answers:
                return
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)


class StreamTable:
    """All open streams by the numbers of their answers. Used from one event loop."""

    def __init__(self) -> None:
        self._by_number: dict[int, Stream] = {}
        self._detached: dict[int, tuple[Stream, Ended]] = {}
        self._to_wake: deque[Stream] = deque()

    def __len__(self) -> int:
        return len({id(stream) for stream in self._by_number.values()})

    def add(self, stream: Stream) -> None:
        """Open a stream."""
        for number in stream.numbers:
            self._by_number[number] = stream

    def remove(self, stream: Stream) -> None:
        """Remove a stream; further output of it is dropped."""
        for number in stream.numbers:
            self._by_number.pop(number, None)

    def detach(self, stream: Stream, ended: Ended) -> None:
        """Remove a stream whose reader is gone. `ended` is called with the end of each answer that no reader took, now
        or when it arrives.
        """
        self.remove(stream)
        for delta in stream.unread_ends():
            ended(delta)
        for index in stream.open_answers:
            self._detached[stream.number + index] = stream, ended

    def end_detached(self, client: SchedulerClient, finish: Finish) -> None:
        """End the detached answers of a scheduler that has ended, with `finish`."""
        for number, (stream, ended) in list(self._detached.items()):
            if stream.client is client:
                del self._detached[number]
                ended(_end(stream, replace(finish, number=number, prompt_tokens=stream.prompt_tokens)))

    def of_number(self, number: int) -> Stream | None:
        """The open stream that an answer belongs to; None if it is not known."""
        return self._by_number.get(number)

    def of(self, client: SchedulerClient) -> list[Stream]:
        """The open streams of a scheduler, in order of arrival."""
        return [
            stream for number, stream in self._by_number.items() if number == stream.number and stream.client is client
        ]

    def with_rid(self, rid: str | None) -> list[Stream]:
        """Return the streams with this request id, or all for None."""
        return [
            stream
            for number, stream in self._by_number.items()
            if number == stream.number and rid in (None, stream.rid)
        ]

    def fail_all(self, error: TokenyardError) -> None:
        """End every stream with an error."""
        for stream in list(self._by_number.values()):
            stream.fail(error)

    async def deliver(self, batches: Sequence[TextBatch]) -> list[Stream]:
        """Deliver the deltas of messages to their streams; return the streams that failed.

        It wakes a few readers at a time and yields to the event loop in between, so that a step of a thousand streams
        does not delay a health probe. Readers get the deltas of several messages merged.
        """
        failed: list[Stream] = []
        for behind, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            for place, (stream, delta) in enumerate(self._deltas(batch), 1):
                if stream.error is not None:
                    continue
                if stream.put(delta):
                    self._to_wake.append(stream)
                elif stream.error is not None:
                    failed.append(stream)
                if not behind and not place % STREAMS_AT_ONCE:
                    await self._wake_some()
        while self._to_wake:
            await self._wake_some()
        return failed

    def _deltas(self, batch: TextBatch) -> Iterator[tuple[Stream, OutputDelta]]:
        """Each delta of a batch with its stream."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for entry in batch.logprobs:
            logprobs.setdefault(entry.number, []).append(entry)
        ends, said = {finish.number: finish for finish in batch.finished}, dict(batch.said)
        numbers, tokens = batch.numbers.tolist(), batch.tokens.tolist()
        last_place = {number: place for place, number in enumerate(numbers)} if ends else {}
        columns = zip(
            numbers,
            batch.texts,
            batch.token_counts.tolist(),
            batch.completion_tokens.tolist(),
            batch.cached_tokens.tolist(),
            strict=True,
        )
        start = 0
        for place, (number, text, count, completion, cached) in enumerate(columns):
            begin, start = start, start + count
            stream = self._by_number.get(number)
            if stream is None:
                continue
            finish = ends.pop(number, None) if last_place.get(number) == place else None
            index, prompt = number - stream.number, stream.prompt_tokens
            delta = OutputDelta(index, text, tokens[begin:start], prompt, completion, cached, finish)
            if logprobs:
                delta.logprobs = logprobs.pop(number, [])
            if said and not stream.tokens[index]:
                delta.said = said.pop(number, "")
            yield stream, stream.as_continued(delta) if stream.resubmits else delta
        for number, finish in ends.items():
            stream = self._by_number.get(number)
            if stream is not None:
                end = _end(stream, finish)
                yield stream, stream.as_continued(end) if stream.resubmits else end
            elif number in self._detached:
                stream, ended = self._detached.pop(number)
                ended(_end(stream, finish))

    async def _wake_some(self) -> None:
        """Give a few readers their turn."""
        for _ in range(min(STREAMS_AT_ONCE, len(self._to_wake))):
            self._to_wake.popleft().wake()
        await asyncio.sleep(0)


def _end(stream: Stream, finish: Finish) -> OutputDelta:
    """A delta that only ends an answer."""
    index = finish.number - stream.number
    return OutputDelta(index, "", [], stream.prompt_tokens, finish.completion_tokens, finish.cached_tokens, finish)
