"""DLPM: longest prefix first among clients that still have deficit. The policy is `tokenyard.policy.fair`."""

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.prefixes import shared_prefixes
from tokenyard.sim import Engine, run


def measure() -> str:
    """Throughput against VTC, with a pool that holds few of the prefixes at once."""
    engine = Engine(kv_pool_tokens=9_000, settings={"disable_radix_cache": False})
    traffic = shared_prefixes(240, clients=4, rate=100.0)
    vtc, dlpm = (run(traffic, engine.with_(policy=name)) for name in ("vtc", "dlpm"))
    gain = dlpm["throughput_tokens_per_s"] / vtc["throughput_tokens_per_s"]
    hits = f"hits {100 * dlpm['prefix_hit_rate']:.0f} % for {100 * vtc['prefix_hit_rate']:.0f} %"
    return f"{gain:.2f} times the throughput of VTC ({hits})"


ENTRY = Entry(
    "DLPM",
    "Cao et al. 2025, Locality-aware Fair Scheduling in LLM Serving (arXiv 2501.14312)",
    "up to 2.87 times the throughput of VTC",
    "one simulated H100 with a pool of 9,000 tokens and four clients; theirs is the best of several traces",
    measure,
)
