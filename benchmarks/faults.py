"""What happens when things break under many streams, on the mock executor. Prints one row for each fault.

The server must recover from all faults but its own end with all its pages, and from a killed or stopped scheduler or
detokenizer with all its answers. A killed server sends no errors; its child processes exit.
Of a fleet behind a router, one engine each or prefill and decode apart, only the router's own end may break streams.
Where all clients hang up at once, "last end" is the time until no KV is held for them (target 1 s).

Run: python -m benchmarks.faults
"""

import argparse
import signal
from functools import partial
from itertools import chain

from tests.e2e import faults

LOOKAHEAD = ("--schedule-policy", "adaptive", "--mock-step-ms", "30")
DIVIDED = ("--executor", "torch", "--dtype", "float32", "--tp-size", "2", "--threads", "1")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--fleet", action="store_true", help="only those of a fleet behind a router")
    args = parser.parse_args()
    streams = args.streams
    kinds = (
        faults.kill_server,
        faults.break_detokenizer,
        faults.kill_scheduler,
        faults.hang_up,
        faults.disconnects,
        faults.full_queue,
        faults.small_pool,
    )
    runs = [partial(kind, streams) for kind in kinds]
    runs.append(partial(faults.break_detokenizer, streams, 4, signal.SIGSTOP))
    runs.append(partial(faults.break_ranks, streams, 4, (signal.SIGKILL, signal.SIGSTOP)))
    runs.append(partial(faults.kill_below_scheduler, streams, "look-ahead process", LOOKAHEAD))
    runs.append(partial(faults.kill_below_scheduler, streams, "second rank of a model", DIVIDED, 16))
    print(f"{'fault':43} {'last end':>9}  {'exit':>4}  {'pages':10}  ends; reason")
    alone = () if args.fleet else (run() for run in runs)
    for outcome in chain(alone, faults.behind_router(streams), faults.disaggregated(streams)):
        ends = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.ends.items()))
        words = "; ".join(filter(None, (ends, outcome.reason, *outcome.notes)))
        figures = f"{outcome.last_end_s:7.2f} s  {outcome.exit_status!s:>4}  {outcome.pages or '-':10}"
        print(f"{outcome.fault:43} {figures}  {words}", flush=True)


if __name__ == "__main__":
    main()
