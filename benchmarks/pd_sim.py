"""Does it pay to let some engines only prefill? x prefill and y decode engines against x + y that do both.

    python -m benchmarks.pd_sim [--engines 4] [--jobs N] [--found FILE.json] [--chart OUT.svg] [--at-capacity]

All in virtual time, with the scheduler, router and transfer protocol of the server. Both sides have the same number of
devices, the same settings (policy slo, prefix cache on) and the same traffic. Goodput is the largest rate of requests
at which 90 % of the first few hundred requests of a trace meet their targets, found by bisection over the speed of the
trace. Every split of the engines is tried at 100 Gbit/s, the best one at the other speeds as well (so the rates of both
sides are matched as far as whole engines can), and with engines that decide for each request (mode both). Figures do
not depend on the load of the machine. `--found` keeps what was found, so that an interrupted search resumes.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.simulator_speed import AZURE
from tokenyard.config import Settings
from tokenyard.cost import get_profile
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.outcome import FINISHED, REJECTED
from tokenyard.sim.planner.trial import FleetOption, LinkScheduler
from tokenyard.sim.report.summary import summary
from tokenyard.sim.report.svg_charts import Chart, picture
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions

MOONCAKE = AZURE.parents[1] / "mooncake/conversation_trace.jsonl.gz"
LOOK = 16
TARGET, PRECISION, STRIDE, MIN_RATE = 0.9, 0.08, 1.25, 0.05
LINKS, USUAL_LINK = (10.0, 100.0, 400.0), 100.0
REQUESTS = {"mooncake": 400, "azure": 2500}
FIRST_RATE = {"mooncake": 1.3, "azure": 36.0}
"""Requests a second and engine at which the search begins."""


@dataclass(frozen=True)
class Case:
    """What is served, on which device, and within which time per token."""

    trace: str
    file: str
    device: str
    tpot_ms: float
    engines: int

    @property
    def name(self):
        return f"{self.trace}, {self.device}, {self.tpot_ms:g} ms a token"


@cache
def workload_of(trace, file):
    """The first requests of a trace, at a rate of one a second."""
    found = read_trace(Path(file), trace, ReadOptions(limit=REQUESTS[trace]))
    return found.scaled(float(found.arrival_s[-1]) / len(found))


def setup_of(case, disagg):
    """One side of a comparison."""
    workload = workload_of(case.trace, case.file)
    context = workload.max_prompt_tokens + workload.max_output_tokens + 1
    profile = get_profile(case.device, "llama-3-8b")
    settings = replace(
        Settings(page_size=profile.page_size).scheduler_settings(context_length=context),
        schedule_policy="slo",
        slo_tpot_ms=case.tpot_ms,
    )
    return Setup(profile, settings, router="predicted_ttft", disagg=disagg)


def goodput(case, disagg, rate):
    """The largest rate, in requests a second, at which `TARGET` of the requests meet their targets, from `rate` on."""
    replicas = case.engines - (0 if disagg is None else disagg.prefill_replicas)
    option, workload = FleetOption(setup_of(case, disagg), "slo", None, replicas), workload_of(case.trace, case.file)

    def meets(rate):
        run = Simulation(LinkScheduler(0, len(workload), rate=rate).of(workload), option.fleet(replicas))
        allowed = (1.0 - TARGET) * len(workload)
        for come in run.until_end():
            if come % LOOK == 0 and misses(run) > allowed:
                return False
        return misses(run) <= allowed

    low, high = 0.0, float("inf")
    while high > low * (1.0 + PRECISION) and rate > MIN_RATE:
        low, high = (rate, high) if meets(rate) else (low, rate)
        rate = low * STRIDE if high == float("inf") else high / STRIDE if not low else (low * high) ** 0.5
    return low


def at_rate(case, disagg, rate):
    """What comes of that rate: the share in time, and TTFT and time per token (p99) and KV waits in seconds."""
    replicas = case.engines - (0 if disagg is None else disagg.prefill_replicas)
    workload = workload_of(case.trace, case.file).scaled(rate)
    outcome = simulate(workload, replace(setup_of(case, disagg), replicas=replicas))
    found = summary(outcome)
    moved = found.get("transfers") or {}
    wait_s = (moved.get("transfer_s") or {}).get("p99", 0.0)
    links = max((max(link["in"], link["out"]) for link in moved.get("links", ())), default=0.0)
    return [found["slo_attainment"], found["ttft_s"]["p99"], found["tpot_s"]["p99"], wait_s, links]


def share_task(arguments):
    case, kind, rate = arguments
    return case, kind, at_rate(case, disagg_of(kind), rate)


def misses(run):
    """Requests that have ended without meeting their targets."""
    outcome = run.so_far
    return int(((outcome.status == REJECTED) | ((outcome.status == FINISHED) & ~outcome.met)).sum())


def disagg_of(kind):
    """(prefill engines, link, mode) as a setting; None for engines that do both."""
    return None if kind is None else DisaggSettings(kind[0], mode=kind[2], link_gbit=kind[1])


def task(arguments):
    case, kind, rate = arguments
    return case, kind, goodput(case, disagg_of(kind), rate)


def run(cases, jobs, out):
    """All goodputs: {case: {kind: requests a second}}; those in `out` are not searched again, new ones are added."""
    done = json.loads(out.read_text()) if out is not None and out.exists() else {}

    def search(wanted):
        missing = [
            (case, kind, done.get(case.name, {}).get("None") or FIRST_RATE[case.trace] * case.engines)
            for case, kind in wanted
            if str(kind) not in done.get(case.name, {})
        ]
        with ProcessPoolExecutor(jobs) as pool:
            for case, kind, rate in pool.map(task, missing):
                done.setdefault(case.name, {})[str(kind)] = rate
                print(f"{case.name}: {kind}: {rate:.2f} requests/s", file=sys.stderr, flush=True)
                if out is not None:
                    out.write_text(json.dumps(done, indent=1) + "\n")

    splits = [(count, USUAL_LINK, "decode") for count in range(1, cases[0].engines)]
    search([(case, None) for case in cases])
    search([(case, kind) for case in cases for kind in splits])
    best = {case: max(splits, key=lambda kind: done[case.name][str(kind)]) for case in cases}
    more = [(case, (best[case][0], link, "decode")) for case in cases for link in LINKS if link != USUAL_LINK]
    search([*more, *((case, (best[case][0], USUAL_LINK, "both")) for case in cases)])
    return done, best


def at_capacity(cases, jobs, out):
    """Every kind once, at the rate at which engines that do both just meet the target."""
    done = json.loads(out.read_text()) if out is not None and out.exists() else {}
    for case in cases:
        rates = done.setdefault(case.name, {})
        if "None" not in rates:
            rates["None"] = goodput(case, None, FIRST_RATE[case.trace] * case.engines)
        kinds = [None, *((count, USUAL_LINK, "decode") for count in range(1, case.engines))]
        middle = case.engines // 2
        kinds += [(middle, link, "decode") for link in LINKS if link != USUAL_LINK] + [(middle, USUAL_LINK, "both")]
        print(f"\n{case.name}, {rates['None']:.2f} requests/s\n")
        print("| engines | link Gbit/s | in time | TTFT p99 s | ms a token p99 | KV wait p99 s | busiest link |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        with ProcessPoolExecutor(jobs) as pool:
            for _, kind, found in pool.map(share_task, [(case, kind, rates["None"]) for kind in kinds]):
                share, ttft_s, tpot_s, wait_s, busy = found
                mode = "" if kind is None or kind[2] == "decode" else ", mode both"
                name = "all do both" if kind is None else f"{kind[0]}P{case.engines - kind[0]}D{mode}"
                moved = "| - | - |" if kind is None else f"| {wait_s:.2f} | {100 * busy:.0f} % |"
                link = "-" if kind is None else f"{kind[1]:g}"
                rates.setdefault("in time", {})[name + ("" if kind is None else f", {kind[1]:g} Gbit/s")] = share
                cells = f"{100 * share:.1f} % | {ttft_s:.2f} | {1e3 * tpot_s:.1f} {moved}"
                print(f"| {name} | {link} | {cells}", flush=True)
        if out is not None:
            out.write_text(json.dumps(done, indent=1) + "\n")
    return done


def shares_chart(cases, device, done):
    """The share in time of each kind on a device, at the rate at which engines that do both just meet the target."""
    title = f"{device.upper()}: requests in time where engines that do both are at capacity"
    chart = Chart(title, "", "in time (%)", y_from_zero=True)
    cases = [case for case in cases if case.device == device]
    for case in cases:
        shares = done[case.name]["in time"]
        # Long names would run into each other.
        names = [name.replace(" Gbit/s", "").replace(", mode both", " both") for name in shares]
        chart.bars(names, [100.0 * one for one in shares.values()], case.name)
    return chart


def table(cases, done, best):
    """The table, in Markdown."""
    print("| trace | device | TPOT target ms | do both, req/s | best split | ", end="")
    print(" | ".join(f"{link:g} Gbit/s" for link in LINKS), "| both modes, 100 | other splits, 100 |")
    print("|" + " --- |" * 3 + " ---: |" * (len(LINKS) + 4))
    for case in cases:
        rates, split = done[case.name], best[case]
        alone = rates["None"]
        shown = [gain(rates[str((split[0], link, "decode"))], alone) for link in LINKS]
        both = gain(rates[str((split[0], USUAL_LINK, "both"))], alone)
        others = [
            f"{count}P{case.engines - count}D {gain(rates[str((count, USUAL_LINK, 'decode'))], alone)}"
            for count in range(1, case.engines)
            if count != split[0]
        ]
        name = f"{split[0]}P{case.engines - split[0]}D"
        cells = [case.trace, case.device, f"{case.tpot_ms:g}", f"{alone:.2f}", name, *shown, both, ", ".join(others)]
        print("| " + " | ".join(cells) + " |")


def gain(rate, alone):
    """A goodput next to that of engines that do both."""
    return f"{rate:.2f} ({100 * (rate / alone - 1):+.0f} %)" if alone else f"{rate:.2f}"


def chart_of(cases, done, best):
    """Goodput of the best split over that of engines that do both, against the speed of the links."""
    chart = Chart("Prefill and decode apart: goodput over the same number of engines that do both", "Gbit/s of each "
        "engine's link", "gain (%)", x_log=True)  # fmt: skip
    for case in cases:
        rates = done[case.name]
        gains = [100.0 * (rates[str((best[case][0], link, "decode"))] / rates["None"] - 1.0) for link in LINKS]
        chart.line(LINKS, gains, case.name)
    chart.line([LINKS[0], LINKS[-1]], [0.0, 0.0], "engines that do both", dashed=True)
    return chart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", default=str(MOONCAKE))
    parser.add_argument("--azure", default=str(AZURE))
    parser.add_argument("--traces", default="mooncake,azure")
    parser.add_argument("--devices", default="h100,h200")
    parser.add_argument("--tpot-ms", default="50,15")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--found", type=Path)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--at-capacity", action="store_true", help="no search but for engines that do both; quick")
    args = parser.parse_args()
    cases = [
        Case(trace, getattr(args, trace), device, float(tpot_ms), args.engines)
        for trace in args.traces.split(",")
        for device in args.devices.split(",")
        for tpot_ms in args.tpot_ms.split(",")
    ]
    if args.at_capacity:
        found = at_capacity(cases, args.jobs, args.found)
        if args.chart is not None:
            args.chart.write_text(
                picture([shares_chart(cases, device, found) for device in args.devices.split(",")]), encoding="utf-8"
            )
        return
    done, best = run(cases, args.jobs, args.found)
    table(cases, done, best)
    if args.chart is not None:
        args.chart.write_text(picture([chart_of(cases, done, best)]), encoding="utf-8")


if __name__ == "__main__":
    main()
