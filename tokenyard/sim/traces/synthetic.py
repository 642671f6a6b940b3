"""Synthetic traffic, drawn from a seed, with one property each that recorded traces lack."""

import difflib
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from tokenyard.base import ConfigError, Float64Array, Int32Array, Int64Array
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, SegmentContent, UniqueContent
from tokenyard.sim.traces.workload import Workload, uniform_columns

LENGTH_SPREAD = 0.8
"""Standard deviation of the logarithm of drawn lengths: about what chat traces show."""

SHARED_GROUPS, SHARED_PREFIX_TOKENS = 16, 2048
TURNS, THINK_S, ANSWER_S = 6, 12.0, 8.0
MAX_AGE_S, MIN_CONVERSATIONS = 300.0, 16
"""Conversations that began so long before the first request have ended, but for one in 10,000."""
BURST_S, CALM_S, BURST_FACTOR = 30.0, 90.0, 5.0
TENANTS, FLOOD_FACTOR = 4, 10.0

CLASSES = (
    # name, share of the requests, priority, deadline in seconds (None: only the targets of the run)
    ("interactive", 0.5, 2, None),
    ("standard", 0.3, 1, 30.0),
    ("batch", 0.2, 0, 600.0),
)


def poisson(requests: int, rate: float, rng: np.random.Generator) -> Float64Array:
    """Arrival times of a Poisson process, float64[requests]."""
    times: Float64Array = np.cumsum(rng.exponential(1.0 / rate, requests))
    return times


def lengths(median: float, requests: int, rng: np.random.Generator, most: int = 32_768) -> Int32Array:
    """Log-normal lengths, from 1 to `most`."""
    drawn = median * np.exp(LENGTH_SPREAD * rng.standard_normal(requests))
    return np.clip(drawn, 1, most).astype(np.int32)


def plain(requests: int, rate: float, seed: int) -> Workload:
    """Independent prompts of about 1,000 tokens, answers of about 200."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths(1000, requests, rng), lengths(200, requests, rng, 2000)
    return uniform_columns("plain", poisson(requests, rate, rng), prompts, outputs, UniqueContent())


def shared_prefix(requests: int, rate: float, seed: int) -> Workload:
    """Each prompt begins with one of 16 system prompts of 2,048 tokens, the popular ones more often (1 / rank)."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, SHARED_GROUPS + 1)
    group = rng.choice(SHARED_GROUPS, requests, p=weights / weights.sum())
    own, outputs = lengths(200, requests, rng), lengths(150, requests, rng, 1000)
    streams = np.stack((group, SHARED_GROUPS + np.arange(requests)), axis=1).astype(np.int64)
    parts = np.stack((np.full(requests, SHARED_PREFIX_TOKENS), own), axis=1).astype(np.int32)
    content = SegmentContent(streams.ravel(), parts.ravel(), 2 * np.arange(requests + 1, dtype=np.int64))
    prompts = (own + SHARED_PREFIX_TOKENS).astype(np.int32)
    return uniform_columns("shared-prefix", poisson(requests, rate, rng), prompts, outputs, content)


def multi_turn(requests: int, rate: float, seed: int) -> Workload:
    """Conversations of 6 turns: each prompt is the last one, its answer, and a new question after some thinking.

    Turns arrive at drawn times (think time plus a typical answer's time) whether or not the answer has ended by then.
    The traffic begins with conversations of every age, so that `rate` holds from the first second; their earlier turns
    are not in the workload.
    """
    rng = np.random.default_rng(seed)
    conversations = ceil((requests / rate + 2 * MAX_AGE_S) * rate / TURNS) + MIN_CONVERSATIONS
    begins = poisson(conversations, rate / TURNS, rng) - MAX_AGE_S
    gaps = ANSWER_S + rng.exponential(THINK_S, (conversations, TURNS))
    gaps[:, 0] = 0.0
    arrivals = (begins[:, None] + np.cumsum(gaps, axis=1)).ravel()
    by_time = np.argsort(arrivals, kind="stable")
    before = int(np.searchsorted(arrivals[by_time], 0.0))
    order = by_time[before : before + requests]
    number = np.empty(conversations * TURNS, np.int64)
    number[np.roll(by_time, -before)] = np.arange(conversations * TURNS)
    questions = lengths(250, conversations * TURNS, rng, 4096)
    answers = lengths(200, conversations * TURNS, rng, 1500)
    streams, parts, offsets, prompts = _turns(order, number, questions, answers)
    content = SegmentContent(streams, parts, offsets)
    times = arrivals[order] - arrivals[order[0]]
    return uniform_columns("multi-turn", times, prompts, answers[order], content)


