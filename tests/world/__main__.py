"""Runs worlds, prints broken ones: `python -m tests.world [--first SEED] [--seeds N | --minutes M] [--shrink]`."""

import argparse
import time

from tests.world.shrink import shrink
from tests.world.world import make_story, run


def main() -> int:
    """Run seeds until the number or the time is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--shrink", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    worlds = broken = asked = lost = faults = 0
    simulated = 0.0
    for seed in range(args.first, args.first + args.seeds):
        if time.perf_counter() - begin > args.minutes * 60:
            break
        story = make_story(seed)
        outcome = run(story)
        worlds, asked, lost = worlds + 1, asked + len(outcome.seen), lost + outcome.lost
        faults, simulated = faults + len(story.faults), simulated + outcome.seconds
        if outcome.violations:
            broken += 1
            print(f"--- {story}")
            print(*outcome.violations[:12], sep="\n")
            if args.shrink:
                print("--- cut down to:", shrink(story, outcome.violations), sep="\n", flush=True)
    took = time.perf_counter() - begin
    print(
        f"{worlds} worlds, {simulated:.0f} simulated s ({simulated / max(took, 1e-9):.0f} a second), {asked} requests, "
        f"{faults} faults, {lost} answers lost, {broken} worlds with violations, {took:.0f} s"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
