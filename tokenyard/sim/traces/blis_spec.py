"""Workload specifications of BLIS (github inference-sim/inference-sim, docs/reference/workload-spec.md), from which
requests are drawn.

A YAML file with `clients`, `cohorts` or `inference_perf`, by which it is detected. Read are rates, arrival processes,
distributions of lengths, windows of activity, prefix groups, tenants, classes, targets, images and sounds (as the
tokens that BLIS counts for them), cohorts whose rate follows the hour (`diurnal`), rises (`spike`) or ends (`drain`),
users that wait for their answers (`concurrency`) and conversations (`reasoning.multi_turn`), as closed loops or, with
`closed_loop: false`, at times of their own. How rates and windows become arrivals follows BLIS's code
(sim/workload/generator.go, cohort.go, inference_perf.go); the draws are those of `--seed`, not BLIS's own. Not read:
`seed`, `category`, `streaming`, `model`, `adapter`, `network`, `timeout`, `goodput_slo_targets` and the ratio of
reasoning. Refused are any field that is not known, and `servegen_data`: `--trace-format servegen` reads that folder
itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, cos, inf, pi
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Float64Array, Int32Array
from tokenyard.sim.traces.blis_distributions import US_PER_S, Draw, Rng, gaps, lengths, parts_of_a_prompt
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.recorded_calls import GrowingPrompts
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionRecord, Turn
from tokenyard.sim.traces.spec_fields import known_fields, read_document
from tokenyard.sim.traces.trace_files import name_of, number, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, WorkloadBuilder

DRAWN_AT_ONCE = 1024
MAX_REQUESTS, MAX_DRAWN = 5_000_000, 50_000_000
MAX_MEMBERS = 100_000
"""BLIS's own bound on the `population` of a cohort."""
DEFAULT_PREFIX = 50
"""BLIS's own default of `prefix_length`."""
HOURS_A_DAY, S_PER_HOUR, DRAIN_SEGMENTS = 24, 3600.0, 10

_IGNORED = frozenset({"streaming", "model", "adapter", "network", "timeout"})
_CLIENT = _IGNORED | {
    *("id", "tenant_id", "slo_class", "rate_fraction", "arrival", "input_distribution", "output_distribution"),
    *("prefix_group", "prefix_length", "lifecycle", "reasoning", "slo_target_us", "concurrency", "think_time_us"),
    *("closed_loop", "multimodal"),
}
_PATTERNS = frozenset({"diurnal", "spike", "drain"})
_COHORT = (_CLIENT - {"lifecycle", "concurrency", "think_time_us"}) | {"population", "prefix_sharing"} | _PATTERNS
_CHANGED = ("arrival", "input_distribution", "output_distribution")
_WINDOW = frozenset({"start_us", "end_us", "trace_rate", *_CHANGED})
_TOP = frozenset(
    {
        *("version", "seed", "category", "clients", "cohorts", "aggregate_rate", "horizon", "num_requests"),
        *("inference_perf", "goodput_slo_targets"),
    }
)
_V2_CLASSES = {"realtime": "critical", "interactive": "standard"}
"""Classes of clients that BLIS renames in files of version 1."""


