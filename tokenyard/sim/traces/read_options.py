"""Options of the trace readers, and the handling of bad lines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenyard.base import ConfigError, Int32Array
from tokenyard.sim.traces.sessions import SessionOptions
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

REJECTED_REASONS = ("invalid", "too_long")
"""Causes of an end of requests that no server of this model could serve."""

Tokenize = Callable[[str], Int32Array]
Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a trace reader.

    seed: seed of everything that is drawn.
    tokenize: tokenizer for traces of text.
    limit: most requests to read or draw.
    skip_bad: leave out lines that cannot be read.
    skip_unknown: leave out answers of unknown length instead of drawing it.
    sessions: which sessions of a trace of sessions run, and when each starts.
    share_system_prompt: tools and system prompt of sessions of the same client are the same, where the trace knows
        their lengths only.
    """

    seed: int = 0
    tokenize: Tokenize | None = None
    limit: int | None = None
    skip_bad: bool = False
    skip_unknown: bool = False
    sessions: SessionOptions = field(default_factory=SessionOptions)
    share_system_prompt: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}; it must be at least 1")

    def tokenizer(self, path: Path) -> Tokenize:
        """The tokenizer. Raises ConfigError if none was given."""
        if self.tokenize is None:
            raise ConfigError(
                f"{path} holds text; give --tokenizer with a folder or tokenizer.json to count its tokens"
            )
        return self.tokenize


class BadLines:
    """Counts the lines that a reader leaves out, with the first reason."""

    def __init__(self, options: ReadOptions, what: str = "lines") -> None:
        self._skip, self._what = options.skip_bad, what
        self._count, self._first = 0, ""

    def take(self, take: Callable[[], None]) -> None:
        """Call `take`. Its ConfigError is counted, or raised unless bad lines are left out."""
        try:
            take()
        except ConfigError as error:
            if not self._skip:
                raise
            self._count += 1
            self._first = self._first or error.message

    def remarks(self) -> list[str]:
        """A sentence about the lines that were left out, if any."""
        return [f"{self._count} {self._what} are left out; the first: {self._first}"] if self._count else []


def build_workload(
    builder: WorkloadBuilder,
    options: ReadOptions,
    lines: Iterator[tuple[str, Line]],
    take: Callable[[str, Line], None],
    *,
    whole_file: bool = False,
) -> Workload:
    """The workload that `take(where, line)` builds from all lines, or up to the limit of --limit.

    `whole_file` reads on past the limit, for files whose lines are not in order of arrival.
    """
    bad = BadLines(options)
    for where, line in lines:
        bad.take(partial(take, where, line))
        if options.limit is not None and len(builder) >= options.limit and not whole_file:
            break
    builder.remarks += bad.remarks()
    workload = builder.build()
    workload.check_lengths()
    return workload
