r"""What sessions of agents and the policies for them cost chats that share the engine, in the simulator.

    python -m benchmarks.agents_beside_chats [--rows "session --radix-eviction-policy reuse" ...] [--chats-per-s 0.5]

The engine is that of `benchmarks.agents`, and so are the sessions: 40 start within two minutes (contexts of 3.2 times
the pool), each with its first 40 turns, and no further ones. For an hour chats come by a Poisson process: one turn
without a session, with 200 to 2,000 new tokens and an answer of 50 to 400. With `chats first` before a row they have a
priority of 100, above the sessions' by more than these ever wait. Virtual time; the same requests for each row.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from benchmarks.agents import COMMON, TRACE, parsed
from tokenyard.base import Float64Array
from tokenyard.cli.simulation_arguments import load_workload, make_setup, profile_of
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionOptions, SessionRecord, Turn
from tokenyard.sim.traces.workload import Workload

AGENTS, TURNS, CHATS_S = 40, 40, 3600.0
CHATS = "chats"
FIRST = "chats first "
PRIORITY = 100
"""A level is worth five seconds of waiting."""

COLUMNS = (
    "row | chats: TTFT p50 / p99 / max s | TPOT p50 / p99 ms | turns: TTFT p50 / p99 / max s | mean end of a turn s "
    "| last s"
)
ROWS = (
    "fcfs",
    "hits-first",
    "session --radix-eviction-policy reuse",
    FIRST + "fcfs",
    FIRST + "session --radix-eviction-policy reuse",
)


def with_chats(trace: SessionTrace, options: SessionOptions, chats_per_s: float) -> Workload:
    """The workload of the first sessions of a trace and of chats."""
    rng = np.random.default_rng(options.seed)
    fitting = [record for record in trace.records if record.longest <= (options.context_length or record.longest)]
    chosen = rng.permutation(len(fitting))[:AGENTS]
    starts = rng.uniform(0.0, 120.0, AGENTS)
    records = [
        SessionRecord(fitting[place].name, fitting[place].turns[:TURNS], float(start), "agents")
        for place, start in zip(chosen, starts, strict=True)
    ]
    for at in rng.uniform(0.0, CHATS_S, rng.poisson(chats_per_s * CHATS_S)):
        turn = Turn(int(rng.integers(200, 2000)), int(rng.integers(50, 400)))
        records.append(SessionRecord("", [turn], float(at), CHATS))
    return session_workload(replace(trace, records=records), SessionOptions(think_cap_s=options.think_cap_s))


def line(row: str, chats_per_s: float, seed: int) -> str:
    """The figures of one row, as a line of a Markdown table."""
    words = shlex.split(row.removeprefix(FIRST))
    flags = ["--trace", str(TRACE), *COMMON.split(), "--sessions-per-hour", "1", "--seed", str(seed)]
    flags += ["--schedule-policy", *words]
    if row.startswith(FIRST):
        flags += ["--enable-priority-scheduling"]
    args = parsed(flags)

    def mixed(trace: SessionTrace, options: SessionOptions) -> Workload:
        return with_chats(trace, options, chats_per_s)

    with patch("tokenyard.sim.traces.kv_cache_tester.session_workload", mixed):
        workload = load_workload(args, profile_of(args).context_length)
    chat = workload.tenant == workload.tenants.index(CHATS)
    if row.startswith(FIRST):
        workload = replace(workload, priority=np.where(chat, PRIORITY, 0).astype(np.int32))
    outcome = simulate(workload, make_setup(args, workload, args.preset))
    ended_s = outcome.finished_ns[~chat] / 1e9
    cells = (
        _quantiles(outcome.ttft_s[chat], 0.5, 0.99, 1.0),
        _quantiles(1e3 * outcome.tpot_s[chat], 0.5, 0.99),
        _quantiles(outcome.ttft_s[~chat], 0.5, 0.99, 1.0),
    )
    return f"| {row} | {' | '.join(cells)} | {ended_s.mean():,.0f} | {ended_s.max():,.0f} |"


def _quantiles(values: Float64Array, *levels: float) -> str:
    return " / ".join(f"{value:.3g}" for value in np.quantile(values, levels).tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="policies with flags")
    parser.add_argument("--chats-per-s", type=float, default=0.5, help="[0.5]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    print(f"| {COLUMNS} |\n| --- " + "| ---: " * COLUMNS.count("|") + "|")
    for row in args.rows:
        print(line(row, args.chats_per_s, args.seed), flush=True)


if __name__ == "__main__":
    main()
