"""The engine of one model as a process of its own: `tokenyard serve` on a Unix socket."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tokenyard.engine.processes.child import die_with_parent

log = logging.getLogger(__name__)

READY = "Tokenyard is ready at"
KILL_AFTER_S = 10.0
"""How long after its own limit an engine that was told to end is killed."""

MAX_LINE_BYTES = 1 << 16


class EngineProcess:
    """Starts and stops the engine of a model.

    url: the URL of its socket.
    reason: its last line, which says why it ended where it ended by itself.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        number: int,
        *,
        shutdown_s: float,
        environment: Mapping[str, str],
        ready: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """`folder`: private, for socket and settings. `ready` and `ended` are called from the event loop.

        shutdown_s: how long the engine itself takes to end at most.
        environment: its environment variables.
        """
        # The path of a Unix socket has at most 107 bytes, so the model's name is not in it.
        self._socket, self._config = folder / f"{number}.sock", folder / f"{number}.yaml"
        self.name, self.url = name, f"unix:{self._socket}"
        self.reason = ""
        self._shutdown_s, self._environment = shutdown_s, environment
        self._ready, self._ended = ready, ended
        self._told = False
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start it with `settings`, as in the file of --config. It must not run."""
        self.reason, self._told = "", False
        config = yaml.safe_dump({**settings, "uds": str(self._socket)})
        self._task = asyncio.get_running_loop().create_task(self._run(config))

    async def _run(self, config: str) -> None:
        """Run it to its end, pass its log on, and report."""
        try:
            self._config.write_text(config, encoding="utf-8")
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tokenyard", "serve", "--config", str(self._config)),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            await self._read_log(self._process)
            status = await self._process.wait()
            self.reason = self.reason or f"its process ended with status {status}"
        except OSError as error:
            self.reason = f"its process cannot be started: {error.strerror or error}"
        finally:
            self._process = None
            self._ended()

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        ready = False
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than the limit
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if READY in text and not ready:
                ready = True
                self._ready()
            elif text.startswith("tokenyard: "):
                self.reason = text.removeprefix("tokenyard: ")
            if text and text[0] not in "╭│╰":
                with contextlib.suppress(OSError):
                    print(text if text.startswith("{") else f"{self.name}: {text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Have it end: it stores its KV and exits. It is killed if it does not. Telling it again does nothing: at a
        second signal an engine ends without storing its KV.
        """
        if self._told:
            return
        self._told = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(self._shutdown_s + KILL_AFTER_S, self._kill, self._process)
        elif self._task is not None:
            self._task.cancel()

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            log.warning("the engine of %s did not end in time and is killed", self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def wait(self) -> None:
        """Wait for its end."""
        if self._task is not None:
            await asyncio.wait([self._task])
