"""What of a turn's prompt stood in the session's turn before, and so why its prefix was or was not cached.

Prompts are kept as digests of their parts, bounded in number, bytes and age. A session is that of a tenant.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tokenyard.base import RequestTimings
from tokenyard.base.prompt_parts import (
    DIGEST_BYTES,
    HOWS,
    digest,
    first_difference,
    form_digests,
    how_changed,
    parts_of,
)

MAX_SESSIONS = 4096
MAX_REPORTS = 4096
MAX_HISTORY_BYTES = 16_000_000
MAX_AGE_S = 3600.0
MAX_LOST_TOKENS = 128
"""Tokens at the end of the turn before that need not be cached: the last page, and what a template writes there."""

MAX_FORM_BYTES = 16_384
"""Bytes of a prompt's new parts that are looked at for dates, ids and the like: more would hold up the event loop."""

BLOCK_CHARS = 256
"""Prompts as the chat template writes them are compared in blocks of this length."""

MAX_TAIL_CHARS = 512
"""Characters at the end of the prompt before that later prompts need not have, as the begin of an answer."""

Cause = Literal[
    "first", "elsewhere", "other_salt", "other_adapter", "changed", "hit", "evicted", "template", "lost", "unknown"
]


@dataclass(slots=True)
class CacheReport:
    """Why a turn's prompt was cached as far as it was.

    cause: "first": it is the first turn of its session. "elsewhere": no turn of its session is known here, but there
        were some: at another engine, before a restart or too long ago. "other_salt", "other_adapter": the turn before
        had another one. "changed": the prompt differs from the one before in `part`. "hit": all of the one before was
        cached. "evicted": it stands in this prompt, but KV of it was evicted. "template": its parts stand in this
        prompt, but the chat template writes them differently now. "lost": it stands in this prompt, but its KV is at
        another rank. "unknown": the answer has not begun.
    part: the first part of the turn before that changed, by its name in the conversation; "" for none.
    how: what is known of the change, such as "changed: a date or time"; "" for none.
    before: the request id of the turn before, "" for none.
    before_tokens: the tokens of its prompt.
    prompt_tokens, cached_tokens: those of this turn.
    evicted_tokens: tokens of the prompt before that had been evicted when this turn started.
    pool_short_tokens: a KV pool with so many more tokens would not have evicted them, all else being equal.
    same_chars: characters that the text of this prompt and that of the one before begin with, to within a block.
    rewritten: whether much of the text before does not stand in this one, though it may have the same parts.
    """

    cause: Cause = "unknown"
    part: str = ""
    how: str = ""
    before: str = ""
    before_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0
    pool_short_tokens: int = 0
    same_chars: int = 0
    rewritten: bool = False

    def with_evicted(self, timings: RequestTimings) -> "CacheReport":
        """The report, given what the scheduler had evicted of the prompt before."""
        tokens = timings.evicted_tokens
        cause: Cause = "evicted" if self.cause == "lost" and tokens else self.cause
        return replace(self, cause=cause, evicted_tokens=tokens, pool_short_tokens=timings.pool_short_tokens)

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(slots=True)
class Prompt:
    """The prompt of a turn.

    names, digests: of its parts.
    forms: `form_digests` of its parts, b"" where they are not known.
    chars: the length of its text as the template writes it.
    blocks: a hash of each whole block of `BLOCK_CHARS` of that text.
    whole: a hash of all of it.
    """

    rid: str
    salt: str
    adapter: str
    names: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    forms: list[bytes] = field(default_factory=list)
    tokens: int = 0
    at_s: float = 0.0
    chars: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    whole: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes, about."""
        return 200 + len(self.digests) * (DIGEST_BYTES * (1 + len(HOWS)) + 90) + len(self.blocks) * self.blocks.itemsize


class PromptHistory:
    """The latest prompt of each session, and reports of the latest turns by request id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: OrderedDict[tuple[str, str], Prompt] = OrderedDict()
        self._reports: OrderedDict[str, CacheReport] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._last)

    def report(self, rid: str) -> CacheReport | None:
        """The report of a request, None if it is no turn of a session or was too long ago."""
        return self._reports.get(rid)

    def began(
        self,
        tenant: str,
        session: str,
        rid: str,
        messages: Sequence[Any],
        tools: Sequence[Any],
        *,
        text: str = "",
        turn: int = 0,
        salt: str = "",
        adapter: str = "",
    ) -> CacheReport:
        """A turn arrives; its prompt takes the place of the one before. The report gets its cause with `answered`.

        text: the prompt as the chat template writes it.
        turn: its index in the session.
        """
        parts = list(parts_of(tools, messages))
        digests = [digest(content) for _, content in parts]
        prompt = Prompt(rid, salt, adapter, [name for name, _ in parts], digests, at_s=self._clock())
        prompt.chars = len(text)
        # Hashes of str are of 64 bits with a key of this process: as good as a digest here, and much faster.
        ends = range(BLOCK_CHARS, len(text) + 1, BLOCK_CHARS)
        prompt.blocks = array("q", (hash(text[end - BLOCK_CHARS : end]) for end in ends))
        prompt.whole = hash(text)
        before = self._last.pop((tenant, session), None)
        if before is not None:
            self._bytes -= before.nbytes
            if before.at_s < prompt.at_s - MAX_AGE_S:
                before = None
        prompt.forms = _forms(before, digests, [content for _, content in parts])
        report = _compared(before, prompt, turn)
        shown = before is None or not before.chars or hash(text[: before.chars]) != before.whole
        if report.cause == "changed" and not shown:  # the template writes nothing of what changed
            report = replace(report, cause="unknown", part="", how="")
        self._last[tenant, session] = prompt
        self._bytes += prompt.nbytes
        while self._bytes > MAX_HISTORY_BYTES or len(self._last) > MAX_SESSIONS:
            self._bytes -= self._last.popitem(last=False)[1].nbytes
        self._reports[rid] = report
        if len(self._reports) > MAX_REPORTS:
            self._reports.popitem(last=False)
        return report

    def answered(self, tenant: str, session: str, rid: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A turn's answer has begun: so many tokens of its prompt were cached."""
        report, prompt = self._reports.get(rid), self._last.get((tenant, session))
        if prompt is not None and prompt.rid == rid:
            prompt.tokens = prompt_tokens
        if report is None:
            return
        report.prompt_tokens, report.cached_tokens = prompt_tokens, cached_tokens
        if report.cause == "unknown":
            missed: Cause = "template" if report.rewritten else "lost"
            report.cause = "hit" if cached_tokens >= report.before_tokens - MAX_LOST_TOKENS else missed

    def closed(self, tenant: str, session: str) -> None:
        """A session has no further turns."""
        prompt = self._last.pop((tenant, session), None)
        if prompt is not None:
            self._bytes -= prompt.nbytes


def _forms(before: Prompt | None, digests: Sequence[bytes], contents: Sequence[bytes]) -> list[bytes]:
    """`form_digests` of each part, from the prompt before where the part is the same."""
    forms, left = [], MAX_FORM_BYTES
    for place, content in enumerate(contents):
        if before is not None and place < len(before.digests) and before.digests[place] == digests[place]:
            forms.append(before.forms[place])
            continue
        left -= len(content)
        forms.append(form_digests(content) if left >= 0 else b"")
    return forms


def _compared(before: Prompt | None, prompt: Prompt, turn: int) -> CacheReport:
    if before is None:
        return CacheReport("elsewhere" if turn else "first")
    report = CacheReport(before=before.rid, before_tokens=before.tokens)
    report.same_chars = _same_chars(before, prompt)
    report.rewritten = report.same_chars < before.chars - MAX_TAIL_CHARS - BLOCK_CHARS
    place = first_difference(before.digests, prompt.digests)
    if before.salt != prompt.salt:
        report.cause = "other_salt"
    elif before.adapter != prompt.adapter:
        report.cause = "other_adapter"
    elif place is not None:
        report.cause, report.part = "changed", before.names[place]
        if place < len(prompt.forms) and prompt.names[place] == report.part:
            report.how = how_changed(before.forms[place], prompt.forms[place])
    return report


def _same_chars(before: Prompt, prompt: Prompt) -> int:
    """The characters that both texts begin with, rounded down to whole blocks."""
    pairs = zip(before.blocks, prompt.blocks, strict=False)
    same = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
    return BLOCK_CHARS * (min(len(before.blocks), len(prompt.blocks)) if same is None else same)
