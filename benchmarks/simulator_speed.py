"""How many requests the simulator serves per second of wall time, with the real scheduler, on the Azure conv trace.

    python benchmarks/simulator_speed.py [--scales 3,1] [--preset vllm-default] [--limit N]
    python benchmarks/simulator_speed.py --day [--limit N]

Vidur, at a lower load on the same kind of machine: about 145 requests/s. The trace is looked for in `../shared`, or
given with --trace; without one, made-up traffic of the same rate and lengths is used, and the table says so.

--day repeats the trace until a day holds a million requests (11.6 a second on average) and prints speed and memory on
the way. The result of each request is kept, some 50 bytes in columns, whose memory the system provides as they fill;
anything else that grew would show. It takes about ten minutes; with --limit it is the first N requests of that day.
"""

import argparse
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import preset, preset_names
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.workload import COLUMNS, Workload

AZURE = Path(__file__).resolve().parents[2] / "shared/traces/azure2023/AzureLLMInferenceTrace_conv.csv.gz"
AZURE_REQUESTS, AZURE_RATE = 19_366, 5.53
DAY_REQUESTS, DAY_S = 1_000_000, 86_400.0
MIB = 1 << 20


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


def setup_for(workload: Workload, name: str) -> Setup:
    """One H100 with Llama-3-8B under a preset."""
    settings = preset(name, workload.max_prompt_tokens + workload.max_output_tokens + 1)
    return Setup(get_profile("h100", "llama-3-8b"), settings)


def measure(workload: Workload, name: str, scale: float) -> Measurement:
    """Serve the workload once."""
    setup = setup_for(workload, name)
    begin = time.process_time()
    outcome = simulate(workload.scaled(scale), setup)
    return Measurement(scale, outcome, time.process_time() - begin)


def print_scales(workload: Workload, name: str, scales: list[float]) -> None:
    """A line per scale."""
    print(
        "| scale | requests/s of wall time | of CPU time | steps per request | us per step | x real time | peak MiB |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for scale in scales:
        run = measure(workload, name, scale)
        wall, steps = run.outcome.wall_seconds, run.outcome.counters["steps"]
        count, memory = len(workload), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rates = f"{count / wall:.0f} | {count / run.cpu_s:.0f}"
        step = f"{steps / count:.1f} | {1e6 * wall / steps:.0f}"
        print(f"| {scale:g} | {rates} | {step} | {run.outcome.sim_seconds / wall:.0f} | {memory:.0f} |")


def repeated(workload: Workload, requests: int, seconds: float) -> Workload:
    """The workload over and over, so many requests in so many seconds."""
    times = -(-requests // len(workload))
    length_s = float(workload.arrival_s[-1]) * len(workload) / (len(workload) - 1)
    begins = np.repeat(np.arange(times) * length_s, len(workload))
    longer = {name: np.tile(getattr(workload, name), times) for name in COLUMNS}
    longer["arrival_s"] += begins
    day = replace(workload, **longer).limited(requests)
    return day.scaled(float(day.arrival_s[-1]) / seconds)


def memory_mib() -> float:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / MIB


class Milestones:
    """Prints speed and memory at every tenth of a run; called with (submitted, all)."""

    def __init__(self) -> None:
        self._tenth = 0
        self._begin = time.perf_counter()
        print("| % | requests | requests/s of wall time | MiB now |\n| ---: | ---: | ---: | ---: |")

    def __call__(self, done: int, total: int) -> None:
        """Print a line where a tenth is full."""
        if 10 * done < (self._tenth + 1) * total:
            return
        self._tenth = 10 * done // total
        rate = done / (time.perf_counter() - self._begin)
        print(f"| {10 * self._tenth} | {done} | {rate:.0f} | {memory_mib():.1f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=AZURE)
    parser.add_argument("--scales", default="3,1")
    parser.add_argument("--preset", choices=preset_names(), default="vllm-default")
    parser.add_argument("--day", action="store_true", help="a million requests in a day instead")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    if args.day:
        day = repeated(load(args.trace, None), DAY_REQUESTS, DAY_S).limited(args.limit)
        print(f"{day.name}, repeated: {len(day)} requests in {day.arrival_s[-1] / 3600:.1f} h, {args.preset}")
        outcome = simulate(day, setup_for(day, args.preset), progress=Milestones())
        print(f"served {int(outcome.served.sum())}, {outcome.counters['steps']} steps, {outcome.wall_seconds:.0f} s")
        return
    workload = load(args.trace, args.limit)
    print(f"{workload.name}: {len(workload)} requests, {args.preset}")
    print_scales(workload, args.preset, [float(word) for word in args.scales.split(",")])


if __name__ == "__main__":
    main()