@dataclass(frozen=True, slots=True)
class _Window:
    """When an entry is active, in seconds.

    weight: its share, or with an absolute rate its requests per second, of all members together; None for the entry's.
    changed: fields of the entry that are others in this window.
    """

    begin_s: float
    end_s: float
    weight: float | None
    changed: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A client or a cohort of the file.

    share: of the rate of all that are active with it, of all its members together.
    windows: none for one that is always active.
    """

    where: str
    fields: dict[str, Any]
    members: int
    share: float
    windows: tuple[_Window, ...]


@dataclass(frozen=True, slots=True)
class _Client:
    """One client: what its requests are like, and when it is active.

    rate: requests per second while it is active; of conversations, their starts.
    windows: (begin, end) in seconds, not empty.
    fills: its arrivals are stretched so that the gaps fill its one window exactly.
    count: so many requests, the last one at the window's end; 0 for as many as the rate gives.
    gaps: draws gaps with a mean of 1.
    rounds, think_s, grows: a conversation, whose prompts repeat it; one round for single requests.
    single: one conversation, not one per arrival.
    waits: a round waits for the answer before it.
    users: closed loops that send one request after the other; 0 for arrivals by time.
    """

    where: str
    tenant: str
    service_class: str
    rate: float
    windows: tuple[tuple[float, float], ...]
    fills: bool
    count: int
    gaps: Draw
    prompt: Draw
    output: Draw
    group: str
    prefix: int
    target_s: float | None
    rounds: int
    think_s: float
    grows: bool
    single: bool
    waits: bool
    users: int


@dataclass(frozen=True, slots=True)
class _Start:
    """A request, or the first one of a conversation."""

    at_s: float
    client: _Client


def read_blis_spec(path: Path, options: ReadOptions) -> Workload:
    """The requests, `options.limit` or `num_requests` of them, or those up to `horizon`.

    Raises ConfigError, in one line, for a file that does not fit, and for one that says neither.
    """
    spec = known_fields(read_document(path), path.name, _TOP)
    most = whole(spec, "num_requests", path.name) if spec.get("num_requests") else 0
    if options.limit is not None:
        most = min(most, options.limit) if most else options.limit
    horizon_s = number(spec, "horizon", path.name) / US_PER_S if spec.get("horizon") else inf
    clients = _shared_lengths(_clients(spec, path.name, horizon_s))
    last_s = max((client.windows[-1][1] for client in clients if not client.users), default=inf)
    horizon_s = min(horizon_s, last_s)
    endless = any(not (client.single or client.count or client.users) for client in clients)
    if not most and horizon_s == inf and endless:
        raise ConfigError(f"{path.name} says neither num_requests nor horizon; give --limit")
    rng = np.random.default_rng(options.seed)
    starts = _starts(clients, horizon_s, most or MAX_REQUESTS, rng)
    if any(client.rounds > 1 or client.users for client in clients):
        return _sessions(path.name, clients, starts, most or MAX_REQUESTS, horizon_s, options, rng)
    return _requests(path.name, clients, starts[: most or None], rng)


def is_blis_spec(path: Path) -> bool:
    """Whether a YAML file is such a specification."""
    try:
        found = read_document(path)
    except ConfigError:
        return False
    return isinstance(found, dict) and any(part in found for part in ("clients", "cohorts", "inference_perf"))


def _list(spec: dict[str, Any], key: str, where: str) -> list[Any]:
    found = spec.get(key) or []
    if not isinstance(found, list):
        raise ConfigError(f"{where}: {key} must be a list")
    return found


def _clients(spec: dict[str, Any], name: str, horizon_s: float) -> list[_Client]:
    """The clients, with their rates. Of one that changes between windows, one for each of these."""
    if spec.get("inference_perf") is not None:
        return list(_stages(spec["inference_perf"], f"{name}, inference_perf"))
    old = str(spec.get("version", "1")) == "1"
    # An aggregate rate of 0 means that the windows have rates of their own.
    relative = spec.get("aggregate_rate") not in (None, 0)
    total = number(spec, "aggregate_rate", name) if relative else 0.0
    entries: list[_Entry] = []
    for place, one in enumerate(_list(spec, "clients", name)):
        where = f"{name}, client {place + 1}"
        fields = known_fields(one, where, _CLIENT)
        if old and fields.get("slo_class") in _V2_CLASSES:
            fields = {**fields, "slo_class": _V2_CLASSES[fields["slo_class"]]}
        share = 0.0 if fields.get("concurrency") else _share(fields, where, relative)
        entries.append(_Entry(where, fields, 1, share, tuple(_windows(fields, where))))
    for place, one in enumerate(_list(spec, "cohorts", name)):
        entries.append(_cohort(one, f"{name}, cohort {place + 1}", relative))
    if not entries:
        raise ConfigError(f"{name} names no clients")
    if total < 0.0 or any(entry.share < 0.0 for entry in entries):
        raise ConfigError(f"{name}: aggregate_rate and rate_fraction must be at least 0")
    rated = [entry for entry in entries if not entry.fields.get("concurrency")]
    for entry in rated:
        if not relative and not (entry.windows and all(window.weight is not None for window in entry.windows)):
            raise ConfigError(
                f"{entry.where}: without aggregate_rate it needs windows with a trace_rate, a cohort a spike with one"
            )
    changing = any(window.weight is not None or window.changed for entry in rated for window in entry.windows)
    return [
        client
        for entry in entries
        for client in (
            _in_each_window(entry, rated, total if relative else None, horizon_s)
            if changing and entry.windows
            else _at_one_rate(entry, rated, total)
        )
    ]


def _share(fields: dict[str, Any], where: str, relative: bool) -> float:
    """Its share of the aggregate rate, which need not be there where windows have rates of their own."""
    return number(fields, "rate_fraction", where) if relative or "rate_fraction" in fields else 0.0


def _windows(fields: dict[str, Any], where: str) -> Iterator[_Window]:
    life = fields.get("lifecycle")
    for window in _list(known_fields(life, where, {"windows"}), "windows", where) if life is not None else []:
        known_fields(window, f"{where}, a window", _WINDOW)
        begin_s, end_s = (number(window, key, f"{where}, a window") / US_PER_S for key in ("start_us", "end_us"))
        rate = window.get("trace_rate")
        weight = None if rate is None else number(window, "trace_rate", f"{where}, a window")
        yield _window(where, begin_s, end_s, weight, {key: window[key] for key in _CHANGED if window.get(key)})


def _window(
    where: str, begin_s: float, end_s: float, weight: float | None = None, changed: dict[str, Any] | None = None
) -> _Window:
    if not (0.0 <= begin_s < end_s and (weight is None or weight >= 0.0)):
        raise ConfigError(f"{where}: a window must end after it starts, and its rate must be at least 0")
    return _Window(begin_s, end_s, weight, changed or {})


def _cohort(one: Any, where: str, relative: bool) -> _Entry:
    fields = known_fields(one, where, _COHORT)
    count = whole(fields, "population", where)
    if not 0 < count <= MAX_MEMBERS:
        raise ConfigError(f"{where}: population is {count}; it must be from 1 to {MAX_MEMBERS}")
    windows: list[_Window] = []
    if fields.get("diurnal") is not None:
        windows += _diurnal(fields["diurnal"], f"{where}, diurnal")
    if (spike := fields.get("spike")) is not None:
        known_fields(spike, where, {"start_time_us", "duration_us", "trace_rate"})
        begin_s = number(spike, "start_time_us", where) / US_PER_S
        end_s = begin_s + number(spike, "duration_us", where) / US_PER_S
        rate = None if spike.get("trace_rate") is None else number(spike, "trace_rate", where)
        windows.append(_window(where, begin_s, end_s, rate))
    if fields.get("drain") is not None:
        windows += _drain(fields["drain"], f"{where}, drain")
    return _Entry(where, fields, count, _share(fields, where, relative), tuple(windows))


def _diurnal(value: Any, where: str) -> Iterator[_Window]:
    """BLIS's form of a day: in each hour active from its start, for a share of it that follows a cosine."""
    fields = known_fields(value, where, {"peak_hour", "peak_to_trough_ratio"})
    peak, ratio = whole(fields, "peak_hour", where), number(fields, "peak_to_trough_ratio", where)
    if not (0 <= peak < HOURS_A_DAY and ratio >= 1.0):
        raise ConfigError(f"{where}: peak_hour must be from 0 to 23, peak_to_trough_ratio at least 1")
    for hour in range(HOURS_A_DAY):
        wave = (1.0 + cos(2.0 * pi * (hour - peak) / HOURS_A_DAY)) / 2.0
        share = wave * (1.0 - 1.0 / ratio) + 1.0 / ratio
        yield _window(where, hour * S_PER_HOUR, (hour + share) * S_PER_HOUR)


