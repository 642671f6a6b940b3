"""Runs `tokenyard serve` as a subprocess that ends with the process that started it."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from tokenyard.engine.processes.child import die_with_parent

READY = re.compile(r"Tokenyard is ready at ([^\s\"]+)")
LAST_LINES = 20


class ServerProcess:
    """A server that is ready at `url`. Its log goes to standard error of this process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start `tokenyard serve ARGUMENTS` and wait until it is ready. Raises RuntimeError with the last lines of its
        log if it exits before that.
        """
        self.url = ""
        self._last: list[str] = []
        self._settled = threading.Event()
        self._process: subprocess.Popen[str]
        # The kernel ends the server with the thread that started it, so that thread lives as long as the server does.
        threading.Thread(target=self._run, args=(arguments,), daemon=True).start()
        self._settled.wait()
        if not self.url:
            raise RuntimeError(f"the server ended with exit status {self._process.wait()}:\n{''.join(self._last)}")

    def _run(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tokenyard", "serve", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)
            if not self.url:
                self._last = [*self._last[1 - LAST_LINES :], line]
                if found := READY.search(line):
                    self.url = found[1]
                    self._settled.set()
        self._process.wait()
        self._settled.set()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self, drain_s: float) -> None:
        """Make it drain and exit; kill it if it has not exited after `drain_s`."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(drain_s)
        if self.status is None:
            self._process.kill()
