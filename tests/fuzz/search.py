"""A search for inputs that break a parser: it changes inputs at random and keeps those that reach new code.

The method is that of AFL and libFuzzer: an input whose run crosses a pair of lines that no other has crossed is changed
further. Lines are seen by `sys.settrace`, in files of the package alone.
"""

import contextlib
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "tokenyard")
MAX_BYTES = 1 << 16
MAX_CPU_S = 0.1
MAX_MEMORY_KB = 200 << 10
NUMBERS = (0, 1, 2, 127, 128, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)
TEXTS = (
    b"",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'"x"',
    b"9" * 30,
    b"1" * 5000,
    b"\xff\xfe",
)
NESTED = (b"[", b"(", b'{"a":', b"[{", b'"', b"\\", b"\r\n", b"\x91", b"\x81\xa1a")


class SlowError(Exception):
    """A run took longer, or more memory, than anything that size should."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes that others wrote.

    run: reads them.
    seeds: inputs to begin with.
    refusals: what it raises for input that is wrong. Anything else is a defect.
    words: pieces that occur in its inputs.
    """

    run: Callable[[bytes], Any]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = ()
    words: tuple[bytes, ...] = ()


@dataclass
class Search:
    """One search of one target.

    found: of each kind of defect (the exception and where it was raised) the smallest input.
    """

    target: Target
    rng: random.Random
    corpus: list[bytes] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    found: dict[str, bytes] = field(default_factory=dict)
    runs: int = 0

    def begin(self) -> None:
        """Run the seeds."""
        for seed in self.target.seeds():
            self.attempt(seed, keep=True)

    def step(self) -> None:
        """Run a change of an input that is known."""
        data = self.rng.choice(self.corpus)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            data = self.change(data)[:MAX_BYTES]
        self.attempt(data)

    def attempt(self, data: bytes, *, keep: bool = False) -> None:
        """Run an input, and keep it if it reaches new code."""
        edges: set[Any] = set()
        with tracing(edges):
            kind = defect_of(self.target, data)
        self.runs += 1
        if not kind and self.runs % 16 == 0:
            kind = cost_of(self.target, data)
        if kind and len(data) < len(self.found.get(kind, data + b" ")):
            self.found[kind] = data
        if keep or not edges <= self.seen:
            self.seen |= edges
            self.corpus.append(data)
            kind = kind or cost_of(self.target, data)

    def change(self, data: bytes) -> bytes:
        """The data with one change."""
        rng, at = self.rng, self.rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 16, 64, 256)))
        match rng.randrange(11):
            case 0 if at < len(data):
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
            case 4:
                return data[:at]
            case 5:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) % (1 << 8 * size)
                return data[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]
            case 6 if numbers := [*re.finditer(rb"-?\d+(\.\d+)?", data)]:
                place = rng.choice(numbers)
                return data[: place.start()] + rng.choice(TEXTS) + data[place.end() :]
            case 7 if values := [*re.finditer(rb'"[^"]{0,40}"|true|false|null|\[\]|\{\}', data)]:
                place = rng.choice(values)
                return data[: place.start()] + rng.choice(TEXTS) + data[place.end() :]
            case 8:
                return data[:at] + rng.choice(NESTED) * rng.choice((1, 40, 4000)) + data[at:]
            case 9:
                other = rng.choice(self.corpus)
                begin = rng.randrange(len(other) + 1)
                return data[:at] + other[begin : begin + rng.choice((4, 16, 64, 1000))] + data[end:]
        return data[:at] + rng.choice((*self.target.words, *TEXTS)) + data[end:]


def defect_of(target: Target, data: bytes) -> str:
    """What is wrong with a run, by kind; "" if nothing is."""
    try:
        target.run(data)
    except target.refusals:
        return ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        frame = error.__traceback__
        where = "?"
        while frame is not None:
            if frame.tb_frame.f_code.co_filename.startswith(PACKAGE):
                where = f"{frame.tb_frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.tb_lineno}"
            frame = frame.tb_next
        return f"{type(error).__name__} at {where}"
    return ""


def cost_of(target: Target, data: bytes) -> str:
    """Whether a run takes too long, each of three times, or too much memory; "" if not."""
    took_s = []
    for _ in range(3):
        begun_s, begun_kb = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        defect_of(target, data)
        took_s.append(time.thread_time() - begun_s)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun_kb > MAX_MEMORY_KB:
            return "too much memory"
        if took_s[-1] < MAX_CPU_S:
            return ""
    return f"over {MAX_CPU_S:g} s"


@contextlib.contextmanager
def tracing(edges: set[Any]) -> Iterator[None]:
    """Collect the pairs of lines of the package that are run one after the other."""

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        last = 0

        def lines(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                edges.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return lines

        return lines

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)


def shrink(target: Target, kind: str, data: bytes, tries: int = 2000) -> bytes:
    """A smaller input with the same defect: pieces are cut out, from the largest size to the smallest, and again."""
    before = b""
    while data != before and tries > 0:
        before, step = data, max(len(data) // 2, 1)
        while step and tries > 0:
            at = 0
            while at < len(data) and tries > 0:
                shorter, tries = data[:at] + data[at + step :], tries - 1
                if defect_of(target, shorter) == kind:
                    data = shorter
                else:
                    at += step
            step //= 2
    return data