def _drain(value: Any, where: str) -> Iterator[_Window]:
    """Active up to the start, then in ten segments for shares of them that fall from 1 to 0.1."""
    fields = known_fields(value, where, {"start_time_us", "ramp_duration_us"})
    begin_s, ramp_s = (number(fields, key, where) / US_PER_S for key in ("start_time_us", "ramp_duration_us"))
    if begin_s < 0.0 or ramp_s <= 0.0:
        raise ConfigError(f"{where}: start_time_us must be at least 0, ramp_duration_us above 0")
    if begin_s:
        yield _window(where, 0.0, begin_s)
    each_s = ramp_s / DRAIN_SEGMENTS
    for segment in range(DRAIN_SEGMENTS):
        at_s = begin_s + segment * each_s
        yield _window(where, at_s, at_s + each_s * (DRAIN_SEGMENTS - segment) / DRAIN_SEGMENTS)


def _at_one_rate(entry: _Entry, rated: Sequence[_Entry], total: float) -> Iterator[_Client]:
    """The members of `entry`, whose arrivals never pause but count only in its windows."""
    shares = sum(other.share for other in rated if _overlap(entry, other))
    windows = tuple(sorted((window.begin_s, window.end_s) for window in entry.windows)) or ((0.0, inf),)
    rate = total * entry.share / shares if shares and not entry.fields.get("concurrency") else 0.0
    yield from _members(entry, entry.fields, rate, windows, fills=False)


