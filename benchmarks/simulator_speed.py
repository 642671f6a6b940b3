"""How many requests the simulator serves per second of wall time, with the real scheduler, on the Azure conv trace.

    python benchmarks/simulator_speed.py [--scales 3,1] [--preset vllm-default] [--limit N]

Vidur, at a lower load on the same kind of machine: about 145 requests/s. The trace is looked for in `../shared`, or
given with --trace; without one, made-up traffic of the same rate and lengths is used, and the table says so.
"""

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from tokenyard.cost import get_profile
from tokenyard.sim.engine import Outcome, Setup, simulate
from tokenyard.sim.presets import preset, preset_names
from tokenyard.sim.synthetic import synthetic
from tokenyard.sim.traces import read_trace
from tokenyard.sim.workload import Workload

AZURE = Path(__file__).resolve().parents[2] / "shared/traces/azure2023/AzureLLMInferenceTrace_conv.csv.gz"
AZURE_REQUESTS, AZURE_RATE = 19_366, 5.53


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: its outcome and the CPU seconds it took, the trace's reading left out."""

    scale: float
    outcome: Outcome
    cpu_s: float


def load(trace: Path, limit: int | None) -> Workload:
    """The trace, or made-up traffic of its rate if it is not there."""
    if trace.exists():
        return read_trace(trace, "azure").limited(limit)
    return synthetic("plain", AZURE_REQUESTS, AZURE_RATE).limited(limit)


def measure(workload: Workload, name: str, scale: float) -> Measurement:
    """Serve the workload once."""
    settings = preset(name, workload.max_prompt_tokens + workload.max_output_tokens + 1)
    begin = time.process_time()
    outcome = simulate(workload.scaled(scale), Setup(get_profile("h100", "llama-3-8b"), settings))
    return Measurement(scale, outcome, time.process_time() - begin)


def main() -> None:
    """Print a line per scale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=AZURE)
    parser.add_argument("--scales", default="3,1")
    parser.add_argument("--preset", choices=preset_names(), default="vllm-default")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    workload = load(args.trace, args.limit)
    print(f"{workload.name}: {len(workload)} requests, {args.preset}")
    print(
        "| scale | requests/s of wall time | of CPU time | steps per request | us per step | x real time | peak MiB |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for scale in (float(word) for word in args.scales.split(",")):
        run = measure(workload, args.preset, scale)
        wall, steps = run.outcome.wall_seconds, run.outcome.counters["steps"]
        count, memory = len(workload), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rates = f"{count / wall:.0f} | {count / run.cpu_s:.0f}"
        step = f"{steps / count:.1f} | {1e6 * wall / steps:.0f}"
        print(f"| {scale:g} | {rates} | {step} | {run.outcome.sim_seconds / wall:.0f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
