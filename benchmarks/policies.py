"""What the policies promise beyond goodput, on seeded made-up traffic: one question per table.

    python benchmarks/policies.py [tenants] [locality] [overload] [headroom] [silos] [adaptive] [--short]

One H100 with Llama-3-8B in the simulator. tenants: one of four floods; how far apart are two that both wait, and what
does it cost the others (bound: Sheng et al. 2024)? locality: tenants with their own system prompts; what does
fairness cost in throughput (DLPM, Cao et al. 2025)? overload: bursts beyond capacity with three classes; does the
top class notice, and does the low one get its turn within the bound of aging? headroom: long answers and a small pool;
how many preemptions does each rule of admission save? silos: three classes with their own targets, in bursts; how
many devices does it take to keep each class at 99 %, apart and together (Niyama, Goel et al. 2025)? adaptive: a day of
traffic that shifts, cut to half an hour (with --short to six minutes); do forecasts find the policy that suits it?
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import Int32Array, SchedulerSettings, TenantSettings
from tokenyard.cost import get_profile
from tokenyard.policy.adaptive import CANDIDATES, SEPARATOR, changed
from tokenyard.sim.engine.presets import common_settings
from tokenyard.sim.planner.oracle_bounds import min_work_s
from tokenyard.sim.report.service_gap import gap_bound, service_gap
from tokenyard.sim.report.summary import summary, wait_s
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.prompt_ids import VOCAB_SIZE, SegmentContent
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.synthetic import bursts, classes, lengths, plain, poisson, tenants
from tokenyard.sim.traces.workload import Workload, uniform_columns

PROFILE = get_profile("h100", "llama-3-8b")
TRACES = Path(__file__).resolve().parents[2] / "shared/traces"


def settings(workload: Workload, **changes: Any) -> SchedulerSettings:
    """Mixed steps of 2048 tokens, headroom by history, and changes to that."""
    base = common_settings(workload.max_prompt_tokens + workload.max_output_tokens + 1)
    return replace(base, chunked_prefill_size=2048, enable_mixed_chunk=True, headroom="history", **changes)


def run(workload: Workload, kv_pool_tokens: int | None = None, **changes: Any) -> Outcome:
    """Serve the workload."""
    return simulate(workload, Setup(PROFILE, settings(workload, **changes), kv_pool_tokens=kv_pool_tokens))


def largest_gap(outcome: Outcome) -> float:
    """How far the service of two tenants drifted apart while both had someone waiting, in weighted tokens."""
    return float(service_gap(outcome)[1].max())


def ask_tenants() -> None:
    """One of four tenants floods. Each setting is compared with the others' requests alone, under fcfs and that mix."""
    workload = tenants(6000, 32.0, seed=1)
    flooded = workload.tenant == 0
    bound = gap_bound(workload, PROFILE.kv_pool_tokens)
    shares = {name: TenantSettings(kv_share=1.0 / len(workload.tenants)) for name in workload.tenants}
    print(
        f"\n| tenants, one floods | largest gap, k tokens (bound {bound / 1e3:.0f}) | others' TTFT p99 s | alone |",
        end="",
    )
    print(" the others' TPOT p99 ms | recomputed k tokens |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    cases: dict[str, dict[str, Any]] = {
        "fcfs": {},
        "vtc as in the paper": {"schedule_policy": "vtc", "policy_options": {"saved_tokens": 0}},
        "vtc": {"schedule_policy": "vtc"},
        "dlpm": {"schedule_policy": "dlpm"},
        "vtc, shares of the pool": {"schedule_policy": "vtc", "tenants": shares},
    }
    for mixed in (True, False):
        base = replace(settings(workload, disable_radix_cache=False), enable_mixed_chunk=mixed)
        alone = np.quantile(simulate(workload.only(~flooded), Setup(PROFILE, base)).ttft_s, 0.99)
        for name, changes in cases.items():
            outcome = simulate(workload, Setup(PROFILE, replace(base, **changes)))
            ttft, tpot = (np.nanquantile(column[~flooded], 0.99) for column in (outcome.ttft_s, outcome.tpot_s))
            wasted = summary(outcome)["recomputed_tokens"] / 1e3
            numbers = f"{largest_gap(outcome) / 1e3:.0f} | {ttft:.2f} | {alone:.2f} | {1e3 * tpot:.0f} | {wasted:.0f}"
            print(f"| {name}, {'mixed steps' if mixed else 'prefill first'} | {numbers} |", flush=True)


