"""Workload specifications of BLIS (github inference-sim/inference-sim, docs/reference/workload-spec.md), from which
requests are drawn.

A YAML file with `clients`, `cohorts` or `inference_perf`, by which it is detected. Read are rates, arrival processes,
distributions of lengths, windows of activity, prefix groups, tenants, classes, targets, users that wait for their
answers (`concurrency`) and conversations (`reasoning.multi_turn`), which run as closed loops. The draws are those of
`--seed`, not BLIS's own. Not read: `seed`, `category`, `streaming`, `model`, `adapter`, `network`, `timeout`,
`goodput_slo_targets` and the ratio of reasoning. Refused, because the traffic would be another: images and sounds,
ServeGen's files (`--trace-format servegen`), cohorts that change their rate by `diurnal` or `drain`, and any field that
is not known.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, gamma, inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tokenyard.base import ConfigError, Float64Array, Int32Array
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.recorded_calls import GrowingPrompts
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionRecord, Turn
from tokenyard.sim.traces.trace_files import name_of, number, read_bytes, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, WorkloadBuilder

US_PER_S = 1e6
DRAWN_AT_ONCE = 1024
MAX_REQUESTS = 5_000_000
DEFAULT_PREFIX = 50
"""BLIS's own default of `prefix_length`."""

_IGNORED = frozenset({"streaming", "model", "adapter", "network", "timeout"})
_CLIENT = _IGNORED | {
    *("id", "tenant_id", "slo_class", "rate_fraction", "arrival", "input_distribution", "output_distribution"),
    *("prefix_group", "prefix_length", "lifecycle", "reasoning", "slo_target_us", "concurrency", "think_time_us"),
    "closed_loop",
}
_COHORT = (_CLIENT - {"lifecycle", "concurrency", "think_time_us"}) | {"population", "prefix_sharing", "spike"}
_WINDOW = frozenset({"start_us", "end_us", "trace_rate", "arrival", "input_distribution", "output_distribution"})
_TOP = frozenset(
    {
        *("version", "seed", "category", "clients", "cohorts", "aggregate_rate", "horizon", "num_requests"),
        *("inference_perf", "goodput_slo_targets"),
    }
)

Rng = np.random.Generator
Draw = Callable[[Rng, int], Float64Array]


@dataclass(frozen=True, slots=True)
class _Client:
    """One client: what its requests are like, and when it is active.

    share: of the rate of all that are active with it, or with an absolute rate requests per second.
    windows: (start, end) in seconds.
    gaps: draws gaps with a mean of 1.
    rounds, think_s, grows: a conversation, whose prompts repeat it; one round for single requests.
    users: closed loops that send one request after the other; 0 for arrivals by time.
    """

    where: str
    tenant: str
    service_class: str
    share: float
    windows: tuple[tuple[float, float], ...]
    gaps: Draw
    prompt: Draw
    output: Draw
    group: str
    prefix: int
    target_s: float | None
    rounds: int
    think_s: float
    grows: bool
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
    spec = _mapping(_document(path), path.name, _TOP)
    clients, absolute = _clients(spec, path.name)
    most = whole(spec, "num_requests", path.name) if spec.get("num_requests") else 0
    if options.limit is not None:
        most = min(most, options.limit) if most else options.limit
    horizon_s = number(spec, "horizon", path.name) / US_PER_S if spec.get("horizon") else inf
    horizon_s = min(horizon_s, max((client.windows[-1][1] for client in clients), default=inf))
    if not most and horizon_s == inf:
        raise ConfigError(f"{path.name} says neither num_requests nor horizon; give --limit")
    rng = np.random.default_rng(options.seed)
    rate = 1.0 if absolute else number(spec, "aggregate_rate", path.name) if any(not c.users for c in clients) else 0.0
    starts = _starts(clients, rate, absolute, horizon_s, most or MAX_REQUESTS, rng)
    if any(client.rounds > 1 or client.users for client in clients):
        return _sessions(path.name, clients, starts, most or MAX_REQUESTS, options, rng)
    return _requests(path.name, clients, starts[: most or None], rng)


