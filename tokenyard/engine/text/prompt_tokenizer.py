"""Text to token ids off the event loop, with a bound on the bytes that are tokenized at a time.

Tokenizing takes about a hundred bytes of memory and two microseconds for each byte of text. The library holds the
interpreter's lock while it encodes one text, and releases it only in its batch calls.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import ContextLengthError, Int32Array, InvalidRequestError

INLINE_CHARS = 1000
"""Longer texts are tokenized in a thread."""

PIECE_CHARS = 16_384
COUNTED_BYTES_PER_TOKEN = 6
"""A text with more bytes for each token that fits is counted in pieces first; hardly any text of real use has more."""

PIECE_SLACK = 1.1
"""Cutting a text into pieces adds a token or two to each; a text is refused only beyond this factor."""

MIN_LONGEST_TOKEN_BYTES = 32
MIN_COUNTED_BYTES = 1_000_000
"""Texts of up to this size are accepted for counting, whatever the model's context is."""

BYTES_AT_A_TIME = 4_000_000
MAX_TOKENIZER_THREADS = 4

T = TypeVar("T")


def max_token_bytes(tokenizer: Tokenizer) -> int:
    """The most bytes of text in one token of the vocabulary; at least `MIN_LONGEST_TOKEN_BYTES`.

    A byte-level vocabulary writes each byte as one character; others write a space as U+2581.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if "ByteLevel(" in repr(tokenizer.decoder):
        return max(MIN_LONGEST_TOKEN_BYTES, *map(len, vocabulary))
    return max(MIN_LONGEST_TOKEN_BYTES, *(len(text.replace("\u2581", " ").encode()) for text in vocabulary))


class ByteSemaphore:
    """A semaphore over a number of bytes. Callers wait in order of their calls. For one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Wait for `size` bytes of room, or for all of it if that is less; return how much to release."""
        size = min(size, self.size)
        if not self._waiting and size <= self.free:
            self.free -= size
            return size
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((size, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give(size)
            raise
        return size

    def give(self, size: int) -> None:
        """Release bytes and wake waiting callers."""
        self.free += size
        while self._waiting and (self._waiting[0][0] <= self.free or self._waiting[0][1].done()):
            size, place = self._waiting.popleft()
            if not place.done():
                self.free -= size
                place.set_result(None)


class _TokenizeTask:
    """One text that a thread tokenizes; `abandoned` makes the thread stop, as its result is no longer needed."""

    def __init__(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._add_special_tokens = add_special_tokens
        self.abandoned = False

    def exceeds(self, max_prompt_tokens: int) -> bool:
        """Whether the text has more than `max_prompt_tokens`, counted piece by piece up to there."""
        count = 0
        for start in range(0, len(self._text), PIECE_CHARS):
            if self.abandoned:
                return True
            piece = self._text[start : start + PIECE_CHARS]
            count += len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
            if count > PIECE_SLACK * max_prompt_tokens:
                return True
        return False

    def ids(self) -> list[int]:
        """The token ids of the whole text."""
        if self.abandoned:
            return []
        encoding = self._tokenizer.encode_batch_fast([self._text], add_special_tokens=self._add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids


class PromptTokenizer:
    """Tokenizes prompts of up to `max_prompt_tokens` tokens.

    `max_bytes` is the most bytes of text that `max_prompt_tokens` tokens can hold. Longer texts are refused without
    tokenizing them, also if the tokenizer would drop parts such as spaces.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.max_bytes = max_prompt_tokens * (
            max_token_bytes(tokenizer) if tokenizer is not None else MIN_LONGEST_TOKEN_BYTES
        )
        self._room = ByteSemaphore(BYTES_AT_A_TIME)
        threads = max(1, min(MAX_TOKENIZER_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    async def ids(self, text: str, add_special_tokens: bool, *, allow_too_long: bool = False) -> Int32Array:
        """The token ids of a text, int32[n]; one that has a few tokens too many is returned whole.

        Raises InvalidRequestError without a tokenizer, and ContextLengthError for a text that surely has more than
        `max_prompt_tokens`, after the work for little more than these. With `allow_too_long` texts of up to
        `MIN_COUNTED_BYTES` are always accepted.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this server has no tokenizer: send token ids instead of text", param="prompt")
        if len(text) <= INLINE_CHARS:
            return np.array(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)
        max_bytes = max(self.max_bytes, MIN_COUNTED_BYTES) if allow_too_long else self.max_bytes
        size = len(text) if len(text) > max_bytes else len(text.encode("utf-8", "surrogatepass"))
        if size > max_bytes:
            raise self._too_long(size)
        job = _TokenizeTask(tokenizer, text, add_special_tokens)
        counts_first = size > COUNTED_BYTES_PER_TOKEN * self.max_prompt_tokens and not allow_too_long
        # Only one piece at a time is in memory.
        if counts_first and await self._run(job, PIECE_CHARS, lambda: job.exceeds(self.max_prompt_tokens)):
            raise self._too_long(size)
        return np.array(await self._run(job, size, job.ids), dtype=np.int32)

    def _too_long(self, size: int) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self.max_prompt_tokens + 1} tokens. However, your prompt has"
            f" {size} bytes, which are more than {self.max_prompt_tokens} tokens, the most that fit with at least one"
            " token of answer. Please reduce its length.",
            param="prompt",
            prompt_tokens=self.max_prompt_tokens + 1,
            most=self.max_prompt_tokens,
        )

    async def _run(self, job: _TokenizeTask, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread; the bytes are released when the thread is done, even if the caller was cancelled."""
        taken = await self._room.take(size)
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        done.add_done_callback(lambda _: self._room.give(taken))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            job.abandoned = True
            raise
