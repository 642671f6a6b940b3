"""Breaks a real server under load and reports how every stream ended and whether all pages came back.

The tests run this with few streams, `python -m benchmarks.faults` with many.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.servers import Route, Server, alive

MOCK = ("--executor", "mock", "--log-level", "warning")
IDLE_WITHIN_S = 15.0
READY_WITHIN_S = 300.0
"""Tensor-parallel ranks start one after the other, which takes 8 s of CPU time: of a busy machine much longer."""


@dataclass(slots=True)
class Outcome:
    """What a fault did.

    `ends` counts how streams ended: "done", "error event", a status such as "503", "disconnected" (by us) or "cut"
    (closed with no word, which no client can read). `pages`: "conserved", or what is missing; "" where the server
    ended.
    """

    fault: str
    ends: Counter[str]
    last_end_s: float
    exit_status: int | None = None
    reason: str = ""
    pages: str = ""
    notes: list[str] = field(default_factory=list)


class Stream:
    """One streamed request over a plain socket."""

    def __init__(self, server: Server | Route, tokens: int, prompt: str) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        body["stream_options"] = {"include_usage": True}
        self._body = json.dumps(body).encode()
        self.begun = asyncio.Event()
        self.data = b""

    async def read(self, *, hang_up_after: int | None = None) -> str:
        """Send it, read to the end, and return how it ended; disconnects after so many events if that is given."""
        try:
            reader, writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        except OSError:
            return "no connection"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self._body)}\r\n\r\n".encode()
        whole = head + self._body
        try:
            if hang_up_after is not None and hang_up_after < 0:
                writer.write(whole[: random.Random(hang_up_after).randrange(len(whole))])
                return "disconnected"
            writer.write(whole)
            return await self._events(reader, hang_up_after)
        except ConnectionError:
            return self._verdict()
        finally:
            writer.close()

    async def _events(self, reader: asyncio.StreamReader, hang_up_after: int | None) -> str:
        while data := await reader.read(1 << 16):
            self.data += data
            if b"data: " in self.data or not self.data.startswith(b"HTTP/1.1 200"):
                self.begun.set()
            if self._ended():
                break
            if hang_up_after is not None and self.data.count(b"data: ") >= hang_up_after:
                return "disconnected"
        return self._verdict()

    def _ended(self) -> bool:
        head, blank, body = self.data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200"):
            return body.endswith(b"0\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        return bool(blank) and length is not None and len(body) >= int(length[1])

    def _verdict(self) -> str:
        if b"data: [DONE]" in self.data:
            return "done"
        if b'data: {"error":' in self.data:
            return "error event"
        status = re.match(rb"HTTP/1.1 (\d+)", self.data)
        if status and status[1] != b"200" and b'"error"' in self.data:
            return status[1].decode() + (" + Retry-After" if b"retry-after" in self.data else "")
        return "cut"

    @property
    def text(self) -> str:
        """The whole text of the answer."""
        chunks = re.findall(rb"data: (\{.*\})", self.data)
        return "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])

    @property
    def tokens(self) -> int:
        """Tokens of the answer as its usage counts them; 0 if it did not end."""
        found = re.search(rb'"completion_tokens": ?(\d+)', self.data)
        return int(found[1]) if found else 0


def get(server: Server, path: str, *, method: str = "GET") -> object:
    """JSON of a path."""
    request = urllib.request.Request(server.url + path, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


async def pages_after(server: Server) -> str:
    """ "conserved" if the idle server holds no pages and flushing leaves the pool empty; else what is wrong."""
    end = time.monotonic() + IDLE_WITHIN_S
    while True:
        state = await _sums(server)
        if state["running"] + state["waiting"] + state["in_flight"] + state["used_tokens"] == 0:
            break
        if time.monotonic() > end:
            return f"not idle: {state['running']} running, {state['used_tokens']} tokens used"
        await asyncio.sleep(0.1)
    await asyncio.to_thread(get, server, "/flush_cache", method="POST")
    state = await _sums(server)
    held = state["used_tokens"] + state["cached_tokens"]
    return f"{held} tokens still held after a flush" if held else "conserved"


async def _sums(server: Server) -> Counter[str]:
    """What all ranks hold together."""
    states = (await asyncio.to_thread(get, server, "/server_info"))["internal_states"]  # type: ignore[index]
    names = ("running", "waiting", "in_flight", "used_tokens", "cached_tokens")
    return Counter({name: sum(state[name] for state in states) for name in names})


async def open_all(
    server: Server | Route, streams: int, tokens: int, *, begun: int | None = None
) -> tuple[list[Stream], list["asyncio.Task[str]"]]:
    """Open streams and wait until each had a first answer, or the first `begun` of them."""
    opened = [Stream(server, tokens, f"Story {number}") for number in range(streams)]
    tasks = [asyncio.create_task(stream.read()) for stream in opened]
    await asyncio.wait_for(asyncio.gather(*(stream.begun.wait() for stream in opened[:begun])), 60)
    return opened, tasks


def kill_server(streams: int) -> Outcome:
    """kill -9 of the server's own process while all streams run."""
    room = ("--max-running-requests", str(streams), "--max-total-tokens", str(1024 * streams))
    server = Server(*MOCK, "--mock-step-ms", "30", *room)
    children = server.children()

    async def run() -> tuple[Counter[str], float]:
        _, tasks = await open_all(server, streams, 900)
        os.kill(server.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), 60))
        return ends, time.monotonic() - begin

    try:
        ends, last_s = asyncio.run(run())
        status = server.wait(20)
    finally:
        _kill(server)
    reason = next((line for line in server.log.splitlines() if line.startswith("tokenyard: ")), "")
    outcome = Outcome("kill -9 of the server", ends, last_s, status, reason.removeprefix("tokenyard: "))
    if orphans := _still_alive(children):
        outcome.notes.append(f"{orphans} orphans")
    return outcome


