r"""Sessions of coding agents under several policies and loads, in the simulator.

    python -m benchmarks.agents [--loads 40,20,10,24/h] [--seeds 3] [--rows "lpm --step-budget time" ...] [--jobs 2] \
        [--json FILE] [--markdown FILE]

A 70B model on eight H100 with a KV pool of 1.2 M tokens serves 160 sessions, drawn from kv-cache-tester's public
ones. A load is a number of sessions that are active at any time (40: contexts of 3.2 times the pool, 20: 1.6, 10:
0.8), or, as `24/h`, the rate at which sessions arrive. All rows have mixed chunks of 8,192 tokens, at most 64 running
requests and pages of 64. A row is a policy and any other flags of `tokenyard simulate`; the first one is fcfs with
LRU, and the ratios are to it with the same seed. `--preset vllm-v1` and `--preset sglang-0.5` are the rules of these
engines, and lpm is SGLang's order by hits. Before a row, `scrambled` exchanges the predictions of when sessions come
back. Flags for all rows, fcfs included, are given by `--with`: `--with "--enable-hierarchical-cache --hicache-size
1300"` is a host tier that holds all contexts. Figures are means over seeds, with the lowest and highest ratio; the
longest wait is the longest of all seeds.

A policy has its price, so read a row to its end: the unluckiest turn (longest wait), the tail of TTFT, and the tokens
that were computed again.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
from typing_extensions import override

from tokenyard.base import Float64Array
from tokenyard.cli.flags import Parser
from tokenyard.cli.simulate import add_simulate_arguments
from tokenyard.cli.simulation_arguments import check_arguments, load_workload, make_setup, profile_of
from tokenyard.policy.return_times import KINDS, CheckedReturnTimes
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.workload import Workload

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/agentic/sessions.tar.zst"
COMMON = (
    "--trace-format kv-cache-tester --think-cap-s 600 --context-length 200000 --device h100 --model llama-3-70b-tp8 "
    "--max-total-tokens 1200000 --enable-mixed-chunk --chunked-prefill-size 8192 --max-running-requests 64 "
    "--page-size 64"
)
BASE = "fcfs"
REUSE = "session --radix-eviction-policy reuse"
SCRAMBLED = "scrambled "
"""Begins a row whose predictions of when sessions come back are those of other sessions."""

ROWS = (
    "hits-first",
    "session",
    REUSE,
    SCRAMBLED + REUSE,
    "lpm",
    "lpm --step-budget time",
    "--preset vllm-v1",
    "--preset sglang-0.5",
    "continuum --radix-eviction-policy reuse",
    "pause-idle --radix-eviction-policy reuse",
    "program-fcfs",
    "plas",
)
COLUMNS = (
    "turns/h | ratio | session s, ratio | slowdown | TTFT p50 s | p95 s, ratio | longest wait s | hit share "
    "| recomputed M tokens"
)


class ScrambledReturnTimes(CheckedReturnTimes):
    """Learns as it should, and answers for each kind of stop and idle time with the index of another one."""

    @override
    def indices(self) -> Float64Array:
        found = super().indices()
        kinds = len(KINDS)
        found[:kinds] = np.random.default_rng(0).permutation(found[:kinds].ravel()).reshape(kinds, -1)
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: flags of a row, load and seed, and the flags that all runs share."""

    row: str
    load: str
    seed: int
    common: tuple[str, ...]

    @property
    def _sessions(self) -> tuple[str, ...]:
        """The flags that rows of one load and seed share."""
        rate = self.load.removesuffix("/h")
        how = "--concurrent-sessions" if rate == self.load else "--sessions-per-hour"
        return (*self.common, how, rate, "--seed", str(self.seed))

    def figures(self) -> dict[str, Any]:
        """The figures of its sessions."""
        words = shlex.split(self.row.removeprefix(SCRAMBLED))
        policy = [] if words[0].startswith("-") else ["--schedule-policy", words.pop(0)]
        args = parsed((*self._sessions, *policy, *words))
        workload = _workload(self._sessions)
        returns = ScrambledReturnTimes if self.row.startswith(SCRAMBLED) else CheckedReturnTimes
        with patch("tokenyard.scheduler.session_table.CheckedReturnTimes", returns):
            outcome = simulate(workload, make_setup(args, workload, args.preset))
        return {**asdict(self), "common": list(self.common), **summary(outcome)["sessions"]}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser()
    add_simulate_arguments(parser)
    args = parser.parse_strictly(list(words))
    check_arguments(args)
    return args