def _document(path: Path) -> Any:
    try:
        return yaml.safe_load(read_bytes(path).decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is no YAML file: {told}") from None


def is_blis_spec(path: Path) -> bool:
    """Whether a YAML file is such a specification."""
    try:
        found = _document(path)
    except ConfigError:
        return False
    return isinstance(found, dict) and any(part in found for part in ("clients", "cohorts", "inference_perf"))


def _mapping(value: Any, where: str, known: frozenset[str] | set[str]) -> dict[str, Any]:
    """A mapping with no other than the `known` fields. Raises ConfigError for others."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: fields are needed, not {str(value)[:40]!r}")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; {near[0]} may be meant" if near else "; it would change the traffic and is not modelled"
            raise ConfigError(f"{where}: unknown field {str(name)[:40]!r}{hint}")
    return value


def _list(spec: dict[str, Any], key: str, where: str) -> list[Any]:
    found = spec.get(key) or []
    if not isinstance(found, list):
        raise ConfigError(f"{where}: {key} must be a list")
    return found


def _clients(spec: dict[str, Any], name: str) -> tuple[list[_Client], bool]:
    """The clients, and whether their shares are rates."""
    found: list[_Client] = []
    rated = bool(spec.get("aggregate_rate"))
    for place, one in enumerate(_list(spec, "clients", name)):
        where = f"{name}, client {place + 1}"
        found.extend(_of_windows(_mapping(one, where, _CLIENT), where, rated))
    for place, one in enumerate(_list(spec, "cohorts", name)):
        where = f"{name}, cohort {place + 1}"
        found.extend(_members(_mapping(one, where, _COHORT), where, rated))
    if spec.get("inference_perf") is not None:
        return [*found, *_stages(spec["inference_perf"], f"{name}, inference_perf")], True
    if not found:
        raise ConfigError(f"{name} names no clients")
    return found, not rated and any(not client.users for client in found)


def _of_windows(one: dict[str, Any], where: str, rated: bool) -> Iterator[_Client]:
    """A client, or one for each of its windows if these change what it is like."""
    life = one.get("lifecycle")
    windows = _list(_mapping(life, where, {"windows"}), "windows", where) if life is not None else []
    if not windows:
        if not rated and not one.get("concurrency"):
            raise ConfigError(f"{where}: without aggregate_rate it needs windows with a trace_rate")
        yield _client(one, where, number(one, "rate_fraction", where) if not one.get("concurrency") else 0.0)
        return
    for window in windows:
        _mapping(window, f"{where}, a window", _WINDOW)
        ends = tuple(number(window, key, f"{where}, a window") / US_PER_S for key in ("start_us", "end_us"))
        changed = {
            key: window[key] for key in ("arrival", "input_distribution", "output_distribution") if key in window
        }
        if rated and window.get("trace_rate") is not None:
            raise ConfigError(f"{where}: trace_rate beside aggregate_rate is not read; give one of the two")
        share = number(one, "rate_fraction", where) if rated else number(window, "trace_rate", f"{where}, a window")
        yield _client({**one, **changed}, where, share, (ends[0], ends[1]))


def _members(one: dict[str, Any], where: str, rated: bool) -> Iterator[_Client]:
    """The clients of a cohort."""
    count = whole(one, "population", where)
    if not 0 < count <= MAX_TOKENS:
        raise ConfigError(f"{where}: population is {count}; it must be at least 1")
    window = (0.0, inf)
    spike = one.get("spike")
    if spike is not None:
        _mapping(spike, where, {"start_time_us", "duration_us", "trace_rate"})
        begin = number(spike, "start_time_us", where) / US_PER_S
        window = (begin, begin + number(spike, "duration_us", where) / US_PER_S)
    if not rated and spike is None:
        raise ConfigError(f"{where}: without aggregate_rate it needs a spike with a trace_rate")
    share = number(one, "rate_fraction", where) if rated else number(spike or {}, "trace_rate", where)
    for member in range(count):
        own = one.get("prefix_sharing") == "per_member" and one.get("prefix_group")
        group = {"prefix_group": f"{one['prefix_group']} {member}"} if own else {}
        yield _client({**one, **group}, where, share / count, window)


def _stages(value: Any, where: str) -> Iterator[_Client]:
    """inference-perf's stages: users of some system prompts, at a rate that changes from stage to stage."""
    spec = _mapping(value, where, {"stages", "shared_prefix"})
    keys = ("num_unique_system_prompts", "num_users_per_system_prompt", "system_prompt_len", "question_len")
    known = {*keys, "output_len", "enable_multi_turn_chat"}
    prompts = _mapping(spec.get("shared_prefix"), f"{where}, shared_prefix", known)
    if prompts.get("enable_multi_turn_chat"):
        raise ConfigError(f"{where}: enable_multi_turn_chat is not modelled; describe it as clients with multi_turn")
    count, users, system, question = (whole(prompts, key, f"{where}, shared_prefix") for key in keys)
    begin_s = 0.0
    for stage in _list(spec, "stages", where):
        _mapping(stage, where, {"rate", "duration"})
        end_s = begin_s + number(stage, "duration", where)
        for place in range(count):
            fixed = {"type": "constant", "params": {"value": question}}
            answer = {"type": "constant", "params": {"value": whole(prompts, "output_len", where)}}
            one = {"arrival": {"process": "poisson"}, "input_distribution": fixed, "output_distribution": answer}
            if system:
                one |= {"prefix_group": f"system prompt {place}", "prefix_length": system}
            yield _client(one, where, number(stage, "rate", where) / count, (begin_s, end_s))
        begin_s = end_s
    if not users or not begin_s:
        raise ConfigError(f"{where}: it needs stages, system prompts and users")


def _client(one: dict[str, Any], where: str, share: float, window: tuple[float, float] = (0.0, inf)) -> _Client:
    if not (share >= 0.0 and 0.0 <= window[0] < window[1]):
        raise ConfigError(f"{where}: rates must be at least 0, and a window must end after it starts")
    reasoning = one.get("reasoning") or {}
    talk = _mapping(reasoning, where, {"reason_ratio_distribution", "multi_turn"}).get("multi_turn")
    talk = _mapping(talk or {}, where, {"max_rounds", "think_time_us", "context_growth", "single_session"})
    rounds = whole(talk, "max_rounds", where) if talk else 1
    users = whole(one, "concurrency", where) if one.get("concurrency") else 0
    think = talk if talk else one
    group = name_of(one, "prefix_group", where)
    prefix = (whole(one, "prefix_length", where) if one.get("prefix_length") else DEFAULT_PREFIX) if group else 0
    if rounds < 1 or users < 0 or prefix < 0 or (users and rounds > 1):
        raise ConfigError(f"{where}: rounds must be at least 1, lengths and users at least 0, and not both of them")
    return _Client(
        where,
        name_of(one, "tenant_id", where),
        name_of(one, "slo_class", where),
        share,
        (window,),
        _gaps(one.get("arrival") or {"process": "poisson"}, f"{where}, arrival"),
        _lengths(one.get("input_distribution"), f"{where}, input_distribution"),
        _lengths(one.get("output_distribution"), f"{where}, output_distribution"),
        group,
        prefix,
        number(one, "slo_target_us", where) / US_PER_S if one.get("slo_target_us") else None,
        rounds,
        number(think, "think_time_us", where) / US_PER_S if think.get("think_time_us") else 0.0,
        talk.get("context_growth") == "accumulate",
        users,
    )


def _gaps(value: Any, where: str) -> Draw:
    """Gaps with a mean of 1, by coefficient of variation or fitted shape."""
    spec = _mapping(value, where, {"process", "cv", "shape", "scale"})
    process = name_of(spec, "process", where)
    cv = number(spec, "cv", where) if spec.get("cv") is not None else 1.0
    shape = number(spec, "shape", where) if spec.get("shape") is not None else 0.0
    if cv <= 0.0 or shape < 0.0:
        raise ConfigError(f"{where}: cv and shape must be above 0")
    if process == "poisson":
        return lambda rng, n: rng.exponential(1.0, n)
    if process == "constant":
        return lambda rng, n: np.ones(n)
    if process == "gamma":
        k = shape or 1.0 / cv**2
        return lambda rng, n: rng.gamma(k, 1.0 / k, n)
    if process == "weibull":
        k = shape or cv**-1.086  # Justus et al., 1978: within 1 % for a cv from 0.1 to 1
        mean = gamma(1.0 + 1.0 / k)
        return lambda rng, n: rng.weibull(k, n) / mean
    raise ConfigError(f"{where}: process is {process!r}; it must be poisson, gamma, weibull or constant")


def _lengths(value: Any, where: str) -> Draw:
    """Lengths in tokens, at least 1."""
    spec = _mapping(value, where, {"type", "params", "file"})
    kind, params = name_of(spec, "type", where), spec.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"{where}: params must be fields with numbers")

    def get(name: str) -> float:
        return number(params, name, where)

    low = get("min") if "min" in params else 1.0
    high = get("max") if "max" in params else float(MAX_TOKENS - 1)

    def clamped(draw: Draw) -> Draw:
        return lambda rng, n: np.clip(np.rint(draw(rng, n)), max(low, 1.0), max(high, 1.0))

    if kind == "constant":
        fixed = get("value")
        return clamped(lambda rng, n: np.full(n, fixed))
    if kind == "gaussian":
        mean, deviation = get("mean"), get("std_dev")
        return clamped(lambda rng, n: rng.normal(mean, max(deviation, 0.0), n))
    if kind == "exponential":
        mean = get("mean")
        return clamped(lambda rng, n: rng.exponential(max(mean, 0.0), n))
    if kind == "lognormal":
        mu, sigma = get("mu"), get("sigma")
        return clamped(lambda rng, n: rng.lognormal(mu, max(sigma, 0.0), n))
    if kind == "pareto_lognormal":
        alpha, least, weight, mu, sigma = (get(key) for key in ("alpha", "xm", "mix_weight", "mu", "sigma"))
        if not (alpha > 0.0 and least > 0.0 and sigma >= 0.0):
            raise ConfigError(f"{where}: alpha and xm must be above 0, sigma at least 0")
        return clamped(
            lambda rng, n: np.where(
                rng.random(n) < weight, least * np.exp(rng.exponential(1.0 / alpha, n)), rng.lognormal(mu, sigma, n)
            )
        )
    if kind == "empirical" and params:
        return _empirical(params, where)
    if kind == "empirical":
        raise ConfigError(f"{where}: a distribution in a file is not read; write its values into params")
    raise ConfigError(
        f"{where}: type is {kind!r}; it must be constant, gaussian, exponential, lognormal, pareto_lognormal or "
        "empirical"
    )