Victims = Callable[[list[Server], Route], list[int]]


def behind_router(streams: int, tokens: int = 100) -> Iterator[Outcome]:
    """kill -9 of each kind of process of a fleet, under as many streams through its router: one of two engines loses a
    scheduler, then its detokenizer, then its server with all that belongs to it; in the end the router goes.
    """
    kinds: dict[str, Victims] = {
        "scheduler behind a router": lambda engines, route: engines[0].children()[:1],
        "detokenizer behind a router": lambda engines, route: engines[0].children()[-1:],
        "engine behind a router": lambda engines, route: _all_of(engines[0]),
        "router": lambda engines, route: [route.process.pid],
    }
    return _kill_in_fleet(streams, tokens, [(), ()], kinds)


def disaggregated(streams: int, tokens: int = 100) -> Iterator[Outcome]:
    """kill -9 of one of two engines that prefill, while some streams have not begun, and of one of two that decode."""
    modes = ("prefill", "prefill", "decode", "decode")
    flags = [("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "tcp") for mode in modes]
    kinds: dict[str, Victims] = {
        "prefill engine behind a router": lambda engines, route: _all_of(engines[0]),
        "decode engine behind a router": lambda engines, route: _all_of(engines[2]),
    }
    return _kill_in_fleet(streams, tokens, flags, kinds, begun=1)


def _all_of(server: Server) -> list[int]:
    return [*server.children(), server.process.pid]


def _kill_in_fleet(
    streams: int, tokens: int, flags: list[tuple[str, ...]], kinds: dict[str, Victims], *, begun: int | None = None
) -> Iterator[Outcome]:
    """An engine with each of `flags` behind a router; each kind of victim in turn, after `begun` streams have begun."""
    room = ("--max-running-requests", str(streams), "--max-total-tokens", str(1024 * streams))
    engines = [Server(*MOCK, "--mock-step-ms", "50", *room, *own) for own in flags]
    route = Route(*(engine.url for engine in engines))

    async def run(victims: Victims, whole: list[str]) -> tuple[Counter[str], float, list[str]]:
        opened, tasks = await open_all(route, streams, tokens, begun=begun)
        for victim in victims(engines, route):
            os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), 120))
        seconds = time.monotonic() - begin
        wrong = sum(not text.startswith(stream.text) for stream, text in zip(opened, whole, strict=True))
        return ends, seconds, [f"{wrong} answers differ"] if wrong else []

    async def undisturbed() -> list[str]:
        opened, tasks = await open_all(route, streams, tokens)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        return [stream.text for stream in opened]

    try:
        whole = asyncio.run(undisturbed())
        for kind, victims in kinds.items():
            ends, seconds, notes = asyncio.run(run(victims, whole))
            pages = asyncio.run(pages_after(engines[-1]))
            yield Outcome(f"kill -9 of the {kind}", ends, seconds, pages=pages, notes=notes)
    finally:
        if route.process.poll() is None:
            route.close()
        for engine in engines:
            _kill(engine)