def _overlap(one: _Entry, other: _Entry) -> bool:
    """Whether they are ever active together."""
    if not one.windows or not other.windows:
        return True
    return any(a.begin_s < b.end_s and b.begin_s < a.end_s for a in one.windows for b in other.windows)


def _in_each_window(entry: _Entry, rated: Sequence[_Entry], total: float | None, horizon_s: float) -> Iterator[_Client]:
    """The members of `entry` once for each window, with the window's rate and other fields.

    total: the aggregate rate, None if the windows' rates are absolute.
    """
    for window in entry.windows:
        if window.begin_s >= horizon_s:
            continue
        rate = _weight(entry, window)
        if total is not None:
            weights = sum(_weight_during(window, other) for other in rated)
            rate = total * rate / weights if weights else 0.0
        fields = {**entry.fields, **window.changed}
        if "input_distribution" in window.changed:
            fields.pop("multimodal", None)
        span = ((window.begin_s, min(window.end_s, horizon_s)),)
        yield from _members(entry, fields, rate, span, fills=True)


def _weight(entry: _Entry, window: _Window) -> float:
    return entry.share if window.weight is None else window.weight


def _weight_during(window: _Window, other: _Entry) -> float:
    """The weight of `other` where it is active with `window`: that of its first window that overlaps."""
    if not other.windows:
        return other.share
    found = (one for one in other.windows if one.begin_s < window.end_s and window.begin_s < one.end_s)
    first = next(found, None)
    return 0.0 if first is None else _weight(other, first)


def _members(
    entry: _Entry, fields: dict[str, Any], rate: float, windows: tuple[tuple[float, float], ...], *, fills: bool
) -> Iterator[_Client]:
    one = _client(fields, entry.where, rate / entry.members, windows, fills=fills)
    own = fields.get("prefix_sharing") == "per_member" and one.group
    for member in range(entry.members):
        yield replace(one, group=f"{one.group} {member}") if own else one


