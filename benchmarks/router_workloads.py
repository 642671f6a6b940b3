"""Traffic that tells router policies apart: W1 to W6 of the experiment that benchmarks/router_quality.py runs."""

from dataclasses import dataclass, field, replace

import numpy as np

from tokenyard.sim.fleet.fleet_settings import Fault, Fleet
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, SegmentContent, UniqueContent
from tokenyard.sim.traces.workload import uniform_columns

REPLICAS = 4
POOL_TOKENS = 100_000
QUESTION_SPREAD = 0.6


@dataclass(frozen=True)
class Case:
    """One row of the table: `make(seed)` gives the traffic."""

    name: str
    make: object
    pool_tokens: int = POOL_TOKENS
    fleet: Fleet = field(default_factory=Fleet)
    assumed_pool_tokens: int = 0


def lengths(rng, median, count, most=16_000):
    return np.clip(median * np.exp(QUESTION_SPREAD * rng.standard_normal(count)), 8, most).astype(np.int32)


def arrivals(rng, rate, count):
    return np.cumsum(rng.exponential(1.0 / rate, count))


def from_segments(name, times, prompts, outputs):
    """A workload of prompts that are lists of (stream, tokens)."""
    streams = np.array([stream for prompt in prompts for stream, _ in prompt], np.int64)
    parts = np.array([tokens for prompt in prompts for _, tokens in prompt], np.int32)
    offsets = np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts]))).astype(np.int64)
    totals = np.array([sum(tokens for _, tokens in prompt) for prompt in prompts], np.int32)
    content = SegmentContent(streams, parts, offsets)
    return uniform_columns(name, times, totals, np.asarray(outputs, np.int32), content)


def multi_turn(seed, sessions=90, rate=16.0, turns=(3, 8), system=512):
    """W1: conversations of 3 to 8 turns over one system prompt; a turn follows its answer after some thinking."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(np.mean(turns) / rate, sessions))
    rows = []
    for session, start in enumerate(starts):
        time, history = float(start), [(0, system)]
        for turn in range(int(rng.integers(turns[0], turns[1] + 1))):
            own, answer = int(lengths(rng, 250, 1)[0]), int(lengths(rng, 120, 1, 600)[0])
            stream = 1 + session * 16 + turn
            rows.append([time, [*history, (stream, own)], answer, len(history)])
            history = [*history, (stream, own), (None, max(answer - 1, 1))]
            time += 2.5 + float(rng.exponential(2.0))
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    number = {(rows[i][1][-1][0]): place for place, i in enumerate(order)}
    prompts = []
    for i in order:
        prompt = rows[i][1]
        # The answer that stands in a history is that of the question before it.
        prompts.append(
            [
                (ANSWER_STREAM + number[prompt[place - 1][0]], tokens) if stream is None else (stream, tokens)
                for place, (stream, tokens) in enumerate(prompt)
            ]
        )
    return from_segments("multi-turn", np.array([rows[i][0] for i in order]), prompts, [rows[i][2] for i in order])


def popular(seed, zipf=1.0, count=450, rate=18.0, prefixes=200, crowd=False):
    """W2: 200 prefixes of 2 to 8 thousand tokens, some far more popular; with `crowd` one turns hot half-way."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, prefixes + 1) ** zipf
    chosen = rng.choice(prefixes, count, p=weights / weights.sum())
    if crowd:
        hot = np.arange(count) > count // 2
        chosen = np.where(hot & (rng.random(count) < 0.6), prefixes - 1, chosen)
    sizes = rng.integers(2000, 8001, prefixes)
    own = lengths(rng, 100, count, 1000)
    prompts = [[(int(c), int(sizes[c])), (1000 + i, int(own[i]))] for i, c in enumerate(chosen)]
    return from_segments("popular", arrivals(rng, rate, count), prompts, lengths(rng, 120, count, 600))


def one_prompt(seed, in_flight=64, count=400, output=150, latency_s=2.2):
    """W3: one system prompt of 4,000 tokens and questions of 50, with about `in_flight` requests at a time."""
    rng = np.random.default_rng(seed)
    prompts = [[(0, 4000), (1 + i, 50)] for i in range(max(count, 5 * in_flight))]
    times = arrivals(rng, in_flight / latency_s, len(prompts))
    return from_segments("one prompt", times, prompts, np.full(len(prompts), output))


def unrelated(seed, count=400, rate=20.0):
    """W4: prompts that share nothing."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths(rng, 1000, count), lengths(rng, 150, count, 800)
    return uniform_columns("unrelated", arrivals(rng, rate, count), prompts, outputs, UniqueContent())


def mixed(seed, count=350, rate=10.0):
    """W5: four short chats to one document of 16 thousand tokens."""
    rng = np.random.default_rng(seed)
    long = rng.random(count) < 0.2
    prompts = np.where(long, 16_000, lengths(rng, 300, count, 2000)).astype(np.int32)
    outputs = lengths(rng, 150, count, 800)
    return uniform_columns("mixed", arrivals(rng, rate, count), prompts, outputs, UniqueContent())


def decode_heavy(seed, count=250, rate=10.0):
    """W5: prompts and answers of a thousand tokens."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths(rng, 1000, count, 3000), lengths(rng, 1000, count, 2500)
    return uniform_columns("decode-heavy", arrivals(rng, rate, count), prompts, outputs, UniqueContent())


def with_settings(function, **settings):
    return lambda seed: function(seed, **settings)


def cases():
    """All rows. The working set of W1 is about 0.5, 1, 2 and 4 times the KV of one worker."""
    turns = multi_turn
    found = [Case(f"W1 {ratio}x", turns, int(180_000 / ratio)) for ratio in (0.5, 1, 2, 4)]
    found += [Case(f"W2 zipf {z}", with_settings(popular, zipf=z), 200_000) for z in (0.6, 1.0, 1.4)]
    found += [Case("W2 crowd", with_settings(popular, crowd=True), 200_000)]
    found += [Case(f"W3 {n}", with_settings(one_prompt, in_flight=n), 400_000) for n in (8, 32, 64, 128, 256)]
    found += [Case("W4", unrelated), Case("W5 mixed", mixed, 400_000), Case("W5 decode", decode_heavy, 400_000)]
    base = Case("W6", turns, 180_000)
    found += [
        replace(base, name="W6 kill", fleet=Fleet(faults=(Fault(8.0, 1, 5.0),))),
        replace(base, name="W6 join", fleet=Fleet(faults=(Fault(0.0, 3, 10.0),))),
        replace(base, name="W6 slow", fleet=Fleet(faults=(Fault(4.0, 2, 1e6, 2.0),))),
        replace(base, name="W6 drift", pool_tokens=40_000, assumed_pool_tokens=400_000),
        replace(base, name="W6 lost", fleet=Fleet(kv_event_lag_s=0.05, kv_event_loss=0.01)),
        replace(base, name="W6 two", fleet=Fleet(routers=2)),
        replace(base, name="W6 two+ev", fleet=Fleet(routers=2, kv_event_lag_s=0.05)),
    ]
    return found