def _turns(
    order: Int64Array, number: Int64Array, questions: Int32Array, answers: Int32Array
) -> tuple[Int64Array, Int32Array, Int64Array, Int32Array]:
    """Segments of each turn: question and answer of all earlier turns of the conversation, then its own question."""
    streams: list[int] = []
    parts: list[int] = []
    offsets, prompts = [0], []
    for slot in order.tolist():
        first = slot - slot % TURNS
        for earlier in range(first, slot):
            streams += [earlier, ANSWER_STREAM + int(number[earlier])]
            parts += [int(questions[earlier]), int(answers[earlier]) - 1]
        streams.append(slot)
        parts.append(int(questions[slot]))
        prompts.append(sum(parts[offsets[-1] :]))
        offsets.append(len(streams))
    columns = np.array(streams, np.int64), np.array(parts, np.int32), np.array(offsets, np.int64)
    return *columns, np.array(prompts, np.int32)


def bursts(requests: int, rate: float, seed: int) -> Workload:
    """Calm phases of 90 s and bursts of 30 s with five times the calm rate; `rate` is the mean."""
    rng = np.random.default_rng(seed)
    calm_rate = rate * (CALM_S + BURST_S) / (CALM_S + BURST_FACTOR * BURST_S)
    # Draw at rate 1 and stretch time: in a burst it passes BURST_FACTOR times as fast.
    unit = np.cumsum(rng.exponential(1.0, requests))
    period = calm_rate * (CALM_S + BURST_FACTOR * BURST_S)
    cycle, rest = np.divmod(unit, period)
    calm = calm_rate * CALM_S
    within = np.where(rest < calm, rest / calm_rate, CALM_S + (rest - calm) / (BURST_FACTOR * calm_rate))
    prompts, outputs = lengths(1000, requests, rng), lengths(200, requests, rng, 2000)
    return uniform_columns("bursts", cycle * (CALM_S + BURST_S) + within, prompts, outputs, UniqueContent())


def tenants(requests: int, rate: float, seed: int) -> Workload:
    """Four tenants. The first sends ten times as much as each of the others."""
    rng = np.random.default_rng(seed)
    base = plain(requests, rate, seed)
    weights = np.array([FLOOD_FACTOR] + [1.0] * (TENANTS - 1))
    names = ("flooder", *(f"tenant-{i}" for i in range(1, TENANTS)))
    column = rng.choice(TENANTS, requests, p=weights / weights.sum()).astype(np.int32)
    return replace(base, name="tenants", tenants=names, tenant=column)


def classes(requests: int, rate: float, seed: int) -> Workload:
    """Three service classes with priorities: interactive, standard (30 s to the end), batch (600 s)."""
    rng = np.random.default_rng(seed)
    base = plain(requests, rate, seed)
    column = rng.choice(len(CLASSES), requests, p=[share for _, share, _, _ in CLASSES]).astype(np.int32)
    deadlines = np.array([np.nan if deadline is None else deadline for _, _, _, deadline in CLASSES])
    return replace(
        base,
        name="classes",
        classes=tuple(name for name, _, _, _ in CLASSES),
        service_class=column,
        priority=np.array([priority for _, _, priority, _ in CLASSES], np.int32)[column],
        deadline_s=deadlines[column],
    )


SYNTHETIC: dict[str, Callable[[int, float, int], Workload]] = {
    "plain": plain,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "bursts": bursts,
    "tenants": tenants,
    "classes": classes,
}


def synthetic(name: str, requests: int, rate: float, seed: int = 0) -> Workload:
    """`requests` synthetic requests at `rate` per second. Raises ConfigError for an unknown kind or numbers not above
    0.
    """
    if name not in SYNTHETIC:
        near = difflib.get_close_matches(name, SYNTHETIC, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(SYNTHETIC)}"
        raise ConfigError(f"there is no synthetic workload {name!r}; {hint}")
    if requests < 1 or not rate > 0.0:
        raise ConfigError(f"a synthetic workload needs requests and a rate above 0, not {requests} and {rate}")
    return SYNTHETIC[name](requests, rate, seed)