def _empirical(params: dict[str, Any], where: str) -> Draw:
    try:
        values = np.array([int(str(key)) for key in params], np.float64)
        shares = np.array([float(share) for share in params.values()])
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: params must be shares by number of tokens") from None
    if not (shares.min() >= 0.0 and 0.0 < shares.sum() < inf and values.min() > 0 and values.max() < MAX_TOKENS):
        raise ConfigError(f"{where}: shares must be at least 0, numbers of tokens from 1 to {MAX_TOKENS - 1}")
    return lambda rng, n: rng.choice(values, n, p=shares / shares.sum())


def _starts(clients: list[_Client], rate: float, absolute: bool, horizon_s: float, most: int, rng: Rng) -> list[_Start]:
    """When requests and conversations of clients without `users` start, the first `most` of them."""
    times, places = [np.zeros(0)], [np.zeros(0, np.int64)]
    for place, client in enumerate(clients):
        if client.users or not client.share:
            continue
        beside = 1.0 if absolute else sum(c.share for c in clients if not c.users and _overlap(client, c))
        for begin, end in client.windows:
            found = begin + _arrivals(client, rate * client.share / beside, min(end, horizon_s) - begin, most, rng)
            times.append(found)
            places.append(np.full(len(found), place))
    at, whose = np.concatenate(times), np.concatenate(places)
    order = np.argsort(at, kind="stable")[:most]
    return [_Start(float(at[i]), clients[whose[i]]) for i in order.tolist()]


