"""Real servers for tests: `tokenyard serve` as its own process."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """`tokenyard serve` with the given flags, on a free port; ready when made. `prefix` goes before the command."""

    def __init__(self, *flags: str, ready: bool = True, prefix: tuple[str, ...] = ()) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [*prefix, sys.executable, "-m", "tokenyard", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        self.log = ""
        self.url = ""
        if ready:
            match = self.wait_for(r"Tokenyard is ready at ([^\s\"]+)")
            self.url = match[1]

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Read the log until it holds `pattern`."""
        end = time.monotonic() + timeout_s
        assert self.process.stderr is not None
        while (match := re.search(pattern, self.log)) is None:
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in time; the log says:\n{self.log}"
            readable, _, _ = select.select([self.process.stderr], [], [], left_s)
            if readable:
                part = os.read(self.process.stderr.fileno(), 65536).decode()
                assert part, f"the server ended; the log says:\n{self.log}"
                self.log += part
        return match

    def children(self) -> list[int]:
        """Process ids of the engine's processes."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end, reading on so that the log does not block it; returns the exit status."""
        _, error = self.process.communicate(timeout=timeout_s)
        self.log += error.decode() if error else ""
        return self.process.returncode

    def close(self) -> int:
        """Stop it as an operator would."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