def tenant_prefixes(requests: int, rate: float, seed: int) -> Workload:
    """Eight tenants, each with six system prompts of 6,000 tokens; own parts of about 150, answers of about 60."""
    rng = np.random.default_rng(seed)
    tenant, prompt = rng.integers(0, 8, requests), rng.integers(0, 6, requests)
    own, outputs = lengths(150, requests, rng), lengths(60, requests, rng, 500)
    streams = np.stack((6 * tenant + prompt, 48 + np.arange(requests)), axis=1).astype(np.int64)
    parts = np.stack((np.full(requests, 6000), own), axis=1).astype(np.int32)
    content = SegmentContent(streams.ravel(), parts.ravel(), 2 * np.arange(requests + 1, dtype=np.int64))
    prompts = (own + 6000).astype(np.int32)
    made = uniform_columns("tenant-prefixes", poisson(requests, rate, rng), prompts, outputs, content)
    return replace(made, tenants=tuple(f"t{i}" for i in range(8)), tenant=tenant.astype(np.int32))


def ask_locality() -> None:
    """Fairness against locality, with a cache that holds a part of the system prompts."""
    workload = tenant_prefixes(3000, 60.0, seed=1)
    print("\n| system prompts of 8 tenants | requests/s | hit rate % | largest gap, k tokens |")
    print("| --- | ---: | ---: | ---: |")
    for policy in ("fcfs", "lpm", "vtc", "dlpm"):
        outcome = run(workload, 120_000, schedule_policy=policy, disable_radix_cache=False)
        numbers = summary(outcome)
        rate, hits = len(workload) / outcome.sim_seconds, 100 * numbers["prefix_hit_rate"]
        print(f"| {policy} | {rate:.1f} | {hits:.1f} | {largest_gap(outcome) / 1e3:.0f} |")


def ask_overload() -> None:
    """Three classes under bursts beyond capacity: priorities with and without aging. All steps are bounded in time."""
    labelled, shape = classes(6000, 11.0, seed=2), bursts(6000, 11.0, seed=2)
    workload = replace(labelled, name="bursts of classes", arrival_s=shape.arrival_s)
    top, low = workload.priority == workload.priority.max(), workload.priority == workload.priority.min()
    print("\n| bursts, three classes | top class wait p99 s | top class met % | all met % | low class max wait s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    cases: dict[str, dict[str, Any]] = {
        "fcfs": {},
        "priority, no aging": {
            "schedule_policy": "priority",
            "enable_priority_scheduling": True,
            "priority_aging_s": 0.0,
        },
        "priority, aging 5 s": {"schedule_policy": "priority", "enable_priority_scheduling": True},
        "slo with priorities": {"schedule_policy": "slo", "enable_priority_scheduling": True},
        "slo": {"schedule_policy": "slo"},
    }
    for name, changes in cases.items():
        outcome = run(workload, step_budget="time", max_partial_prefills=4, **changes)
        wait = wait_s(outcome)
        met = f"{100 * outcome.met[top].mean():.1f} | {100 * outcome.met.mean():.1f}"
        print(f"| {name} | {np.nanquantile(wait[top], 0.99):.2f} | {met} | {np.nanmax(wait[low]):.1f} |")


