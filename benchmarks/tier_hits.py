"""How much of the prompts comes from the prefix cache and the KV store, compared with an ideal cache.

    python -m benchmarks.tier_hits [--sizes-gb 75 340 1250] [--tiers disk,host] [--requests N] [--found FILE.json]

The trace is Mooncake's conversations, served by one simulated H100 with Llama-3-8B at a fifth of their rate, all in
virtual time: figures do not depend on the load of the machine, and a size takes some ten minutes of one core. `host` is
a tier of that size that a load always pays from; `disk` one at the profile's bandwidth, where the server's cost model
chooses between loading and computing. The reference is a plain LRU cache of blocks of 512 tokens (requests one after
another, at once; only an unbroken match from the left counts; the deepest block of a request leaves first; answers are
not cached), as large as the tier and as large as tier and device together. `--found` keeps what was found, so that
an interrupted run resumes.
"""

import argparse
import gzip
import json
import sys
from collections import OrderedDict
from pathlib import Path

from benchmarks.simulator_speed import AZURE
from tokenyard.config import Settings
from tokenyard.cost import get_profile
from tokenyard.sim.kv.disagg_settings import GB, KvStoreSettings
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions

MOONCAKE = AZURE.parents[1] / "mooncake/conversation_trace.jsonl.gz"
DEVICE, MODEL, RATE_SCALE = "h100", "llama-3-8b", 0.2
REFERENCE_BLOCK = 512
SIZES_GB = (75.0, 340.0, 1250.0)
"""With the device's 427,000 tokens these are 1, 3 and 10 million."""
TIERS = ("disk", "host")


def reference(prompts, tokens):
    """The share of the prompts' tokens that an LRU cache of so many `tokens` holds. prompts: (input tokens, ids of
    their blocks), in order.
    """
    most, cached = tokens // REFERENCE_BLOCK, OrderedDict()
    hit = total = 0
    for length, blocks in prompts:
        found = next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
        hit += min(found * REFERENCE_BLOCK, length)
        total += length
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > most:
            cached.popitem(last=False)
    return hit / total


def prompts_of(path, most):
    """(input tokens, ids of their blocks) of the first `most` requests of a trace of Mooncake's."""
    with gzip.open(path, "rt") as lines:
        found = [json.loads(line) for line in lines]
    return [(one["input_length"], one["hash_ids"]) for one in found[:most]]


def setup_of(workload, kv_store):
    """One engine with these tiers, as `tokenyard simulate` makes it."""
    profile = get_profile(DEVICE, MODEL)
    context = workload.max_prompt_tokens + workload.max_output_tokens + 1
    given = Settings(page_size=profile.page_size, enable_hierarchical_cache=kv_store is not None)
    return Setup(profile, given.scheduler_settings(context_length=context), kv_store=kv_store)


def kv_store_settings_of(kind, size_gb):
    """A tier of `size_gb`, None for none."""
    if not size_gb:
        return None
    return (
        KvStoreSettings(host_gb=size_gb, disk_gb=0.0)
        if kind == "host"
        else KvStoreSettings(disk_gb=size_gb, write_mb_s=0.0)
    )


def measure(workload, kv_store):
    """What came of it, as `tokenyard simulate --json` says it."""
    found = summary(simulate(workload, setup_of(workload, kv_store)))
    return {"hit": found["prefix_hit_rate"], **found.get("kv_store", {}), "in_time": found["slo_attainment"]}


def table(found, prompts, sizes_gb, kinds):
    """The table, in Markdown."""
    profile = get_profile(DEVICE, MODEL)
    pool_tokens = profile.kv_pool_tokens
    print("| below the device | GB | tokens | hits in the pool | from below | both | not loaded, as it does not pay | "
          "ideal, as large | ideal, with the pool |")  # fmt: skip
    print("| --- |" + " ---: |" * 8)
    for kind, size_gb in [("nothing", 0.0), *((kind, size) for kind in kinds for size in sizes_gb)]:
        one = found[f"{kind} {size_gb:g}"]
        tokens = int(size_gb * GB / profile.kv_bytes_per_token)
        share = reference(prompts, tokens) if tokens else 0.0
        both = reference(prompts, tokens + pool_tokens)
        below = one.get("hit_rate", 0.0)
        cells = [f"{size_gb:g}", f"{tokens / 1e6:.2f} M", f"{one['hit']:.3f}", f"{below:.3f}"]
        cells += [f"{one['hit'] + below:.3f}", str(one.get("recomputed_requests", "-")), f"{share:.3f}", f"{both:.3f}"]
        print(f"| {kind} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path, default=MOONCAKE)
    parser.add_argument("--sizes-gb", type=float, nargs="+", default=SIZES_GB)
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--requests", type=int, help="only the first ones")
    parser.add_argument("--found", type=Path)
    args = parser.parse_args()
    kinds = args.tiers.split(",")
    workload = read_trace(args.mooncake, "mooncake", ReadOptions(limit=args.requests)).scaled(RATE_SCALE)
    found = json.loads(args.found.read_text()) if args.found is not None and args.found.exists() else {}
    for kind, size_gb in [("nothing", 0.0), *((kind, size) for kind in kinds for size in args.sizes_gb)]:
        name = f"{kind} {size_gb:g}"
        if name not in found:
            found[name] = measure(workload, kv_store_settings_of(kind, size_gb))
            print(name, found[name], file=sys.stderr, flush=True)
            if args.found is not None:
                args.found.write_text(json.dumps(found, indent=1) + "\n")
    table(found, prompts_of(args.mooncake, args.requests), args.sizes_gb, kinds)


if __name__ == "__main__":
    main()