def _stages(value: Any, where: str) -> Iterator[_Client]:
    """inference-perf's stages: users of some system prompts, at a rate that changes from stage to stage.

    A single stage has exactly rate times duration requests, spread evenly over the users; in several stages they are
    Poisson processes. In a chat each user is one conversation per stage, with as many rounds and without growth.
    """
    spec = known_fields(value, where, {"stages", "shared_prefix"})
    keys = ("num_unique_system_prompts", "num_users_per_system_prompt", "system_prompt_len", "question_len")
    names = {*keys, "output_len", "enable_multi_turn_chat"}
    prompts = known_fields(spec.get("shared_prefix"), f"{where}, shared_prefix", names)
    count, users, system, question = (whole(prompts, key, f"{where}, shared_prefix") for key in keys)
    stages, chat = _list(spec, "stages", where), bool(prompts.get("enable_multi_turn_chat"))
    if count < 1 or users < 1 or not stages:
        raise ConfigError(f"{where}: it needs stages, system prompts and users")
    begin_s, everyone = 0.0, count * users
    for stage in stages:
        known_fields(stage, where, {"rate", "duration"})
        rate, end_s = number(stage, "rate", where), begin_s + number(stage, "duration", where)
        each, more = divmod(int(rate * (end_s - begin_s)), everyone)
        if not (rate > 0.0 and end_s > begin_s):
            raise ConfigError(f"{where}: rate and duration of a stage must be above 0")
        if each < 1 and (chat or len(stages) == 1):
            raise ConfigError(f"{where}: a stage has fewer requests than users; raise rate or duration")
        fixed = {"type": "constant", "params": {"value": question}}
        answer = {"type": "constant", "params": {"value": whole(prompts, "output_len", where)}}
        one = {"arrival": {"process": "poisson"}, "input_distribution": fixed, "output_distribution": answer}
        # BLIS lets the conversations of a single stage begin after its end.
        window = ((begin_s, inf if chat and len(stages) == 1 else end_s),)
        for user in range(everyone):
            prompt = f"prompt-{user // users}"
            fields = {**one, "tenant_id": prompt, "slo_class": "standard"}
            if system:
                fields |= {"prefix_group": prompt, "prefix_length": system}
            found = _client(fields, where, rate / everyone, window, fills=False)
            own = each + (user < more)
            if chat:
                found = replace(found, rounds=own, think_s=everyone / rate, single=True)
            elif len(stages) == 1:
                found = replace(found, count=own)
            yield found
        begin_s = end_s


def _client(
    one: dict[str, Any], where: str, rate: float, windows: tuple[tuple[float, float], ...], *, fills: bool
) -> _Client:
    reasoning = one.get("reasoning") or {}
    talk = known_fields(reasoning, where, {"reason_ratio_distribution", "multi_turn"}).get("multi_turn")
    talk = known_fields(talk or {}, where, {"max_rounds", "think_time_us", "context_growth", "single_session"})
    rounds = whole(talk, "max_rounds", where) if talk else 1
    users = whole(one, "concurrency", where) if one.get("concurrency") else 0
    think = talk if talk else one
    group = name_of(one, "prefix_group", where)
    prefix = (whole(one, "prefix_length", where) if one.get("prefix_length") else DEFAULT_PREFIX) if group else 0
    if rounds < 1 or users < 0 or prefix < 0 or (users and rounds > 1):
        raise ConfigError(f"{where}: rounds must be at least 1, lengths and users at least 0, and not both of them")
    draw_gaps, mean_s = gaps(one.get("arrival") or {"process": "poisson"}, f"{where}, arrival")
    # In windows that are filled the fitted scale has no effect, as in BLIS.
    own_rate = rate if mean_s is None or fills or not rate else 1.0 / mean_s
    prompt = lengths(one.get("input_distribution"), f"{where}, input_distribution")
    if one.get("multimodal") and not talk:
        prompt = parts_of_a_prompt(one["multimodal"], f"{where}, multimodal")
    return _Client(
        where=where,
        tenant=name_of(one, "tenant_id", where),
        service_class=name_of(one, "slo_class", where),
        rate=own_rate,
        windows=windows,
        fills=fills,
        count=0,
        gaps=draw_gaps,
        prompt=prompt,
        output=lengths(one.get("output_distribution"), f"{where}, output_distribution"),
        group=group,
        prefix=prefix,
        target_s=number(one, "slo_target_us", where) / US_PER_S if one.get("slo_target_us") else None,
        rounds=rounds,
        think_s=number(think, "think_time_us", where) / US_PER_S if think.get("think_time_us") else 0.0,
        grows=talk.get("context_growth") == "accumulate",
        single=bool(talk.get("single_session")),
        waits=bool(users) or one.get("closed_loop") is not False,
        users=users,
    )


