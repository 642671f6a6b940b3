"""Continuum (CacheTTL): a session's KV is kept for a time to live after each turn. In `tokenyard.policy.programs`."""

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.programs import mean_program_s, programs
from tokenyard.sim import Engine, run


def measure() -> str:
    """Mean time of a job of many turns, against fcfs with an LRU cache that is too small for all contexts."""
    traffic = programs(24, turns=(6, 14), new_tokens=1_500, gap_s=1.0, every_s=0.5, seed=5)
    engine = Engine(kv_pool_tokens=60_000, settings={"enable_mixed_chunk": True, "disable_radix_cache": False})
    fcfs, kept = (run(traffic, engine.with_(policy=name)) for name in ("fcfs", "continuum"))
    gain = mean_program_s(fcfs) / mean_program_s(kept)
    hits = f"hits {100 * kept['prefix_hit_rate']:.0f} % for {100 * fcfs['prefix_hit_rate']:.0f} %"
    return f"mean job time {gain:.2f} times better than fcfs with LRU ({hits})"


ENTRY = Entry(
    "Continuum (CacheTTL)",
    "Li et al. 2025, Continuum, earlier CacheTTL (arXiv 2511.02230, v4)",
    "more than 8 times better job time at best",
    "24 synthetic jobs, no KV store below the device; times to live are learned from few gaps",
    measure,
)
