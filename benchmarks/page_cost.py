"""What does watching a server cost it?

CPU of the API and the scheduler process with the live page's stream closed and open, on an idle server and on one that
streams to 32 clients in turns of both (mock executor, steps of 20 ms), and of `tokenyard top` itself in a terminal. The
page is played by a client that reads `/v1/live` to the end of the window; process CPU times of the kernel.

Run: python -m benchmarks.page_cost [--seconds 6]
"""

import argparse
import os
import pty
import signal
import statistics
import sys
import threading
import time
import urllib.request

from benchmarks.mock_server import AnyServer, cpu_s_of

CLIENTS, TOKENS, TURNS = 32, 100, 3
WARM_EVENTS = 8
TARGET = 1.0


def ask_for_ever(url, stop):
    body = b'{"prompt": "Once upon a time", "max_tokens": %d, "ignore_eos": true, "stream": true}' % TOKENS
    while not stop.is_set():
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=60) as answer:
            while answer.read1(65536):
                pass


class Watching:
    """The page's stream, read in a thread until the block ends."""

    def __init__(self, url):
        self._url, self._stop, self.events = url, False, 0

    def __enter__(self):
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        while self.events < WARM_EVENTS:
            time.sleep(0.05)
        return self

    def _read(self):
        with urllib.request.urlopen(f"{self._url}/v1/live", timeout=30) as answer:
            while not self._stop:
                self.events += answer.readline().startswith(b"data: ")

    def __exit__(self, *_):
        self._stop = True
        self._thread.join()


def used(server, seconds):
    """Per cent of a core that the API and the scheduler process take."""
    begin = {name: server.cpu_s(name) for name in ("api", "scheduler")}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begin[1]
    return {name: 100 * (server.cpu_s(name) - begin[0][name]) / took for name in begin[0]}


def top_used(url, seconds):
    """Per cent of a core that `tokenyard top` takes in a terminal, once it runs."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="160", LINES="50", TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "tokenyard", "top", "--url", url])
    reader = threading.Thread(target=drain, args=(terminal,), daemon=True)
    reader.start()
    time.sleep(3.0)
    before, begin = cpu_s_of(pid), time.monotonic()
    time.sleep(seconds)
    share = 100 * (cpu_s_of(pid) - before) / (time.monotonic() - begin)
    os.kill(pid, signal.SIGINT)
    os.waitpid(pid, 0)
    return share


def drain(terminal):
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        return


def tell(what, closed, opened):
    for name in closed[0]:
        shut, seen = (statistics.mean(one[name] for one in rows) for rows in (closed, opened))
        print(f"{what}, {name}: {shut:.2f} % closed, {seen:.2f} % open, {seen - shut:+.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window")
    seconds = parser.parse_args().seconds
    server, stop = AnyServer("--executor", "mock", "--mock-step-ms", "20"), threading.Event()
    with server as (host, port):
        url = f"http://{host}:{port}"
        time.sleep(1.0)
        closed = [used(server, seconds)]
        with Watching(url) as page:
            opened = [used(server, seconds)]
        print(f"{page.events} events")
        tell("idle", closed, opened)
        print(f"idle, tokenyard top: {top_used(url, seconds):.2f} % (target {TARGET:g})")
        clients = [threading.Thread(target=ask_for_ever, args=(url, stop)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        closed, opened = [], []
        for _ in range(TURNS):
            closed.append(used(server, seconds))
            with Watching(url):
                opened.append(used(server, seconds))
        tell(f"{CLIENTS} streams", closed, opened)
        print(f"{CLIENTS} streams, tokenyard top: {top_used(url, seconds):.2f} % (target {TARGET:g})")
        stop.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main()
