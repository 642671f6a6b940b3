"""`tokenyard top`: the live page's numbers in a terminal.

It follows `/v1/live`, parses one event a second and writes plain text, so that it uses little CPU.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import TokenyardError
from tokenyard.cli.explain import DIRECT, KEY_VARIABLES, error_message
from tokenyard.cli.top_screen import screen

TIMEOUT_S = 30.0
HISTORY_S = 60.0
BINS = 240
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of `tokenyard top`."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="address of the server [http://127.0.0.1:30000]"
    )
    parser.add_argument("--key", help="its admin key or its API key; safer in TOKENYARD_ADMIN_API_KEY")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks [1]")
    parser.add_argument("--once", action="store_true", help="print one look and end; always so without a terminal")


@dataclass
class LiveState:
    """The received state: the latest event, the bins of the last minute by index, and the totals of the last minute."""

    server: Mapping[str, Any] = field(default_factory=dict)
    tick: Mapping[str, Any] = field(default_factory=dict)
    prefixes: list[Mapping[str, Any]] = field(default_factory=list)
    bins: dict[int, list[float]] = field(default_factory=dict)
    totals: deque[Mapping[str, Any]] = field(default_factory=deque)

    def take(self, tick: Mapping[str, Any]) -> None:
        """Update the state from an event."""
        self.tick = tick
        self.server = tick.get("server", self.server)
        self.prefixes = tick.get("prefixes") or self.prefixes
        self.bins.update({int(one[0]): one for one in tick.get("bins", ())})
        for index in [index for index in self.bins if index <= tick["now"] - BINS]:
            del self.bins[index]
        if "totals" in tick:
            self.totals.append(tick)
        while len(self.totals) > 1 and self.totals[0]["at"] < tick["at"] - HISTORY_S:
            self.totals.popleft()


def top(args: argparse.Namespace) -> int:
    """Show the server's state until interrupted. Returns 0."""
    if not args.every > 0.0:
        raise TokenyardError(f"--every is {args.every:g}; it must be above 0")
    once = args.once or not sys.stdout.isatty()
    key = args.key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    seen = LiveState()
    with contextlib.suppress(KeyboardInterrupt), _screen(not once):
        for tick in events(args.url, key, 0.0 if once else args.every):
            seen.take(tick)
            size = shutil.get_terminal_size()
            if once:
                print("\n".join(screen(seen, size.columns, None)))
                break
            lines = screen(seen, size.columns, size.lines - 1)
            sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_REST)
            sys.stdout.flush()
    return 0


@contextlib.contextmanager
def _screen(used: bool) -> Iterator[None]:
    """Use the terminal's alternate screen, and restore the terminal at the end."""
    if not used:
        yield
        return
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def events(url: str, key: str, every_s: float) -> Iterator[dict[str, Any]]:
    """One event every `every_s` seconds, the latest one; those in between are read and skipped. Raises
    TokenyardError with the server's message, or if it cannot be reached.
    """
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/live", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with DIRECT.open(request, timeout=TIMEOUT_S) as answer:
            due = 0.0
            for line in answer:
                if line.startswith(b"data: ") and time.monotonic() >= due:
                    due = time.monotonic() + every_s - 0.05
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        raise TokenyardError(error_message(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TokenyardError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error
    raise TokenyardError(f"{url} has ended the stream: it has shut down")
