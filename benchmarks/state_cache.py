r"""Checkpoints of recurrent states: hits by bytes for each retention policy, next to an ideal cache, in the simulator.

    python -m benchmarks.state_cache [--traces agentic mooncake gsm8k] [--models qwen3.5-27b] [--budgets 8,16,32,64] \
        [--markdown benchmarks/results/state_cache.md]

A budget is the bytes of KV and checkpoints together, without the working states of running requests. `last`, `per-path`
and "worth, fixed ratio" divide it as `--mamba-full-memory-ratio` says, `worth` as the worth of either says.

The ideal cache knows the future: it keeps the pages that are needed again first (Belady), as soon as they are
computed, and its states take no memory. No policy can have more hits. "KV alone" is the cache of a model without
states, which has all bytes for KV, least recently used first out. What it lacks of the ideal is knowledge of the
future, not memory for states.

agentic: `--sessions` sessions of coding agents, a third of them active at any time; pages of 64 tokens. mooncake: the
first requests of an hour of chat, whose blocks of 512 tokens are the pages here, as nothing is known within one.
gsm8k: all questions, each behind the same five examples, ten per second; pages of 16. "Recomputed" are prompt tokens
that were computed beyond what the ideal cache would have computed.
"""

import argparse
import gzip
import heapq
import json
import shlex
import sys
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.base.protocols import MIN_CHECKPOINTS
from tokenyard.cli.flags import Parser
from tokenyard.cli.simulate import add_simulate_arguments
from tokenyard.cli.simulation_arguments import check_arguments, load_workload, make_setup, profile_of
from tokenyard.sim.simulate import FINISHED, Outcome, Setup, simulate
from tokenyard.sim.traces.conversations import PrefixHashes
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, stream_tokens
from tokenyard.sim.traces.workload import Workload

SHARED = Path(__file__).resolve().parents[2] / "shared"
DEVICES = {"qwen3.5-0.8b": "h100_sxm", "qwen3.5-27b": "h200_sxm"}
POLICIES = {
    "last": "--mamba-retention-policy last",
    "per-path": "--mamba-retention-policy per-path",
    "worth, fixed ratio": "--mamba-retention-policy worth",
    "worth": "--mamba-retention-policy worth",
}
RATIO, ROWS = 0.9, 32
COMMON = (
    f"--enable-mixed-chunk --chunked-prefill-size 8192 --max-running-requests {ROWS} --mamba-full-memory-ratio {RATIO}"
)
SHOTS, ANSWER_TOKENS, PER_S = 5, 32, 10.0


_WORKLOADS: dict[str, Workload] = {}
"""By flags: reading a trace takes longer than a run."""


@dataclass(frozen=True, slots=True)
class Case:
    """A trace and a model. flags: those of `tokenyard simulate` that say what runs."""

    trace: str
    model: str
    flags: str
    page_size: int

    def setup(self, budget_gb: float, policy: str) -> tuple[Workload, Setup]:
        """The workload, and an engine with so many bytes of KV and checkpoints."""
        words = f"{self.flags} {COMMON} --device {DEVICES[self.model]} --model {self.model} {POLICIES[policy]}"
        parser = Parser()
        add_simulate_arguments(parser)
        args = parser.parse_strictly(shlex.split(words))
        profile = profile_of(args)
        args.max_total_tokens = int(budget_gb * 1e9 / profile.kv_bytes_per_token / (1 + RATIO))
        if policy == "worth, fixed ratio":
            slots = RATIO * args.max_total_tokens * profile.kv_bytes_per_token // profile.state_slot_bytes
            args.max_mamba_cache_size = max(int(slots), MIN_CHECKPOINTS) + ROWS
        check_arguments(args)
        workload = _WORKLOADS.get(self.flags)
        if workload is None:
            workload = _WORKLOADS[self.flags] = load_workload(args, profile.context_length)
        return workload, make_setup(args, workload, None)


@dataclass(frozen=True, slots=True)
class Row:
    """What a run found. hits, prompts: prompt tokens."""

    case: Case
    budget_gb: float
    policy: str
    hits: int
    prompts: int
    ttft_p50_s: float = 0.0


def measure(case: Case, budget_gb: float, policy: str) -> Row:
    """One simulation; "ideal" and "KV alone" are caches that see the requests of one under `worth`, in their order."""
    if policy in OTHER_CACHES:
        workload, setup = case.setup(budget_gb, "worth")
        outcome = simulate(workload, setup)
        capacity = int(budget_gb * 1e9 / setup.profile.kv_bytes_per_token) // case.page_size
        served = [
            index for index in np.argsort(outcome.admitted_ns, kind="stable") if outcome.status[index] == FINISHED
        ]
        hits = OTHER_CACHES[policy](list(accesses(outcome, served, case.page_size)), capacity)
        return Row(case, budget_gb, policy, case.page_size * hits, int(workload.prompt_tokens[served].sum()))
    workload, setup = case.setup(budget_gb, policy)
    outcome = simulate(workload, setup)
    served = outcome.status == FINISHED
    hits, prompts = int(outcome.cached_tokens[served].sum()), int(workload.prompt_tokens[served].sum())
    return Row(case, budget_gb, policy, hits, prompts, float(np.median(outcome.ttft_s[served])))


