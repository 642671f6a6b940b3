"""Runs worlds, prints broken ones: `python -m tests.world [--first SEED] [--seeds N | --minutes M] [--shrink]`.

With `--hours`, worlds are that long, and what their processes keep is counted after each hour.
"""

import argparse
import signal
import time
from collections import Counter

from tests.world.shrink import shrink
from tests.world.world import make_story, run


def main() -> int:
    """Run seeds until the number or the time is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes of CPU time")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--hours", type=float, default=0.0, help="simulated hours of each world, instead of 30 to 60 s")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, without later turns of sessions")
    args = parser.parse_args()
    begin = time.process_time()
    worlds = broken = asked = lost = 0
    faults: Counter[str] = Counter()
    done: Counter[str] = Counter()
    simulated = 0.0
    # Stop it early, and it says what it has found so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for seed in range(args.first, args.first + args.seeds):
            if time.process_time() - begin > args.minutes * 60:
                break
            story = make_story(seed, args.hours, args.rate)
            outcome = run(story)
            worlds, asked, lost = worlds + 1, asked + len(outcome.seen), lost + outcome.lost
            simulated += outcome.seconds
            faults.update(fault.kind for fault in story.faults)
            done += outcome.done
            for name, hours in outcome.tables.items():
                print(f"{name} after each hour:", *(tables["all objects"] or tables.total() for tables in hours))
            if outcome.violations:
                broken += 1
                print(f"--- {story}")
                print(*outcome.violations[:12], sep="\n", flush=True)
                if args.shrink:
                    print("--- cut down to:", shrink(story, outcome.violations), sep="\n", flush=True)
    except KeyboardInterrupt:
        pass
    took = time.process_time() - begin
    print(
        f"{worlds} worlds, {simulated:.0f} simulated s ({simulated / max(took, 1e-9):.1f} a second), {asked} requests, "
        f"{faults.total()} faults, {lost} answers lost, {broken} worlds with violations, {took:.0f} s of CPU time"
    )
    print("done:", ", ".join(f"{count} {what}" for what, count in done.most_common()))
    print("faults:", ", ".join(f"{count} {kind}" for kind, count in faults.most_common()))
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