def kill_below_scheduler(streams: int, kind: str, flags: tuple[str, ...], tokens: int = 60) -> Outcome:
    """kill -9 of the process that a scheduler has started for itself, as `flags` make it do: every stream continues."""

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        unbroken, tasks = await open_all(server, streams, tokens)
        await asyncio.wait_for(asyncio.gather(*tasks), 240)
        opened, tasks = await open_all(server, streams, tokens)
        (victim,) = psutil.Process(server.children()[0]).children()
        victim.kill()
        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), 240))
        wrong = sum(stream.text != other.text for stream, other in zip(opened, unbroken, strict=True))
        return ends, time.monotonic() - begin, [f"{wrong} answers differ"] if wrong else []

    room = ("--max-running-requests", str(streams), "--max-total-tokens", str(256 * streams))
    return _surviving(f"kill -9 of the {kind}", (*flags, *room), work)


def kill_scheduler(streams: int, tokens: int = 100) -> Outcome:
    """kill -9 of the scheduler while all streams run: it is restarted, and they continue."""

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        opened, tasks = await open_all(server, streams, tokens)
        os.kill(server.children()[0], signal.SIGKILL)
        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), 120))
        short = sum(stream.tokens != tokens for stream in opened)
        return ends, time.monotonic() - begin, [f"{short} short"] if short else []

    room = ("--max-running-requests", str(streams), "--max-total-tokens", str(1024 * streams))
    return _surviving("kill -9 of the scheduler", ("--mock-step-ms", "30", *room), work)


def break_detokenizer(
    streams: int, ranks: int = 1, number: signal.Signals = signal.SIGKILL, tokens: int = 60
) -> Outcome:
    """Kill or stop the detokenizer while all streams run: it and all schedulers restart, and the streams continue."""

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        unbroken, tasks = await open_all(server, streams, tokens)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        opened, tasks = await open_all(server, streams, tokens)
        os.kill(server.children()[-1], number)
        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), 120))
        wrong = sum(stream.text != other.text for stream, other in zip(opened, unbroken, strict=True))
        return ends, time.monotonic() - begin, [f"{wrong} answers differ"] if wrong else []

    room = ("--max-running-requests", str(streams * ranks), "--max-total-tokens", str(1024 * streams * ranks))
    flags = ("--dp-size", str(ranks), "--watchdog-timeout-s", "1", "--mock-step-ms", "20", *room)
    return _surviving(f"{number.name} of the detokenizer", flags, work)


def break_ranks(streams: int, ranks: int, signals: tuple[signal.Signals, ...], tokens: int = 60) -> Outcome:
    """Send each rank in turn, under all streams, one of `signals` after the other: SIGKILL ends it, SIGSTOP makes it
    are stalled. It is started again, and every stream goes on as if nothing had been. `last_end_s` is of the slowest.
    """

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        unbroken, tasks = await open_all(server, streams, tokens)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        whole, ends, slowest, notes = [stream.text for stream in unbroken], Counter[str](), 0.0, list[str]()
        for rank in range(ranks):
            for number in signals:
                opened, tasks = await open_all(server, streams, tokens)
                os.kill(_scheduler(server, rank), number)
                begin = time.monotonic()
                ends += Counter(await asyncio.wait_for(asyncio.gather(*tasks), 120))
                slowest = max(slowest, time.monotonic() - begin)
                if wrong := sum(stream.text != text for stream, text in zip(opened, whole, strict=True)):
                    notes.append(f"{wrong} answers differ after {number.name} of rank {rank}")
                server.wait_for(rf"(?s)(rank {rank} runs again.*){{{signals.index(number) + 1}}}")
        return ends, slowest, notes

    room = ("--max-running-requests", str(streams * ranks), "--max-total-tokens", str(1024 * streams * ranks))
    flags = ("--dp-size", str(ranks), "--watchdog-timeout-s", "1", "--mock-step-ms", "20")
    return _surviving(f"signals to each of {ranks} ranks", (*flags, *room), work)