def accesses(outcome: Outcome, served: list[int], page_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """For each request the pages that it can hit, and all that it leaves, as numbers that name their whole prefix."""
    hashes = PrefixHashes()
    for index in served:
        prompt = outcome.workload.request(int(index)).prompt_ids
        answer: Int32Array = stream_tokens(ANSWER_STREAM + int(index), np.arange(outcome.completion_tokens[index] - 1))
        names = hashes.of(np.concatenate((prompt, answer)))[page_size - 1 :: page_size].tolist()
        yield names[: (len(prompt) - 1) // page_size], names


def belady(requests: list[tuple[list[int], list[int]]], capacity: int) -> int:
    """The most pages that a cache of `capacity` pages can have when they are needed, if it knows all requests.

    MIN of Belady (1966) with bypassing: of what is there, the pages stay that are needed again first. Hits need not be
    a prefix, which a real cache requires, so this is an upper bound.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for time, (needed, _) in enumerate(requests):
        for name in needed:
            uses[name].append(time)
    for times in uses.values():
        times.reverse()
    kept: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for needed, left in requests:
        for name in needed:
            hits += name in kept
            uses[name].pop()
        for name in left:
            following = uses.get(name)
            if following:
                kept[name] = following[-1]
                heapq.heappush(latest, (-following[-1], name))
            else:
                kept.pop(name, None)
        while len(kept) > capacity:
            negative, name = heapq.heappop(latest)
            if kept.get(name) == -negative:
                del kept[name]
    return hits


def least_recently_used(requests: list[tuple[list[int], list[int]]], capacity: int) -> int:
    """The pages of prefixes that are there when they are needed; see `belady`."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for needed, left in requests:
        hits += next((place for place, name in enumerate(needed) if name not in kept), len(needed))
        # The end of a prefix goes before its beginning.
        for name in reversed(left):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits


OTHER_CACHES = {"KV alone": least_recently_used, "ideal": belady}


def cases(
    traces: list[str], models: list[str], sessions: int, requests: int, folder: Path, seed: int = 0
) -> list[Case]:
    """The traces as flags of the simulator."""
    questions = folder / "gsm8k.jsonl"
    if "gsm8k" in traces:
        questions.write_text("".join(few_shot_questions(SHARED / "prompts/gsm8k_test.jsonl.gz")))
    flags = {
        "agentic": f"--trace {SHARED}/traces/agentic/sessions.tar.zst --trace-format kv-cache-tester --page-size 64 "
        f"--sessions {sessions} --concurrent-sessions {sessions // 3} --think-cap-s 600 --context-length 200000 "
        f"--limit {requests // 4} --seed {seed}",
        "mooncake": f"--trace {SHARED}/traces/mooncake/conversation_trace.jsonl.gz --limit {requests} --page-size 512 "
        "--mamba-track-interval 512 --rate-scale 0.5",
        "gsm8k": f"--trace {questions} --tokenizer {SHARED}/tokenizers/gpt2 --page-size 16 --limit {requests}",
    }
    pages = {"agentic": 64, "mooncake": 512, "gsm8k": 16}
    return [Case(trace, model, flags[trace], pages[trace]) for trace in traces for model in models]


def few_shot_questions(path: Path) -> Iterator[str]:
    """Lines of a log of completions: each question of GSM8K behind the same examples, as benchmarks.gsm8k asks it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    shots = "".join(f"Question: {item['question']}\nAnswer: {item['answer']}\n\n" for item in items[:SHOTS])
    for number, item in enumerate(items):
        prompt = f"{shots}Question: {item['question']}\nAnswer:"
        record = {"timestamp": number / PER_S, "prompt": prompt, "output_tokens": ANSWER_TOKENS}
        yield json.dumps(record) + "\n"


def table(case: Case, rows: dict[tuple[float, str], Row], budgets: list[float]) -> str:
    """A Markdown table of one trace and model."""
    names = [*POLICIES, *OTHER_CACHES]
    head = "| GB | " + " | ".join(f"{name} hits %, recomputed M" for name in names[:-1]) + " | ideal hits % |"
    lines = [f"\n## {case.trace}, {case.model}\n", head, "| ---: " * (len(names) + 1) + "|"]
    for budget in budgets:
        ideal = rows[budget, "ideal"]
        cells = [f"{budget:g}"]
        for name in names[:-1]:
            row = rows[budget, name]
            again = (row.prompts - row.hits - (ideal.prompts - ideal.hits)) / 1e6
            cells.append(f"{100 * row.hits / row.prompts:.1f}, {again:.2f}")
        cells.append(f"{100 * ideal.hits / ideal.prompts:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything and print one table per trace and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=["agentic", "mooncake", "gsm8k"])
    parser.add_argument("--models", nargs="+", default=["qwen3.5-27b"], choices=DEVICES)
    parser.add_argument("--budgets", default="8,16,32,64", help="GB of KV and checkpoints [8,16,32,64]")
    parser.add_argument("--sessions", type=int, default=24, help="agentic: sessions [24]")
    parser.add_argument(
        "--requests",
        type=int,
        default=1600,
        help="most requests; of agentic a quarter [1600]",
    )
    parser.add_argument("--seed", type=int, default=0, help="agentic: which sessions are drawn [0]")
    parser.add_argument("--markdown", type=Path, help="write the tables and the command to this file")
    args = parser.parse_args()
    budgets = [float(word) for word in args.budgets.split(",")]
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args.traces, args.models, args.sessions, args.requests, Path(folder), args.seed):
            runs = [(budget, policy) for budget in budgets for policy in (*POLICIES, *OTHER_CACHES)]
            rows = {}
            for run in runs:
                rows[run] = measure(case, *run)
                print(f"{case.trace} {run[0]:g} GB {run[1]}: {rows[run].hits / rows[run].prompts:.3f}", file=sys.stderr)
            tables.append(table(case, rows, budgets))
            print(tables[-1], flush=True)
    if args.markdown is not None:
        command = shlex.join(["python", "-m", "benchmarks.state_cache", *sys.argv[1:]])
        args.markdown.write_text(
            f"# Checkpoints of recurrent states\n\n`{command}`\n{''.join(tables)}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
