"""Keeps large bodies from blocking the event loop: a thread parses them, and bodies with too many parts are refused.

A thread alone does not help, as a parser holds the GIL until it has read the whole body. The time depends on the number
of values much more than on the bytes, so the limits count values: long texts pass, millions of small values do not.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenyard.base import ContextLengthError

INLINE_BYTES = 256_000
MAX_VALUES, MAX_CONTAINERS, MAX_STRINGS = 1_500_000, 150_000, 250_000
"""Each of these parses in about a tenth of a second. A prompt may be a list of token ids."""

_PART = re.compile(rb'(?:[^"\\]++|\\.){0,20000}+', re.DOTALL)
"""A bounded run of a string's characters, up to a quotation mark."""

_threads = ThreadPoolExecutor(1, thread_name_prefix="large bodies")

T = TypeVar("T")


async def run_off_loop(body: bytes, work: Callable[[], T]) -> T:
    """Run `work`, in a thread if the body is large; one at a time, so that the event loop runs in between."""
    if len(body) <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def check_parts(body: bytes) -> None:
    """Raise ContextLengthError for JSON with too many values, containers or strings."""
    if len(body) <= INLINE_BYTES or _fits(_commas(body), _openings(body), body.count(b'"') // 2):
        return
    # Strings may contain these characters: count again outside of strings, until a limit is exceeded.
    values = containers = strings = at = 0
    while _fits(values, containers, strings) and (begin := body.find(b'"', at)) >= 0:
        values, containers = values + _commas(body, at, begin), containers + _openings(body, at, begin)
        strings, at = strings + 1, _end_of_string(body, begin + 1)
    values, containers = values + _commas(body, at), containers + _openings(body, at)
    if not _fits(values, containers, strings):
        raise ContextLengthError(
            f"the body has too many parts: at most {MAX_VALUES} values, {MAX_CONTAINERS} lists and objects, and"
            f" {MAX_STRINGS} strings are accepted; send several requests"
        )


def _end_of_string(body: bytes, at: int) -> int:
    """The position after the string whose text starts at `at`; the end of the body if the string is not closed."""
    while (match := _PART.match(body, at)) is not None and match.end() > at:
        at = match.end()
    return at + 1 if body[at : at + 1] == b'"' else len(body)


def _fits(values: int, containers: int, strings: int) -> bool:
    return values <= MAX_VALUES and containers <= MAX_CONTAINERS and strings <= MAX_STRINGS


def _commas(body: bytes, begin: int = 0, end: int | None = None) -> int:
    return body.count(b",", begin, end)


def _openings(body: bytes, begin: int = 0, end: int | None = None) -> int:
    return body.count(b"{", begin, end) + body.count(b"[", begin, end)
