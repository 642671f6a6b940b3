"""A workload: requests as columns, with output lengths that only the simulated executor knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isnan, nan

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    BoolArray,
    ConfigError,
    Float64Array,
    Int32Array,
    Int64Array,
    Request,
    SamplingParams,
    Slo,
)
from tokenyard.sim.traces.censored_lengths import draw_lengths
from tokenyard.sim.traces.prompt_ids import Content, SegmentContent, TokenContent, UniqueContent
from tokenyard.sim.traces.sessions import Sessions

LENGTH_KNOWN = -1
NO_PRIORITY = -(2**31)
MAX_TOKENS = 1 << 20
MAX_TARGET_S = 1e9
MAX_SPAN_S = 1e9
MAX_PRIORITY = 2**31 - 1
COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "max_new_tokens",
    "tenant",
    "service_class",
    "priority",
    "deadline_s",
    "slo_ttft_s",
    "slo_tpot_s",
    "seen_tokens",
)


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, as columns of equal length.

    arrival_s: float64[n], from 0, ascending. With `sessions` the run decides: 0 before it.
    prompt_tokens, output_tokens: int32[n], at least 1.
    max_new_tokens: int32[n], the limit of each request, or 0 for the length of the largest answer.
    tenants, classes: names, indexed by tenant and service_class.
    tenant, service_class: int32[n].
    priority: int32[n], NO_PRIORITY for none.
    deadline_s: float64[n], seconds from arrival to the end, NaN for none.
    slo_ttft_s, slo_tpot_s: float64[n], the request's own targets for its first token and for the mean time per further
        token; NaN where those of the run apply.
    seen_tokens: int32[n], LENGTH_KNOWN, or for an answer that did not end by itself the tokens that were seen of it;
        output_tokens is then a draw (`sim.traces.censored_lengths`).
    remarks: what was left out or guessed when the trace was read, one sentence each.
    sessions: when requests are sent that wait for the end of others; None if all arrive at their own times.
    adapters: names of LoRA adapters, "" for none.
    adapter: int32[n], index into `adapters`; None if no request has one.
    """

    name: str
    arrival_s: Float64Array
    prompt_tokens: Int32Array
    output_tokens: Int32Array
    content: Content
    max_new_tokens: Int32Array
    tenants: tuple[str, ...] = ("",)
    tenant: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    classes: tuple[str, ...] = ("",)
    service_class: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    priority: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    deadline_s: Float64Array = field(default_factory=lambda: np.zeros(0, np.float64))
    slo_ttft_s: Float64Array = field(default_factory=lambda: np.zeros(0, np.float64))
    slo_tpot_s: Float64Array = field(default_factory=lambda: np.zeros(0, np.float64))
    seen_tokens: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    remarks: tuple[str, ...] = ()
    sessions: Sessions | None = None
    adapters: tuple[str, ...] = ("",)
    adapter: Int32Array | None = None

    def __post_init__(self) -> None:
        if not self.span_s < MAX_SPAN_S:
            raise ConfigError(
                f"{self.name}: the last request comes {self.span_s:g} s after the first; it must be below "
                f"{MAX_SPAN_S:g} s"
            )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s.max()) if len(self) else 0.0

    @cached_property
    def max_output_tokens(self) -> int:
        """The length of the largest answer."""
        return int(self.output_tokens.max())

    @property
    def max_prompt_tokens(self) -> int:
        """The length of the largest prompt."""
        return int(self.prompt_tokens.max())

    @property
    def unknown_lengths(self) -> int:
        """Number of answers whose length is drawn because their end is unknown."""
        return int((self.seen_tokens >= 0).sum())

    def check_lengths(self) -> None:
        """Raise ConfigError if no answer has a known length to draw the others from."""
        if self.unknown_lengths == len(self):
            raise ConfigError(f"{self.name}: every request was refused or broken off; no length is known")

    @property
    def notes(self) -> list[str]:
        """Caveats about this workload for readers of its results, one sentence each."""
        notes = list(self.remarks)
        if unknown := self.unknown_lengths:
            notes.append(
                f"{unknown} of {len(self)} answers were refused or broken off, so their length is unknown: it is drawn "
                "from the others (--unknown-lengths skip leaves them out)"
            )
        return notes

    def scaled(self, rate_scale: float) -> "Workload":
        """The same requests arriving, or sessions starting, `rate_scale` times as fast.

        Raises ConfigError unless it is above 0 and finite.
        """
        if not 0.0 < rate_scale < inf:
            raise ConfigError(f"--rate-scale is {rate_scale}; it must be above 0 and finite")
        sessions = None if self.sessions is None else self.sessions.scaled(rate_scale)
        return replace(self, arrival_s=self.arrival_s / rate_scale, sessions=sessions)

    def limited(self, requests: int | None) -> "Workload":
        """The first `requests` requests (None: all). Raises ConfigError if that is not at least 1."""
        if requests is None or requests >= len(self):
            return self
        if requests < 1:
            raise ConfigError(f"--limit is {requests}; it must be at least 1")
        first = replace(self, sessions=None).only(slice(requests))
        return first if self.sessions is None else replace(first, sessions=self.sessions.first(requests))

    def only(self, chosen: slice | BoolArray) -> "Workload":
        """The chosen requests, renumbered. Shared prefixes stay correct only if these are the first requests.

        Raises ConfigError for a workload of sessions, whose requests wait for each other.
        """
        if self.sessions is not None:
            raise ConfigError(f"{self.name}: requests of sessions cannot be chosen one by one")
        adapter = None if self.adapter is None else self.adapter[chosen]
        return replace(self, adapter=adapter, **{name: getattr(self, name)[chosen] for name in COLUMNS})

    def request(self, index: int, content: Content | None = None, *, true_length: bool = False) -> Request:
        """Request `index` as the engine sees it; with `true_length` its max_new_tokens is its true output length.

        The seed is the request's number, by which the simulated executor finds the true output length.
        """
        priority = int(self.priority[index])
        slo = Slo(_ns_or_none(self.slo_ttft_s[index]), _ns_or_none(self.slo_tpot_s[index]))
        tokens = int(self.prompt_tokens[index])
        asked = int(self.max_new_tokens[index]) or self.max_output_tokens
        longest = int(self.output_tokens[index]) if true_length else asked
        sessions = self.sessions
        return Request(
            number=index,
            rid=str(index),
            prompt_ids=(content or self.content).prompt_ids(index, tokens),
            sampling=SamplingParams(max_new_tokens=longest, temperature=0.0, seed=index),
            arrival_ns=to_ns(float(self.arrival_s[index])),
            priority=None if priority == NO_PRIORITY else priority,
            service_class=self.classes[self.service_class[index]] or None,
            tenant=self.tenants[self.tenant[index]],
            deadline_ns=_ns_or_none(self.deadline_s[index]),
            slo=None if slo.ttft_ns is slo.tpot_ns is None else slo,
            lora="" if self.adapter is None else self.adapters[self.adapter[index]],
            session="" if sessions is None else sessions.names[sessions.conversation[index]],
            turn=0 if sessions is None else int(sessions.turn[index]),
        )


