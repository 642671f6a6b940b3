"""Real servers for tests: `tokenyard serve` and `tokenyard route` as processes."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """`tokenyard serve` with the given flags, on a free port; ready when made. `prefix` goes before the command."""

    def __init__(
        self, *flags: str, ready: bool = True, prefix: tuple[str, ...] = (), ready_within_s: float = 60.0
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [*prefix, sys.executable, "-m", "tokenyard", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        self.log = ""
        self.url = ""
        if ready:
            match = self.wait_for(r"Tokenyard is ready at ([^\s\"]+)", ready_within_s)
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


class Route:
    """`tokenyard route` on a free port in front of `urls`, ready when all of them are healthy."""

    def __init__(self, *urls: str, flags: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-m", "tokenyard", "route", "--port", "0", "--worker-urls", *urls, *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        found = re.search(r"routes at (\S+)", self.process.stderr.readline())
        assert found is not None
        self.url = found[1]
        self.wait_for(len(urls))

    def wait_for(self, healthy: int, timeout_s: float = 30.0) -> None:
        """Wait until so many workers are healthy."""
        end = time.monotonic() + timeout_s
        while sum(worker["state"] == "healthy" for worker in self.get("/workers")["workers"]) != healthy:
            assert time.monotonic() < end
            time.sleep(0.05)

    def get(self, path: str) -> Any:
        """JSON of a path."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def complete(self, prompt: str, **fields: Any) -> bytes:
        """The answer to a prompt."""
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def close(self) -> int:
        """Stop it as an operator would."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=30)
        assert "Traceback" not in log
        return self.process.returncode


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
