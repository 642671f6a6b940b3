"""Searches for inputs that break parsers: `python -m tests.fuzz TARGET --minutes 5`, or `all`."""

import argparse
import logging
import random
import sys
import time

from tests.fuzz.search import Search, shrink
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Search each target for some minutes of CPU time; 1 if any input breaks it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--minutes", type=float, default=5.0, help="CPU minutes for each target")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    broken = 0
    for name in TARGETS if args.target == "all" else [args.target]:
        target = TARGETS[name]
        search = Search(target, random.Random(args.seed))
        until_s = time.process_time() + 60 * args.minutes
        search.begin()
        while time.process_time() < until_s:
            search.step()
        print(f"{name}: {search.runs} runs, {len(search.corpus)} inputs reach {len(search.seen)} pairs of lines")
        for kind, data in search.found.items():
            data = shrink(target, kind, data)
            print(f"  {kind}\n    {data[:2000]!r}{f' and {len(data) - 2000} bytes more' if len(data) > 2000 else ''}")
        broken += len(search.found)
        sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