def _shared_lengths(clients: list[_Client]) -> list[_Client]:
    """All clients of a prefix group have the length that its first one states."""
    first: dict[str, int] = {}
    for client in clients:
        first.setdefault(client.group, client.prefix)
    return [replace(client, prefix=first[client.group]) for client in clients]


def _starts(clients: list[_Client], horizon_s: float, most: int, rng: Rng) -> list[_Start]:
    """When requests and conversations of clients without `users` start, the first `most` of them."""
    times, places = [np.zeros(0)], [np.zeros(0, np.int64)]
    for place, client in enumerate(clients):
        if client.users or not client.rate:
            continue
        found = _filled(client, rng) if client.fills or client.count else _arrivals(client, horizon_s, most, rng)
        found = found[found <= horizon_s] if client.count else found[found < horizon_s]
        found = found[:1] if client.single else found
        times.append(found)
        places.append(np.full(len(found), place))
    at, whose = np.concatenate(times), np.concatenate(places)
    order = np.argsort(at, kind="stable")[:most]
    return [_Start(float(at[i]), clients[whose[i]]) for i in order.tolist()]


def _filled(client: _Client, rng: Rng) -> Float64Array:
    """float64[n], arrivals whose gaps add up to the length of the window; the last one is at its end."""
    begin, end = client.windows[0]
    drawn = client.count or ceil(client.rate * (end - begin))
    if drawn > MAX_REQUESTS:
        raise ConfigError(f"{client.where}: over {MAX_REQUESTS} requests in a window")
    times = np.cumsum(client.gaps(rng, drawn))
    found: Float64Array = begin + times * ((end - begin) / times[-1])
    # Rounding may leave the last one before the end, where it would count.
    found[-1] = end
    return found if client.count else found[:-1]


def _arrivals(client: _Client, horizon_s: float, most: int, rng: Rng) -> Float64Array:
    """float64[n], arrivals of a process that goes on from 0 and counts in the windows.

    Of a single conversation, the process starts with the first window.
    """
    edges = np.array(_joined(client.windows)).ravel()
    elapsed = client.windows[0][0] if client.single else 0.0
    until_s = min(float(edges[-1]), horizon_s)
    parts, kept, drawn = [np.zeros(0)], 0, 0
    while elapsed < until_s and kept < (1 if client.single else most):
        times = elapsed + np.cumsum(client.gaps(rng, DRAWN_AT_ONCE) / client.rate)
        elapsed = float(times[-1])
        if client.single:
            times, elapsed = times[:1], inf
        inside = times[np.searchsorted(edges, times, side="right") % 2 == 1]
        parts.append(inside)
        kept, drawn = kept + len(inside), drawn + len(times)
        if kept > MAX_REQUESTS or drawn > MAX_DRAWN:
            raise ConfigError(f"{client.where}: over {MAX_REQUESTS} requests; give --limit")
    return np.concatenate(parts)[:most]


