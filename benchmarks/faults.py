"""What happens when things break under many streams, on the mock executor. Prints one row for each fault.

The server must recover from all faults but its own end with all its pages, and from a killed or stopped scheduler or
detokenizer with all its answers. A killed server sends no errors; its child processes exit.
Where all clients hang up at once, "last end" is the time until no KV is held for them (target 1 s).

Run: python -m benchmarks.faults
"""

import argparse
import signal
from functools import partial

from tests.e2e import faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    streams = parser.parse_args().streams
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
    print(f"{'fault':28} {'last end':>9}  {'exit':>4}  {'pages':10}  ends; reason")
    for run in runs:
        outcome = run()
        ends = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.ends.items()))
        words = "; ".join(filter(None, (ends, outcome.reason, *outcome.notes)))
        figures = f"{outcome.last_end_s:7.2f} s  {outcome.exit_status!s:>4}  {outcome.pages or '-':10}"
        print(f"{outcome.fault:28} {figures}  {words}", flush=True)


if __name__ == "__main__":
    main()
