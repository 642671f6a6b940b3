"""The open answers of the API process: who waits for what, with a bound on what a slow reader leaves behind."""

import asyncio
from collections import deque

from tokenyard.base import Finish, OverloadedError, TokenLogprobs, TokenyardError
from tokenyard.engine.messages import TextBatch
from tokenyard.engine.spec import NO_TOKENS, OutputDelta

MOST_PENDING_DELTAS = 4096
STREAMS_AT_ONCE = 64


class Stream:
    """The deltas of one request's answers, between the messages that bring them and the reader that takes them."""

    def __init__(self, number: int, rid: str, answers: int, prompt_tokens: int) -> None:
        self.number = number
        self.rid = rid
        self.answers = answers
        self.prompt_tokens = prompt_tokens
        self.open_answers = answers
        self._pending: deque[OutputDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: TokenyardError | None = None

    @property
    def numbers(self) -> list[int]:
        """The numbers of all answers."""
        return list(range(self.number, self.number + self.answers))

    @property
    def failed(self) -> bool:
        """Whether the reader will get an error."""
        return self._error is not None

    def put(self, delta: OutputDelta) -> None:
        """Add a delta; a reader that is too far behind loses its stream (`failed`)."""
        if len(self._pending) >= MOST_PENDING_DELTAS:
            self.fail(OverloadedError(f"the client reads too slowly: {MOST_PENDING_DELTAS} deltas are waiting for it"))
            return
        self._pending.append(delta)
        if delta.finish is not None:
            self.open_answers -= 1
        self._wake()

    def fail(self, error: TokenyardError) -> None:
        """End the stream with an error, at once."""
        self._error = self._error or error
        self._pending.clear()
        self._wake()

    async def get(self) -> OutputDelta | None:
        """Return the next delta, or None after the end of the last answer. Raises the error of a failed stream."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.open_answers:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pending.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamTable:
    """All open streams by the numbers of their answers."""

    def __init__(self) -> None:
        self._by_number: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len({id(stream) for stream in self._by_number.values()})

    def add(self, stream: Stream) -> None:
        """Open a stream."""
        for number in stream.numbers:
            self._by_number[number] = stream

    def remove(self, stream: Stream) -> None:
        """Forget a stream; news about it are dropped from now on."""
        for number in stream.numbers:
            self._by_number.pop(number, None)

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

    async def deliver(self, batch: TextBatch) -> list[Stream]:
        """Hand every piece of news to its stream; return the streams that failed over it.

        Readers and whoever else waits for the event loop have their turn in between: writing out a step of a thousand
        streams at once would hold up a probe for tens of milliseconds.
        """
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for entry in batch.logprobs:
            logprobs.setdefault(entry.number, []).append(entry)
        ends = {finish.number: finish for finish in batch.finished}
        failed: list[Stream] = []
        start = 0
        columns = zip(
            batch.numbers.tolist(),
            batch.texts,
            batch.token_counts.tolist(),
            batch.completion_tokens.tolist(),
            batch.cached_tokens.tolist(),
            strict=True,
        )
        last_place = {number: place for place, number in enumerate(batch.numbers.tolist())} if ends else {}
        for place, (number, text, count, completion, cached) in enumerate(columns):
            if place % STREAMS_AT_ONCE == STREAMS_AT_ONCE - 1:
                await asyncio.sleep(0)
            stream = self._by_number.get(number)
            if stream is not None and not stream.failed:
                finish = ends.pop(number, None) if last_place.get(number) == place else None
                tokens = batch.tokens[start : start + count]
                delta = OutputDelta(
                    number - stream.number, text, tokens, stream.prompt_tokens, completion, cached, finish
                )
                if logprobs:
                    delta.logprobs = logprobs.pop(number, [])
                stream.put(delta)
                if stream.failed:
                    failed.append(stream)
            start += count
        for finish in ends.values():
            self._end(finish)
        return failed

    def _end(self, finish: Finish) -> None:
        """Tell the end of an answer that has no other news."""
        stream = self._by_number.get(finish.number)
        if stream is not None and not stream.failed:
            delta = OutputDelta(
                finish.number - stream.number,
                "",
                NO_TOKENS,
                stream.prompt_tokens,
                finish.completion_tokens,
                finish.cached_tokens,
                finish,
            )
            stream.put(delta)