def _joined(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Windows in order, those that touch or overlap as one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _drawn(client: _Client, count: int, rng: Rng) -> tuple[Int32Array, Int32Array]:
    """Prompts without their common beginning, and answers: int32[count] each."""
    return client.prompt(rng, count).astype(np.int32), client.output(rng, count).astype(np.int32)


def _requests(name: str, clients: list[_Client], starts: list[_Start], rng: Rng) -> Workload:
    builder = WorkloadBuilder(name)
    groups = {group: place for place, group in enumerate(dict.fromkeys(client.group for client in clients))}
    counts: dict[int, int] = {}
    for start in starts:
        counts[id(start.client)] = counts.get(id(start.client), 0) + 1
    drawn = {id(client): _drawn(client, counts[id(client)], rng) for client in clients if id(client) in counts}
    next_of = dict.fromkeys(drawn, 0)
    for number_, start in enumerate(starts):
        client, place = start.client, next_of[id(start.client)]
        next_of[id(client)] += 1
        own, output = (int(column[place]) for column in drawn[id(client)])
        # Group n has the stream 2 n, the rest of request m the stream 2 m + 1.
        shared = [(2 * groups[client.group], client.prefix)] if client.prefix else []
        builder.add(
            client.where,
            start.at_s,
            client.prefix + own,
            output,
            segments=[*shared, (2 * number_ + 1, own)],
            tenant=client.tenant,
            service_class=client.service_class,
            slo_ttft_s=client.target_s,
        )
    return builder.build()


def _sessions(
    name: str,
    clients: list[_Client],
    starts: list[_Start],
    most: int,
    horizon_s: float,
    options: ReadOptions,
    rng: Rng,
) -> Workload:
    """Everything as sessions: conversations with single requests between them, or users that wait for their answers."""
    prompts, records = GrowingPrompts(), list[SessionRecord]()
    users = [_Start(user * client.think_s / client.users, client) for client in clients for user in range(client.users)]
    if users and most == MAX_REQUESTS:
        raise ConfigError(f"{name} has users with concurrency and no num_requests; give --limit")
    if users and len(starts) >= most:
        raise ConfigError(f"{name}: clients with a rate leave no requests for users with concurrency; give a horizon")
    each = ceil((most - len(starts)) / len(users)) if users else 0
    left = most
    for start in [*starts, *users]:
        client = start.client
        rounds = min(each if client.users else client.rounds, left)
        if rounds < 1:
            break
        title = f"{len(records) + 1}"
        turns = _turns(client, rounds, title, prompts, rng, start.at_s, horizon_s)
        left -= len(turns)
        records.append(SessionRecord(title, turns, start.at_s, client.tenant))
    records.sort(key=lambda record: record.start_s or 0.0)
    notes = () if all(not c.service_class for c in clients) else ("slo_class of sessions is not read",)
    return session_workload(SessionTrace(name, records, 1, shared_ids=False, remarks=notes), options.sessions)


def _turns(
    client: _Client, rounds: int, title: str, prompts: GrowingPrompts, rng: Rng, start_s: float, horizon_s: float
) -> list[Turn]:
    """The rounds of a conversation. Where they do not wait, those outside the client's windows are left out."""
    news, outputs = _drawn(client, rounds, rng)
    turns: list[Turn] = []
    context, after_s = client.prefix, 0.0
    for place in range(rounds):
        tokens = min((context if client.grows else client.prefix) + int(news[place]), MAX_TOKENS - 1)
        context = tokens + int(outputs[place])
        # Without growth every prompt is new after the common beginning.
        runs = prompts.runs(title if client.grows else f"{title}, round {place}", tokens)
        follows = bool(place) and client.waits
        turn = Turn(
            tokens, int(outputs[place]), (place - 1,) if follows else (), client.think_s if follows else after_s
        )
        turn.runs, turn.shared = runs, ((client.group, client.prefix),) if client.prefix else ()
        at_s = start_s + after_s
        if client.waits or (at_s < horizon_s and any(begin <= at_s < end for begin, end in client.windows)):
            turns.append(turn)
        if not client.waits:
            after_s += client.think_s + int(outputs[place]) / US_PER_S  # BLIS guesses 1 us per token of the answer
    return turns


BLIS_SPEC = TraceFormat("blis-spec", read_blis_spec)
