"""Arguments that choose and start sessions, for the simulator and for `tokenyard bench serve`."""

import argparse
from math import inf


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Which sessions of a trace of sessions run, and when each starts."""
    group = parser.add_argument_group("sessions", "for traces of sessions (docs/agents.md)")
    group.add_argument(
        "--concurrent-sessions",
        type=int,
        default=0,
        metavar="N",
        help="N sessions are active at any time: another one starts when one ends [they start at their recorded times]",
    )
    group.add_argument(
        "--sessions-per-hour", type=float, default=0.0, metavar="R", help="sessions start by a Poisson process instead"
    )
    group.add_argument(
        "--sessions", type=int, metavar="N", help="draw N sessions of the trace, by --seed [all, in their order]"
    )
    group.add_argument(
        "--think-cap-s", type=float, default=inf, metavar="S", help="cap on the time between two turns [no cap]"
    )
    group.add_argument(
        "--long-sessions",
        choices=("skip", "cut"),
        default="skip",
        help="sessions that need a longer context than the model has: leave them out and count them, or cut them "
        "before the first turn that is too long [skip]",
    )
    group.add_argument(
        "--shrink",
        type=int,
        default=1,
        metavar="K",
        help="divide all lengths and gaps by K, for a smaller model than the recorded one [1]",
    )
    group.add_argument(
        "--close-sessions", action="store_true", help="clients tell the engine when a session has ended [they do not]"
    )
    group.add_argument(
        "--share-system-prompt",
        action="store_true",
        help="kv-cache-tester: sessions of the same model share the tokens of tools and system prompt",
    )
