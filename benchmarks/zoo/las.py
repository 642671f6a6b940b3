"""Least attained service of programs. The policy is `plas` in `tokenyard.policy.programs`."""

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.programs import mean_program_s, programs
from tokenyard.sim import Engine, run


def measure() -> str:
    """Mean time of a program, against fcfs, at a load that the engine serves slowly."""
    traffic = programs(70, turns=(1, 16), new_tokens=900, gap_s=0.2, every_s=0.12, seed=2)
    engine = Engine(settings={"enable_mixed_chunk": True, "disable_radix_cache": False, "max_running_requests": 16})
    fcfs, plas = (mean_program_s(run(traffic, engine.with_(policy=name))) for name in ("fcfs", "plas"))
    return f"mean program time {fcfs / plas:.2f} times better than fcfs"


ENTRY = Entry(
    "LAS (Autellix's PLAS)",
    "Luo et al. 2025, Autellix: An Efficient Serving Engine for LLM Agents (arXiv 2502.13965)",
    "programs' throughput 4 to 15 times vLLM's at the same latency",
    "mean time at one load, not throughput at one latency; calls of like size, which fcfs serves in turn",
    measure,
)