def ask_headroom() -> None:
    """Long answers, a small pool."""
    base = plain(2500, 2.3, seed=3)
    rng = np.random.default_rng(3)
    workload = replace(base, output_tokens=lengths(700, len(base), rng, 6000))
    print("\n| long answers, 120k pool | preemptions | recomputed k tokens | met % | TPOT p99 ms | requests/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for headroom in ("none", "ratio", "history", "past-future"):
        outcome = simulate(
            workload,
            Setup(
                PROFILE,
                replace(settings(workload), headroom=headroom, retraction_policy="newest"),
                kv_pool_tokens=120_000,
            ),
        )
        numbers = summary(outcome)
        wasted = f"{numbers['preemptions']} | {numbers['recomputed_tokens'] / 1e3:.0f}"
        quality = f"{100 * numbers['slo_attainment']:.1f} | {1e3 * numbers['tpot_s']['p99']:.0f}"
        print(f"| {headroom} | {wasted} | {quality} | {len(workload) / outcome.sim_seconds:.2f} |")


QOS = (
    # name, first token within so many seconds (None: the run's target), seconds per output token
    ("interactive", None, 0.05),
    ("standard", 20.0, 0.1),
    ("batch", 60.0, 0.2),
)
QOS_SHARE, MAX_DEVICES = 0.99, 16


def qos_classes(requests: int, rate: float, seed: int) -> Workload:
    """Three classes of equal size that come in bursts of 30 s; prompts of about 2,500 tokens, answers of about 250."""
    rng, shape = np.random.default_rng(seed), bursts(requests, rate, seed)
    prompts, outputs = lengths(2500, requests, rng, 16_000), lengths(250, requests, rng, 2000)
    made = uniform_columns("qos classes", shape.arrival_s, prompts, outputs, shape.content)
    chosen = rng.integers(0, len(QOS), requests).astype(np.int32)
    return replace(
        made,
        classes=tuple(name for name, _, _ in QOS),
        service_class=chosen,
        slo_ttft_s=np.array([np.nan if ttft_s is None else ttft_s for _, ttft_s, _ in QOS])[chosen],
        slo_tpot_s=np.array([tpot_s for _, _, tpot_s in QOS])[chosen],
    )


def replicas_needed(workload: Workload, most: int, **changes: Any) -> int:
    """The fewest devices, behind a router that goes by load, on which every class meets its targets.

    The search begins where the work alone fills them, and gives up at `most`.
    """
    least = int(np.ceil(min_work_s(workload, PROFILE).sum() / workload.arrival_s[-1]))
    for count in range(least, most):
        setup = Setup(PROFILE, settings(workload, **changes), replicas=count, router="least_load")
        shares = summary(simulate(workload, setup))["slo_attainment_by_class"]
        if min(shares.values()) >= QOS_SHARE:
            return count
    return most


def ask_silos() -> None:
    """Devices for each class apart, or all classes on all devices, of which no more are tried than it takes apart."""
    workload = qos_classes(12_000, 22.0, seed=1)
    print("\n| devices for 99 % of each class | interactive | standard | batch | apart | together | fewer % |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    cases: dict[str, dict[str, Any]] = {
        "slo": {"schedule_policy": "slo", "max_partial_prefills": 4},
        "fcfs": {},
    }
    for name, changes in cases.items():
        silos = [workload.only(workload.service_class == one) for one in range(len(QOS))]
        alone = [replicas_needed(one, MAX_DEVICES, **changes) for one in silos]
        disagg = sum(alone)
        together = replicas_needed(workload, disagg, **changes)
        counts = " | ".join(map(str, (*alone, disagg, together)))
        print(f"| {name} | {counts} | {100 * (1 - together / disagg):.0f} |", flush=True)


class Joined:
    """The content of several workloads one after the other. Their token ids are kept apart."""

    def __init__(self, parts: list[Workload]) -> None:
        self._parts = parts
        self._begins = np.cumsum([0, *(len(part) for part in parts)])

    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        """See `Content.prompt_ids`."""
        part = int(np.searchsorted(self._begins, index, side="right")) - 1
        ids = self._parts[part].content.prompt_ids(index - int(self._begins[part]), tokens)
        disagg: Int32Array = (ids.astype(np.int64) + 1_000_003 * part) % (VOCAB_SIZE - 1) + 1
        return disagg.astype(np.int32)


def joined(parts: list[Workload], part_s: float) -> Workload:
    """The first `part_s` seconds of each workload, one after the other."""
    kept = [part.only(part.arrival_s < part_s) for part in parts]
    arrivals = np.concatenate([one.arrival_s + place * part_s for place, one in enumerate(kept)])
    prompts = np.concatenate([one.prompt_tokens for one in kept])
    outputs = np.concatenate([one.output_tokens for one in kept])
    # Rows are taken from the front only, so that a row's content is that of its place.
    return uniform_columns("a day", arrivals, prompts, outputs, Joined(kept))


def prefix_families(requests: int, rate: float, seed: int) -> Workload:
    """One of a hundred system prompts of 8,000 tokens, more than the cache holds; own parts of about 200 tokens."""
    rng = np.random.default_rng(seed)
    family, own, outputs = rng.integers(0, 100, requests), lengths(200, requests, rng), lengths(100, requests, rng, 800)
    streams = np.stack((family, 100 + np.arange(requests)), axis=1).astype(np.int64)
    parts = np.stack((np.full(requests, 8000), own), axis=1).astype(np.int32)
    content = SegmentContent(streams.ravel(), parts.ravel(), 2 * np.arange(requests + 1, dtype=np.int64))
    return uniform_columns("families", poisson(requests, rate, rng), (own + 8000).astype(np.int32), outputs, content)


def shifting_day(part_s: float, seed: int) -> Workload:
    """Calm chat, Azure's conversations at three times their rate, system prompts, bursts, Mooncake's conversations."""

    def many(rate: float) -> int:
        return int(2 * rate * part_s) + 100

    azure = read_trace(TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv.gz", "azure", ReadOptions(seed=seed))
    mooncake_file = TRACES / "mooncake/conversation_trace.jsonl.gz"
    mooncake = read_trace(mooncake_file, "mooncake", ReadOptions(seed=seed, limit=4000))
    parts = [
        plain(many(6.0), 6.0, seed),
        azure.scaled(3.0),
        prefix_families(many(7.0), 7.0, seed),
        bursts(many(14.0), 14.0, seed),
        mooncake.scaled(0.25),
        plain(many(20.0), 20.0, seed + 1),
    ]
    return joined(parts, part_s)


def serve_day(part_s: float, chosen: SchedulerSettings) -> tuple[float, str]:
    """The share of the shifting day's requests that met their targets, in %, and the rest of the table's row."""
    outcome = simulate(shifting_day(part_s, seed=1), Setup(PROFILE, chosen))
    ttft = "{p50:.2f}, {p99:.1f}".format(**summary(outcome)["ttft_s"])
    changes = ", ".join(f"{one.candidate} at {one.at_ns / 1e9:.0f} s" for one in outcome.switches)
    return 100 * float(outcome.met.mean()), f"{ttft} | {np.nanmax(wait_s(outcome)):.0f} | {changes}"


def ask_adaptive(*, short: bool = False) -> None:
    """Each candidate for the whole day, and looking ahead: as it is, beginning with the worst, and without slo."""
    part_s = 60.0 if short else 300.0
    workload = shifting_day(part_s, seed=1)
    base = settings(workload, disable_radix_cache=False)
    fixed = {name: changed(base, event) for name, event in CANDIDATES.items()}
    worst_first = list(reversed(CANDIDATES))
    looking = {
        "adaptive": list(CANDIDATES),
        "adaptive, worst first": worst_first,
        "adaptive without slo": [name for name in worst_first if name != "slo"],
    }
    runs = dict(fixed)
    for name, among in looking.items():
        options = {"among": SEPARATOR.join(among)}
        runs[name] = replace(base, schedule_policy="adaptive", policy_options=options)
    what = f"{workload.arrival_s[-1] / 60:.0f} minutes, {len(workload)} requests"
    print(f"\n| {what} | met % | of the best | over the worst | TTFT p50, p99 s | wait max s | changes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    met: dict[str, float] = {}
    with ProcessPoolExecutor(2) as pool:
        for name, (share, rest) in zip(runs, pool.map(partial(serve_day, part_s), runs.values()), strict=True):
            met[name] = share
            others = [met[one] for one in looking.get(name, ())]
            against = (
                f"{100 * share / max(others):.1f} % | {100 * share / min(others) - 100:+.0f} %" if others else " | "
            )
            print(f"| {name} | {share:.1f} | {against} | {rest} |", flush=True)


QUESTIONS: dict[str, Callable[[], None]] = {
    "tenants": ask_tenants,
    "locality": ask_locality,
    "overload": ask_overload,
    "headroom": ask_headroom,
    "silos": ask_silos,
    "adaptive": ask_adaptive,
}


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS), help=f"some of {', '.join(QUESTIONS)}")
    parser.add_argument("--short", action="store_true", help="a shorter day for adaptive")
    args = parser.parse_args()
    unknown = [name for name in args.questions if name not in QUESTIONS]
    if unknown:
        parser.error(f"unknown question {unknown[0]!r}; choose from {', '.join(QUESTIONS)}")
    for name in args.questions:
        if name == "adaptive":
            ask_adaptive(short=args.short)
        else:
            QUESTIONS[name]()


if __name__ == "__main__":
    main()