def to_ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * NS_PER_S)


def _ns_or_none(seconds: float) -> int | None:
    return None if isnan(seconds) else to_ns(float(seconds))


def _check_asked(where: str, least: int, max_new_tokens: int | None, priority: int | None) -> None:
    """Raise ConfigError for a limit below `least` tokens or too large, and for a priority out of range."""
    if max_new_tokens is not None and not least <= max_new_tokens < MAX_TOKENS:
        raise ConfigError(f"{where}: max_new_tokens is {max_new_tokens}; it must be from {least} to {MAX_TOKENS - 1}")
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise ConfigError(f"{where}: priority is {priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")


class WorkloadBuilder:
    """Collects requests line by line and checks each; `where` in error messages is the file and line.

    spread: if the trace's clock is coarse, add a seeded uniform draw from [0, tick) to each arrival and sort; otherwise
        all requests would seem to arrive in bursts on the tick.
    sort: accept arrivals in any order; otherwise a clock that goes backwards is refused.
    skip_unknown: leave out answers of unknown length instead of drawing it.
    remarks: may be extended until the workload is built.
    """

    def __init__(
        self, name: str, seed: int = 0, spread: bool = False, sort: bool = False, skip_unknown: bool = False
    ) -> None:
        self._name, self._seed, self._spread, self._sort = name, seed, spread, sort
        self._skip_unknown = skip_unknown
        self._skipped = 0
        self.remarks: list[str] = []
        self._arrivals: list[float] = []
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._asked: list[int] = []
        self._tenants: dict[str, int] = {"": 0}
        self._tenant: list[int] = []
        self._adapters: dict[str, int] = {"": 0}
        self._adapter: list[int] = []
        self._classes: dict[str, int] = {"": 0}
        self._class: list[int] = []
        self._priority: list[int] = []
        self._deadline: list[float] = []
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._seen: list[int] = []
        self._ids: list[Int32Array] = []
        self._streams: list[Int64Array] = []
        self._lengths: list[Int32Array] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(
        self,
        where: str,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        *,
        max_new_tokens: int | None = None,
        ids: Int32Array | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
        tenant: str = "",
        service_class: str = "",
        priority: int | None = None,
        deadline_s: float | None = None,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        complete: bool = True,
        adapter: str = "",
    ) -> None:
        """Add one request. `segments` are (stream, tokens) pairs (see `SegmentContent`).

        `complete` False means that the answer did not end by itself, and `output_tokens` counts only the part that was
        seen.

        Raises ConfigError, in one line, for a bad number or a clock that goes backwards, and then adds nothing.
        """
        self._check(where, arrival_s, prompt_tokens, output_tokens)
        least = max(output_tokens, 1)
        _check_asked(where, least, max_new_tokens, priority)
        targets = (
            (self._deadline, "deadline_s", deadline_s),
            (self._ttft, "slo_ttft_s", slo_ttft_s),
            (self._tpot, "slo_tpot_s", slo_tpot_s),
        )
        for _, name, seconds in targets:
            if seconds is not None and not 0.0 < seconds < MAX_TARGET_S:
                raise ConfigError(f"{where}: {name} is {seconds}; it must be above 0 and below {MAX_TARGET_S:g} s")
        if self._skip_unknown and not complete:
            self._skipped += 1
            return
        for column, _, seconds in targets:
            column.append(nan if seconds is None else seconds)
        self._seen.append(LENGTH_KNOWN if complete else output_tokens)
        self._arrivals.append(arrival_s)
        self._prompts.append(prompt_tokens)
        self._outputs.append(least)
        self._asked.append(max_new_tokens or 0)
        self._tenant.append(self._tenants.setdefault(tenant, len(self._tenants)))
        self._adapter.append(self._adapters.setdefault(adapter, len(self._adapters)))
        self._class.append(self._classes.setdefault(service_class, len(self._classes)))
        self._priority.append(NO_PRIORITY if priority is None else priority)
        if ids is not None:
            self._ids.append(ids)
        if segments is not None:
            self._streams.append(np.array([stream for stream, _ in segments], np.int64))
            self._lengths.append(np.array([tokens for _, tokens in segments], np.int32))

    def _check(self, where: str, arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        if not 0 < prompt_tokens < MAX_TOKENS:
            raise ConfigError(f"{where}: a prompt of {prompt_tokens} tokens; it must be from 1 to {MAX_TOKENS - 1}")
        if not 0 <= output_tokens < MAX_TOKENS:
            raise ConfigError(f"{where}: an answer of {output_tokens} tokens; it must be from 0 to {MAX_TOKENS - 1}")
        if not np.isfinite(arrival_s):
            raise ConfigError(f"{where}: the arrival time {arrival_s} is no finite number")
        if not self._sort and self._arrivals and arrival_s < self._arrivals[-1]:
            back_s = self._arrivals[-1] - arrival_s
            raise ConfigError(f"{where}: the clock goes backwards, by {back_s:g} s; sort the trace")

    def build(self) -> Workload:
        """The workload, arrivals counted from the first. Raises ConfigError if there is no request."""
        if not self._arrivals:
            told = f" of known length; {self._skipped} were refused or broken off" if self._skipped else ""
            raise ConfigError("; ".join([f"{self._name}: the trace holds no request{told}", *self.remarks]))
        if len({len(self), len(self._ids) or len(self), len(self._streams) or len(self)}) > 1:
            raise ConfigError(
                f"{self._name}: some requests say what their prompt holds and others do not; use one form"
            )
        arrivals = np.array(self._arrivals)
        arrivals -= arrivals.min()
        tick_s = _tick_s(arrivals) if self._spread else 0.0
        if tick_s > 0.0:
            arrivals += np.random.default_rng(self._seed).uniform(0.0, tick_s, len(arrivals))
        order = np.argsort(arrivals, kind="stable")
        return Workload(
            name=self._name,
            arrival_s=arrivals[order],
            prompt_tokens=np.array(self._prompts, np.int32)[order],
            output_tokens=self._output_tokens()[order],
            content=self._content(order),
            max_new_tokens=np.array(self._asked, np.int32)[order],
            tenants=tuple(self._tenants),
            tenant=np.array(self._tenant, np.int32)[order],
            classes=tuple(self._classes),
            service_class=np.array(self._class, np.int32)[order],
            priority=np.array(self._priority, np.int32)[order],
            deadline_s=np.array(self._deadline)[order],
            slo_ttft_s=np.array(self._ttft)[order],
            slo_tpot_s=np.array(self._tpot)[order],
            seen_tokens=np.array(self._seen, np.int32)[order],
            remarks=tuple(self._all_remarks()),
            adapters=tuple(self._adapters),
            adapter=np.array(self._adapter, np.int32)[order] if any(self._adapter) else None,
        )

    def _output_tokens(self) -> Int32Array:
        """int32[n], the lengths of the answers; unknown ones are drawn, up to their clients' limits."""
        seen, known = np.array(self._seen, np.int32), np.array(self._outputs, np.int32)
        groups = [np.array(self._class, np.int32), np.array(self._tenant, np.int32)]
        drawn, asked = draw_lengths(seen, known, groups, self._seed), np.array(self._asked, np.int32)
        limited: Int32Array = np.where((seen >= 0) & (asked > 0), np.minimum(drawn, asked), drawn).astype(np.int32)
        return limited

    def _all_remarks(self) -> list[str]:
        if not self._skipped:
            return self.remarks
        whole = self._skipped + len(self)
        return [*self.remarks, f"{self._skipped} of {whole} requests were refused or broken off and are left out"]

    def _content(self, order: Int64Array) -> Content:
        if self._ids:
            return TokenContent([self._ids[i] for i in order])
        if not self._streams:
            return UniqueContent()
        lengths = [self._lengths[i] for i in order]
        offsets = np.concatenate(([0], np.cumsum([len(part) for part in lengths]))).astype(np.int64)
        return SegmentContent(np.concatenate([self._streams[i] for i in order]), np.concatenate(lengths), offsets)


def _tick_s(arrival_s: Float64Array) -> float:
    """The tick of a clock in whole seconds; 0 if it is finer, so that few requests share a time stamp."""
    distinct = np.unique(arrival_s)
    if not 1 < len(distinct) <= len(arrival_s) / 2:
        return 0.0
    return float(np.round(np.diff(distinct).min()))


def uniform_columns(
    name: str, arrival_s: Float64Array, prompt_tokens: Int32Array, output_tokens: Int32Array, content: Content
) -> Workload:
    """A workload of one tenant and one class, without priorities, deadlines and targets. `arrival_s` must ascend."""
    count = len(arrival_s)
    none = np.full(count, nan)
    return Workload(
        name=name,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=np.maximum(output_tokens, 1).astype(np.int32),
        content=content,
        max_new_tokens=np.zeros(count, np.int32),
        tenant=np.zeros(count, np.int32),
        service_class=np.zeros(count, np.int32),
        priority=np.full(count, NO_PRIORITY, np.int32),
        deadline_s=none,
        slo_ttft_s=none,
        slo_tpot_s=none,
        seen_tokens=np.full(count, LENGTH_KNOWN, np.int32),
    )
