"""Programs for the experiments: sessions whose turns each repeat the prompt and the answer before, then call a tool."""

import numpy as np

from tokenyard.sim import Result, SessionOptions, SessionRecord, SessionTrace, Turn, Workload, session_workload

VOCABULARY = 30_000


def programs(
    count: int, turns: tuple[int, int], new_tokens: int, gap_s: float, every_s: float, seed: int = 0
) -> Workload:
    """`count` programs of `turns` (fewest, most) turns, log-uniform; one starts every `every_s` seconds on average."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(every_s, count))
    records = []
    for number in range(count):
        context, made = np.zeros(0, np.int32), []
        for place in range(round(float(np.exp(rng.uniform(*np.log(turns)))))):
            new = rng.integers(0, VOCABULARY, round(new_tokens * rng.uniform(0.5, 1.5))).astype(np.int32)
            answer = rng.integers(0, VOCABULARY, int(rng.integers(20, 120))).astype(np.int32)
            context = np.concatenate([context, new])
            gap = float(rng.exponential(gap_s)) if place else 0.0
            after = (place - 1,) if place else ()
            made.append(Turn(len(context), len(answer), after, gap, tool=True, ids=context, answer=answer))
            context = np.concatenate([context, answer])
        records.append(SessionRecord(f"program {number}", made, float(starts[number])))
    return session_workload(SessionTrace("programs", records), SessionOptions(close=True))


def mean_program_s(result: Result) -> float:
    """Mean seconds from the first arrival of a program to the end of its last turn."""
    columns = result.columns
    spans = []
    for name in np.unique(columns["session"]):
        mine = columns["session"] == name
        spans.append(columns["finished_s"][mine].max() - columns["arrival_s"][mine].min())
    return float(np.mean(spans))
