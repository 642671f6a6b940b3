"""Servers for benchmarks, most of them on the mock executor, and clients on plain sockets that cost little."""

import asyncio
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

STEP_MS = 10.0
OPEN_FILES = 8192
CALL_S = 30
FINISHED_AT = re.compile(rb'"finished_at":([\d.]+)')
TOKENS_MARK = b'"completion_tokens":'


class AnyServer:
    """`tokenyard serve` with the given flags on a free port, ended with the block, which gets (host, port)."""

    def __init__(self, *flags):
        base = [sys.executable, "-m", "tokenyard", "serve", "--port", "0", "--log-level", "error"]
        allow_many_sockets()
        environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self._process = subprocess.Popen([*base, *flags], stderr=subprocess.PIPE, text=True, env=environment)

    def cpu_s(self, name):
        """CPU seconds so far of the process called `name`: api, scheduler, detokenizer."""
        if name == "api":
            return cpu_s_of(self._process.pid)
        for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return cpu_s_of(pid)
        raise LookupError(f"the server has no {name} process")

    def __enter__(self):
        said = []
        for line in self._process.stderr:
            said.append(line)
            match = re.search(r"ready at http://([\d.]+):(\d+)", line)
            if match:
                # A server whose output is not read stalls once the pipe is full.
                rest = self._process.stderr, sys.stderr
                threading.Thread(target=shutil.copyfileobj, args=rest, daemon=True).start()
                return match[1], int(match[2])
        sys.exit(f"the server did not start: {self._process.args}\n{''.join(said)}")

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()


def cpu_s_of(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Server(AnyServer):
    """The same on the mock executor with steps of `STEP_MS` and room for 256 requests."""

    def __init__(self, *flags):
        mock = ["--executor", "mock", "--mock-step-ms", str(STEP_MS), "--context-length", "8192"]
        super().__init__(*mock, "--max-running-requests", "256", "--max-total-tokens", "1m", *flags)


def allow_many_sockets():
    """Here and in processes started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def call(address, path, body=None):
    """The JSON that a path answers; a POST if there is a body. Ends the benchmark if it is an error."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", data, timeout=CALL_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.code} {error.read().decode()}")


def snapshot(address):
    return call(address, "/server_info")["internal_states"][0]


def steps_done(address):
    return snapshot(address)["counters"]["steps"]


async def open_completion(address, tokens, prompt, **fields):
    """A stream of /v1/completions, whose chunks hold the new text only (those of /generate hold all of it)."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    data = json.dumps(body).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


class Counter:
    """Tokens received by all clients so far."""

    tokens = 0


def tokens_so_far(tail, before):
    """What the last whole chunk in `tail` says; a chunk may carry several tokens, or the end of one in pieces."""
    place = tail.rfind(TOKENS_MARK)
    match = re.match(rb"\d+(?=\D)", tail[place + len(TOKENS_MARK) :]) if place >= 0 else None
    return int(match[0]) if match else before


async def read_all(stream, counter):
    reader, writer = stream
    tail, tokens = b"", 0
    try:
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-2000:]
            before, tokens = tokens, tokens_so_far(tail, tokens)
            counter.tokens += tokens - before
            if b"[DONE]" in tail:
                break
    finally:
        writer.close()
    return tail


async def one_lag(address, counter, tokens, prompt, **fields):
    """Milliseconds from the commit of a stream's last token to the client; see `lag_ms`."""
    stream = await open_completion(address, tokens, prompt, return_x_sched=True, **fields)
    return lag_ms(await read_all(stream, counter))


def lag_ms(tail):
    """Milliseconds until now from the commit of a stream's last token, which its end names (on this machine's clock).

    Raises RuntimeError for anything but an answer.
    """
    now, finished = time.time(), FINISHED_AT.findall(tail)
    if not finished:
        raise RuntimeError(f"no answer but {tail[-500:]!r}")
    return 1000 * (now - float(finished[-1]))
