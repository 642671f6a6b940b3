"""When does speculative decoding pay under `slo`? Simulated, by load and acceptance.

Run from the repository root: `python -m benchmarks.speculation_pays [--requests 200] [--tpot-ms 15]`. All of it is
virtual time, so the figures are the same on any machine: Llama 3 8B on an H100 by the built-in cost profile, requests
like those of `tokenyard simulate --synthetic plain`, four drafts at most. `--draft-ms` is what a draft model takes for
the drafts of a step; 0 is prompt lookup.
"""

import argparse
from dataclasses import replace

from tokenyard.config import Settings
from tokenyard.cost import get_profile
from tokenyard.sim.engine.speculation import Speculation
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.synthetic import synthetic

RATES = (4.0, 16.0, 32.0, 40.0)
ACCEPTANCES = (0.3, 0.6, 0.9)
DRAFTS = 4
CONTEXT = 32_768


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    tokens, seconds = int(outcome.completion_tokens.sum()), outcome.sim_seconds
    steps = max(outcome.counters["steps"], 1)
    made = outcome.counters["generated_tokens"] / steps
    verified, right = (outcome.counters[key] / max(tokens, 1) for key in ("draft_tokens", "accepted_draft_tokens"))
    tpot_ms = 1e3 * float(sorted(outcome.tpot_s.tolist())[len(outcome.tpot_s) // 2])
    met = f"{100 * outcome.met.mean():.1f} %"
    return f"| {name} | {met} | {tokens / seconds:.0f} | {tpot_ms:.1f} | {made:.1f} | {verified:.2f} | {right:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tpot-ms", type=float, default=15.0)
    parser.add_argument("--draft-ms", type=float, default=0.0)
    options = parser.parse_args()
    profile = get_profile("h100", "llama-3-8b")
    settings = Settings(page_size=profile.page_size, schedule_policy="slo", slo_tpot_ms=options.tpot_ms)
    scheduler = replace(settings.scheduler_settings(context_length=CONTEXT), max_in_flight=1)
    plain = Setup(profile, scheduler)
    print("| requests/s, acceptance | in target | tokens/s | TPOT p50, ms | tokens a step | verified a token | right |")
    print("|---|---|---|---|---|---|---|")
    for rate in RATES:
        workload = synthetic("plain", options.requests, rate, 1)
        print(row(f"{rate:g}, no drafts", simulate(workload, plain)), flush=True)
        for acceptance in ACCEPTANCES:
            drafts = Speculation(DRAFTS, (acceptance, acceptance), draft_s=options.draft_ms / 1e3)
            print(row(f"{rate:g}, {acceptance:g}", simulate(workload, replace(plain, speculation=drafts))), flush=True)


if __name__ == "__main__":
    main()