def _overlap(one: _Client, other: _Client) -> bool:
    return any(a[0] < b[1] and b[0] < a[1] for a in one.windows for b in other.windows)


def _arrivals(client: _Client, rate: float, until_s: float, most: int, rng: Rng) -> Float64Array:
    """float64[n], seconds from the window's begin."""
    parts, elapsed, count = [np.zeros(0)], 0.0, 0
    while elapsed < until_s and count < most:
        parts.append(elapsed + np.cumsum(client.gaps(rng, DRAWN_AT_ONCE) / rate))
        elapsed, count = float(parts[-1][-1]), count + DRAWN_AT_ONCE
        if count > MAX_REQUESTS:
            raise ConfigError(f"{client.where}: over {MAX_REQUESTS} requests; give --limit")
    times = np.concatenate(parts)
    within: Float64Array = times[times < until_s][:most]
    return within


def _drawn(client: _Client, count: int, rng: Rng) -> tuple[Int32Array, Int32Array]:
    """Prompts without their common beginning, and answers: int32[count] each."""
    return client.prompt(rng, count).astype(np.int32), client.output(rng, count).astype(np.int32)


def _requests(name: str, clients: list[_Client], starts: list[_Start], rng: Rng) -> Workload:
    builder = WorkloadBuilder(name)
    groups = {group: place for place, group in enumerate(dict.fromkeys(client.group for client in clients))}
    lengths = {id(client): _drawn(client, sum(one.client is client for one in starts), rng) for client in clients}
    next_of = dict.fromkeys(lengths, 0)
    for number_, start in enumerate(starts):
        client, place = start.client, next_of[id(start.client)]
        next_of[id(client)] += 1
        own, output = (int(column[place]) for column in lengths[id(client)])
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
    name: str, clients: list[_Client], starts: list[_Start], most: int, options: ReadOptions, rng: Rng
) -> Workload:
    """Everything as sessions: conversations with single requests between them, or users that wait for their answers."""
    prompts, records = GrowingPrompts(), list[SessionRecord]()
    users = [client for client in clients for _ in range(client.users)]
    if users and starts:
        raise ConfigError(f"{name}: users with concurrency beside clients with a rate are not read; split the file")
    if users and most == MAX_REQUESTS:
        raise ConfigError(f"{name} has users with concurrency and no num_requests; give --limit")
    each = ceil(most / len(users)) if users else 0
    left = most
    for start in [*starts, *(_Start(0.0, client) for client in users)]:
        client = start.client
        rounds = min(each if client.users else client.rounds, left)
        if rounds < 1:
            break
        left -= rounds
        title = f"{len(records) + 1}"
        records.append(SessionRecord(title, _turns(client, rounds, title, prompts, rng), start.at_s, client.tenant))
    notes = () if all(not c.service_class for c in clients) else ("slo_class of sessions is not read",)
    return session_workload(SessionTrace(name, records, 1, shared_ids=False, remarks=notes), options.sessions)


def _turns(client: _Client, rounds: int, title: str, prompts: GrowingPrompts, rng: Rng) -> list[Turn]:
    news, outputs = _drawn(client, rounds, rng)
    turns: list[Turn] = []
    context = client.prefix
    for place in range(rounds):
        tokens = min((context if client.grows else client.prefix) + int(news[place]), MAX_TOKENS - 1)
        context = tokens + int(outputs[place])
        # Without growth every prompt is new after the common beginning.
        runs = prompts.runs(title if client.grows else f"{title}, round {place}", tokens)
        turn = Turn(tokens, int(outputs[place]), (place - 1,) if place else (), client.think_s if place else 0.0)
        turn.runs, turn.shared = runs, ((client.group, client.prefix),) if client.prefix else ()
        turns.append(turn)
    return turns


BLIS_SPEC = TraceFormat("blis-spec", read_blis_spec)