def _scheduler(server: Server, rank: int) -> int:
    """The process id of a rank's scheduler."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return next(pid for pid, title in titles.items() if b"scheduler %d" % rank in title)


def _kill(server: Server) -> None:
    """End a server whatever state it is in."""
    if server.process.poll() is None:
        server.process.kill()
        server.wait()


def _still_alive(pids: list[int], within_s: float = 5.0) -> int:
    """How many processes are still there after a while."""
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return sum(map(alive, pids))


async def _load(server: Server, streams: int, tokens: int) -> tuple[list[Stream], Counter[str], float]:
    """Run all streams to their ends; returns them, how they ended, and the seconds it took."""
    opened = [Stream(server, tokens, f"Story {number}") for number in range(streams)]
    begin = time.monotonic()
    ends = Counter(await asyncio.wait_for(asyncio.gather(*(stream.read() for stream in opened)), 120))
    return opened, ends, time.monotonic() - begin


def _surviving(name: str, flags: tuple[str, ...], work: object) -> Outcome:
    """Run `work(server)` on a server that must survive it, and check its pages and its exit."""
    server = Server(*MOCK, *flags, ready_within_s=READY_WITHIN_S)
    try:
        ends, seconds, notes = asyncio.run(work(server))  # type: ignore[operator]
        pages = asyncio.run(pages_after(server))
        status = server.close()
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _kill(server)
    return Outcome(name, ends, seconds, status, pages=pages, notes=notes)


def disconnects(streams: int, seed: int = 0) -> Outcome:
    """Clients that hang up: in the middle of their request, before the first token, or after some; some stay."""
    draw = random.Random(seed)

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        async def client(number: int) -> str:
            await asyncio.sleep(draw.random())
            after = draw.choice([-1 - number, 0, 1, draw.randrange(2, 40), None])
            return await Stream(server, 60, f"Story {number}").read(hang_up_after=after)

        begin = time.monotonic()
        ends = Counter(await asyncio.wait_for(asyncio.gather(*map(client, range(streams))), 120))
        return ends, time.monotonic() - begin, []

    return _surviving("clients that hang up", ("--mock-step-ms", "10", "--max-running-requests", "64"), work)


def hang_up(streams: int) -> Outcome:
    """All clients hang up at once in the middle of their answers; `last_end_s` is until no KV is held for them."""

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        _, tasks = await open_all(server, streams, 900)
        held = await _used_tokens(server)
        begin = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while await _used_tokens(server) and time.monotonic() < begin + IDLE_WITHIN_S:
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - begin
        return Counter({"disconnected": sum(task.cancelled() for task in tasks)}), seconds, [f"{held} tokens were held"]

    room = ("--max-running-requests", str(streams), "--max-total-tokens", str(1024 * streams))
    return _surviving("all clients hang up at once", ("--mock-step-ms", "30", *room), work)


async def _used_tokens(server: Server) -> int:
    """KV tokens that running requests hold."""
    load = await asyncio.to_thread(get, server, "/v1/loads")
    return int(load["data"][0]["used_tokens"])  # type: ignore[index]


def full_queue(streams: int) -> Outcome:
    """Many more requests at once than may run and wait: an eighth runs, an eighth waits, the rest gets 503."""
    places = max(streams // 8, 1)

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        _, ends, seconds = await _load(server, streams, 30)
        return ends, seconds, [f"{places} run, {places} wait"]

    limits = ("--max-running-requests", str(places), "--max-queued-requests", str(places))
    return _surviving("full queue", ("--mock-step-ms", "20", *limits), work)


def small_pool(streams: int, tokens: int = 100) -> Outcome:
    """A KV pool that holds a few answers of the many that run: requests are retracted and resumed, and none is lost."""

    async def work(server: Server) -> tuple[Counter[str], float, list[str]]:
        opened, ends, seconds = await _load(server, streams, tokens)
        short = sum(stream.tokens != tokens for stream in opened)
        counters = (await asyncio.to_thread(get, server, "/server_info"))["internal_states"][0]["counters"]
        return ends, seconds, [f"{counters['retracted']} retractions", *([f"{short} short"] if short else [])]

    pool = ("--max-total-tokens", "1000", "--max-running-requests", str(streams))
    return _surviving("KV pool of 1,000 tokens", ("--mock-step-ms", "2", *pool), work)