@lru_cache(maxsize=1)
def _workload(words: tuple[str, ...]) -> Workload:
    """Kept for the next row, as reading the trace takes as long as a short run."""
    args = parsed(words)
    return load_workload(args, profile_of(args).context_length)


def table(load: str, rows: Sequence[str], found: dict[tuple[str, str, int], dict[str, Any]], seeds: int) -> str:
    """A Markdown table of one load."""
    lines = [f"\n| {load} | {COLUMNS} |", "| --- " + "| ---: " * (COLUMNS.count("|") + 1) + "|"]
    base = [found[BASE, load, seed] for seed in range(seeds)]
    for row in rows:
        mine = [found[row, load, seed] for seed in range(seeds)]
        pairs = list(zip(mine, base, strict=True))
        turns = [one["turns_per_hour"] / other["turns_per_hour"] for one, other in pairs]
        lasted = [one["mean_session_s"] / other["mean_session_s"] for one, other in pairs]
        tails = [one["ttft_s"]["p95"] / other["ttft_s"]["p95"] for one, other in pairs]
        cells = (
            f"{mean(one['turns_per_hour'] for one in mine):.0f}",
            f"{mean(turns):.2f} ({min(turns):.2f}-{max(turns):.2f})",
            f"{mean(one['mean_session_s'] for one in mine):,.0f}, {mean(lasted):.2f}",
            f"{mean(one['mean_slowdown'] for one in mine):.2f}",
            f"{mean(one['ttft_s']['p50'] for one in mine):.3g}",
            f"{mean(one['ttft_s']['p95'] for one in mine):.3g}, {mean(tails):.2f}",
            f"{max(one['longest_wait_s'] for one in mine):,.0f}",
            f"{mean(one['hit_share'] for one in mine):.2f}",
            f"{mean(one['recomputed_tokens'] for one in mine) / 1e6:.0f}",
        )
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run everything and print one table per load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="40,20,10", help="sessions at a time, or R/h for a rate [40,20,10]")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="policies with flags, next to fcfs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds from 0 on [3]")
    parser.add_argument("--sessions", type=int, default=160, help="sessions of a run [160]")
    parser.add_argument("--limit", type=int, help="only the first N turns, for a quick look")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--with", dest="extra", default="", help="flags that replace or add to those of all rows")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time [2]")
    parser.add_argument("--json", type=Path, help="add the figures of each run as a JSON line; those in it are not run")
    parser.add_argument("--markdown", type=Path, help="write the tables and the command to this file")
    args = parser.parse_args()
    rows, loads = tuple(dict.fromkeys((BASE, *args.rows))), args.loads.split(",")
    common = ["--trace", str(args.trace), "--sessions", str(args.sessions), *COMMON.split(), *shlex.split(args.extra)]
    if args.limit is not None:
        common += ["--limit", str(args.limit)]
    runs = [Run(row, load, seed, tuple(common)) for load in loads for seed in range(args.seeds) for row in rows]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    if args.json is not None and args.json.exists():
        for line in args.json.read_text(encoding="utf-8").splitlines():
            figures = json.loads(line)
            if figures.get("common") == common:
                found[figures["row"], figures["load"], figures["seed"]] = figures
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run.figures) for run in runs if (run.row, run.load, run.seed) not in found]
        for future in as_completed(futures):
            figures = future.result()
            found[figures["row"], figures["load"], figures["seed"]] = figures
            if args.json is not None:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(figures) + "\n")
    tables = [table(load, rows, found, args.seeds) for load in loads]
    print("\n".join(tables))
    if args.markdown is not None:
        command = shlex.join(["python", "-m", "benchmarks.agents", *sys.argv[1:]])
        args.markdown.write_text(f"# Sessions of agents\n\n`{command}`\n{''.join(one + chr(10) for one in tables)}")


if __name__ == "__main__":
    main()
