"""A world: routers, engines and clients, and the faults of one seed."""

import asyncio
import contextvars
import functools
import logging
import random
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.world import batch, client, ranks, sockets, threads, valkey, zeromq
from tests.world.census import census, growth, shared_tables
from tests.world.clock import NS, Clock, installed
from tests.world.disk import Disks
from tests.world.engine import ADAPTERS, MODEL, PORT, WEIGHTS, Engine, weights_folder
from tests.world.foreign import ForeignEngine
from tests.world.lockstep import LockstepThread, Preemption, running
from tests.world.loop import WorldLoop, current
from tests.world.network import KEEPALIVE_S, FakeSocket, Network, Process
from tests.world.ranks import Ranks
from tests.world.sockets import Sockets
from tests.world.valkey import ValkeyHost
from tokenyard.base import DeviceLostError
from tokenyard.base.blocks import block_digests
from tokenyard.batch import batch_store, file_store
from tokenyard.batch.batch_api import BatchApi
from tokenyard.cli.route import make_tokenize
from tokenyard.engine.scheduler_process import scheduler_loop
from tokenyard.engine.scheduler_process.attachments import kv_store
from tokenyard.engine.scheduler_process.attachments.disagg import DisaggConnector
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.executor.mock import MockExecutor
from tokenyard.kv_store import slab
from tokenyard.router import batches as router_batches
from tokenyard.router import process as router_process
from tokenyard.router.proxy import Router
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.workers import PREFILL
from tokenyard.server.openai import batches

ROUTER_PORT = 8000
EVENTS_PORT, REPLAY_PORT = 5557, 5657
SETTLE_S = 240.0
"""Virtual seconds after the last fault in which everything must end."""

BROKEN_DEVICE, SLOW_STEP_S = "the device of a world breaks", 0.2
COUNTED_AGAIN_S = 10.0
HEARD_S = 5.0
"""In which a router hears of what an engine has cached."""


@dataclass(frozen=True)
class Fault:
    """What happens at a time, for some seconds, to a host."""

    at_s: float
    kind: str
    target: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:.2f} s: {self.kind} {self.target} for {self.seconds:.2f} s"


@dataclass
class Story:
    """All that makes a world besides the seed of its small choices: it can be cut down to what matters."""

    seed: int
    engines: int
    routers: int
    ranks: int
    asks: list[client.Ask]
    faults: list[Fault]
    settings: dict[str, Any] = field(default_factory=dict)
    foreign: int = 0
    batches: list[batch.BatchAsk] = field(default_factory=list)
    valkey: bool = False
    """Whether there is one, which routers share their choices through."""
    disagg: str = ""
    """PD: `both`, all engines compute prompts for each other; else the last engine does for the others. `ask`: they
    find it themselves. `split`: routers send it a half of each request."""
    kv_events: str = ""
    """`events`: engines publish what their prefix caches hold, and routers follow; `replay`: and ask for what they
    missed."""
    tp_size: int = 0
    """Ranks of the model of each scheduler; 0 where that is the mock."""
    preempted: bool = False
    """Whether threads also lose the processor between the lines of code that they share."""
    device: dict[str, int] = field(default_factory=dict)
    """What the model of all engines has: recurrent states, in options of the mock executor."""
    hours: float = 0.0
    """How long it runs, where tables are counted after each hour; 0 where they are not."""

    def settings_of(self, place: int) -> dict[str, Any]:
        """The settings of one engine."""
        settings = dict(self.settings)
        if self.kv_events:
            settings |= {"enable_kv_events": True, "kv_events_endpoint": f"tcp://*:{EVENTS_PORT}"}
        if self.kv_events == "replay":
            settings |= {"kv_events_replay_endpoint": f"tcp://*:{REPLAY_PORT}"}
        if not self.disagg:
            return settings
        urls = [f"http://engine{i}:{PORT}" for i in range(self.engines)]
        found = settings | {"disaggregation_transfer_backend": "tcp", "disaggregation_secret": "secret"}
        if self.disagg == "both":
            return found | {"disaggregation_mode": "both", "prefill_engines": urls[:place] + urls[place + 1 :]}
        if place == self.engines - 1:
            return found | {"disaggregation_mode": "prefill"}
        return found | {"disaggregation_mode": "decode", "prefill_engines": urls[-1:] * (self.disagg == "ask")}

    def __str__(self) -> str:
        shape = (
            (
                f"seed {self.seed}: {self.engines} engines of {self.ranks} ranks, {self.routers} routers, "
                f"{self.foreign} foreign engines, {self.settings}"
            )
            + (f", PD {self.disagg}" if self.disagg else "")
            + ", a Valkey" * self.valkey
            + f", KV events: {self.kv_events}" * bool(self.kv_events)
            + f", {self.tp_size} tensor-parallel ranks" * bool(self.tp_size)
            + ", threads that lose the processor" * self.preempted
            + f", recurrent states: {self.device}" * bool(self.device)
        )
        asked = [*map(str, self.asks[:4]), *map(str, self.batches)]
        return "\n".join([shape, f"{len(self.asks)} requests:", *asked, *map(str, self.faults)])


@dataclass
class Outcome:
    """What clients saw, and what is wrong with it."""

    seen: list[client.Seen]
    violations: list[str]
    seconds: float
    lost: int
    digest: int
    done: Counter[str] = field(default_factory=Counter)
    """How often what joins came to something, by the counters of engines that live at the end."""
    tables: dict[str, list[Counter[str]]] = field(default_factory=dict)
    """What hosts that lived to the end held after each hour of a long world."""


class _Alarms(logging.Handler):
    """Keeps what the product logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.lines.append(text)


@functools.cache
def shared_tokenize(folder: str) -> Any:
    """What tokenizes prompts for routers, read once for all worlds."""
    return make_tokenize(folder)


class RouterHost:
    """One router process."""

    def __init__(self, world: "World", name: str, settings: RouterSettings) -> None:
        self.world, self.name, self.settings = world, name, replace(settings, host=name)
        self.disk = world.disks.add(name) if settings.file_storage_path else None
        if self.disk is not None:
            self.settings = replace(self.settings, file_storage_path=str(self.disk.folder / "files"))
        self.process: Process | None = None
        self.router: Router | None = None

    def start(self) -> None:
        """Start it."""
        self.process = Process(self.name)
        self.world.spawn(self.process, self._run)

    async def _run(self) -> None:
        host = self

        class Watched(Router):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                host.router = self

        listener = FakeSocket(self.name, ROUTER_PORT)
        tokenize = shared_tokenize(self.settings.tokenizer) if self.settings.tokenizer else None
        await router_process.run(self.settings, listener, tokenize, announce="", make_router=Watched)  # type: ignore[arg-type]
        self.world.exited(self)

    def kill(self, *, host: bool = False) -> None:
        """kill -9."""
        assert self.process is not None
        self.world.network.kill(self.process, host=host)
        self.world.disks.crash(self.name, power=host)

    def tables(self) -> list[Any]:
        """Where what it keeps begins."""
        return [self.router]

    def left_over(self) -> list[str]:
        """What it still holds."""
        router = self.router
        if router is None:
            return []
        found = [f"{self.name} has {len(router.exchanges)} open exchanges"] if router.exchanges else []
        held = sum(target.state.requests for worker in router.workers for target in worker.targets)
        return found + ([f"{self.name} counts {held} requests at workers"] if held else [])


class World:
    """Runs one story."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(story.seed))
        self.loop = WorldLoop(self.clock, self.network)
        self.network.loop = self.loop
        if story.preempted:
            self.loop.preemption = Preemption(random.Random(story.seed + 3))
        self.clock.sleep = self._sleep
        self.threads: list[LockstepThread] = []
        self.contexts: dict[Process, contextvars.Context] = {}
        self._no_process = contextvars.Context()
        self.seen: list[client.Seen] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.excused: dict[str, list[tuple[float, float]]] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="world-")
        self.disks = Disks(self.clock, self.network.rng, Path(self.folder.name))
        self.sockets = Sockets(self)
        self.connectors: dict[Process, DisaggConnector | None] = {}
        """What moves KV between engines, by scheduler."""
        self.kv_stores: dict[Process, KvStoreConnector | None] = {}
        self.executors: dict[Process, Any] = {}
        self.ranks = Ranks(self)
        self.engines = [
            Engine(self, f"engine{i}", story.device, story.tp_size, dp_size=story.ranks, **story.settings_of(i))
            for i in range(story.engines)
        ]
        foreign = random.Random(story.seed + 1)
        self.foreign = [ForeignEngine(self, f"foreign{i}", foreign) for i in range(story.foreign)]
        asked = self.engines[:-1] if story.disagg == "ask" else self.engines
        urls = tuple(engine.url for engine in [*asked, *self.foreign])
        self.stores = [ValkeyHost(self, "valkey")] * story.valkey
        shared = f"redis://valkey:{valkey.PORT}" if story.valkey else ""
        router = RouterSettings(worker_urls=urls, seed=story.seed, log_level="warning", shared_url=shared)
        if story.kv_events:
            router = replace(router, kv_events=f"tcp://{{host}}:{EVENTS_PORT}", tokenizer=MODEL)
        if story.kv_events == "replay":
            router = replace(router, kv_events_replay=f"tcp://{{host}}:{REPLAY_PORT}")
        files = {ask.host for ask in story.batches}
        self.routers = [
            RouterHost(self, name, replace(router, file_storage_path="files" if name in files else ""))
            for name in (f"router{i}" for i in range(story.routers))
        ]
        self.tables: dict[str, list[Counter[str]]] = {}

    def _sleep(self, seconds: float) -> None:
        thread = running.get()
        assert thread is not None, f"time.sleep({seconds}) on the event loop"
        thread.wait_until(self.clock.now_ns + round(seconds * NS), wakes_early=False)

    def spawn(self, process: Process, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the main coroutine of a process."""
        context = self.contexts[process] = contextvars.Context()
        context.run(current.set, process)
        context.run(lambda: self.loop.create_task(main(), context=context))

    def call_in(self, process: Process, callback: Callable[..., Any], *args: Any) -> None:
        """Call something within a process, if it lives."""
        self.loop.call_soon(callback, *args, context=self.contexts[process])

    def outside(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call something later, whichever processes live then."""
        self.loop.call_later(seconds, callback, *args, context=self._no_process)

    def exited(self, host: Any) -> None:
        """A process has ended by itself: the rest of it goes, and it is started again (as by Kubernetes)."""
        host.kill()
        self.loop.call_later(1.0, host.start, context=contextvars.Context())

    def hosts(self) -> list[Any]:
        """All of the fleet."""
        return [*self.stores, *self.engines, *self.foreign, *self.routers]

    # Faults.

    def apply(self, fault: Fault) -> None:
        """Make a fault happen, and end after its time."""
        host = next(host for host in self.hosts() if host.name == fault.target)
        if host.process is None or not host.process.alive:
            return
        # A router that drains ends when its last answer has.
        until = fault.at_s + (60.0 if fault.kind == "drain" else fault.seconds)
        self.excused.setdefault(fault.target, []).append((fault.at_s, until))
        later = lambda function, *args: self.loop.call_later(fault.seconds, function, *args)  # noqa: E731
        match fault.kind:
            case "kill" | "power":
                host.kill(host=fault.kind == "power")
                later(host.start)
            case "kill scheduler":
                live = list(host.schedulers.values())
                if live and host.manager is not None:
                    host.kill_scheduler(live[0])
            case "stop":
                host.stop()
                later(host.resume)
            case "partition":
                for other in self._beside(host):
                    self.network.block(other.name, fault.target)
                later(self.network.heal)
            case "half-open":
                for other in self._beside(host):
                    self.network.block(fault.target, other.name, both=False)
                later(self.network.heal)
            case "cut off":
                for engine in self.engines:
                    self.network.block(engine.name, fault.target, both=fault.seconds < 6)
                later(self.network.heal)
            case "wire bits":
                self.network.flips[fault.target] = 0.03
                later(self.network.flips.pop, fault.target, None)
            case "slow":
                self.network.slow[fault.target] = 0.3
                later(self.network.slow.pop, fault.target, None)
            case "device lost" | "step fails" | "device slow":
                for executor in [self.executors.get(scheduler.process) for scheduler in host.schedulers.values()][:1]:
                    if executor is not None:
                        _break_device(executor, fault.kind)
                        later(executor.__dict__.pop, "collect", None)
            case "rank killed" | "rank stopped" | "rank slow":
                for rank in host.ranks()[-1:]:
                    if fault.kind == "rank killed":
                        rank.kill()
                    elif fault.kind == "rank stopped":
                        rank.process.stop()
                        later(self.loop.resume, rank.process)
                    else:
                        rank.slow_s = SLOW_STEP_S
                        later(setattr, rank, "slow_s", 0.0)
            case "disk full" | "disk slow" | "disk broken" | "bit flips" if host.disk is None:
                pass
            case "disk full":
                host.disk.full = True
                later(setattr, host.disk, "full", False)
            case "disk slow":
                host.disk.slow_s = fault.seconds / 20
                later(setattr, host.disk, "slow_s", 0.0)
            case "disk broken":
                host.disk.broken = True
                later(setattr, host.disk, "broken", False)
            case "bit flips":
                self.disks.flip(host.name)
            case "wall clock":
                self.clock.wall_offset_ns += round((fault.seconds - 6) * 1000 * NS)
            case "flush":
                self._order(host, "/flush_cache", {})
            case "policy":
                self._order(host, "/v1/scheduler", {"policy": "lpm" if fault.seconds < 6 else "hits-first"})
            case "pause":
                self._order(host, "/pause_generation", {"mode": "retract" if fault.seconds < 6 else "in_place"})
                later(self._order, host, "/continue_generation", {})
            case "weights":
                self._order(
                    host, "/update_weights_from_disk", {"model_path": weights_folder(WEIGHTS[fault.seconds < 6])}
                )
            case "rolling upgrade":
                for place, engine in enumerate(self.engines):
                    self.loop.call_later(place * fault.seconds, self._drain_if_alive, engine)
            case "drain":
                host.drain() if isinstance(host, Engine) else host.process.signals[15]()
            case _:
                raise AssertionError(fault.kind)

    def _beside(self, host: Any) -> list[Any]:
        """From whom a partition cuts a host off: an engine from the routers, a store from all."""
        return [*self.routers, *self.engines] if host in self.stores else self.routers

    @staticmethod
    def _drain_if_alive(engine: Engine) -> None:
        if engine.process is not None and engine.process.alive:
            engine.drain()

    def _order(self, host: Any, path: str, body: dict[str, Any]) -> None:
        """An operator calls a control route."""
        context = contextvars.copy_context()
        context.run(current.set, Process("operator"))
        self.loop.create_task(client.post((host.name, PORT), path, body), context=context)

    # The run.

    def run(self) -> Outcome:
        """Run to the end, and judge."""
        alarms, root = _Alarms(), logging.getLogger("tokenyard")
        levels = root.level, root.propagate, logging.getLogger("asyncio").level
        root.addHandler(alarms)
        root.propagate = False
        # What uvicorn says of handlers that are closed at the end of the world.
        logging.getLogger("uvicorn.error").disabled = True
        asyncio.set_event_loop(self.loop)
        try:
            with installed(self.clock, self._patches()):
                found = self.loop.run_until_complete(self._main())
                begun = self.clock.now_ns
                # Requests of processes that died are closed with the world, and log that.
                logged = list(alarms.lines)
                self._end()
        finally:
            root.removeHandler(alarms)
            root.propagate = levels[1]
            asyncio.set_event_loop(None)
            self.folder.cleanup()
        found += [f"logged: {line}" for line in logged if not _harmless(line)]
        found += [f"loop: {line}" for line in self.loop.failures]
        found += [f"scheduler: {thread.error!r}" for thread in self.threads if thread.error is not None]
        for seen in self.seen:
            found += client.violations(seen)
        lost = sum(seen.end not in ("done", "left") for seen in self.seen)
        trace = tuple((seen.ask.number, seen.end, round(seen.ended_s, 9), seen.token_count) for seen in self.seen)
        digest = zlib.crc32(repr((trace, self.network.segments)).encode())
        return Outcome(self.seen, found, begun / NS, lost, digest, self.done, self.tables)

    def _patches(self) -> dict[tuple[Any, str], Any]:
        patches = threads.patches(self) | sockets.patches(self) | zeromq.patches(self) | ranks.patches(self)
        # Its clock is an argument, whose default is the real one.
        for module in (batches, router_batches):
            patches[module, "BatchApi"] = partial(BatchApi, clock=lambda: time.time())
        opening = {"open_disagg_connector": self.connectors, "open_kv_store_connector": self.kv_stores}
        for name, opened in (opening | {"load_executor": self.executors}).items():
            patches[scheduler_loop, name] = partial(self._open, getattr(scheduler_loop, name), opened)
        patches |= {(module, "os"): self.disks for module in (batch_store, file_store)}
        return patches | {(kv_store, "Inbox"): patches[kv_store, "queue"].SimpleQueue, (slab, "os"): self.disks}

    @staticmethod
    def _open(function: Callable[..., Any], opened: dict[Process, Any], *given: Any) -> Any:
        """Open what a scheduler process opens, and keep it for questions at the end."""
        process = current.get()
        assert process is not None
        found = opened[process] = function(*given)
        return found

    def _end(self) -> None:
        for host in self.hosts():
            if host.process is not None and host.process.alive:
                host.kill()
        self.loop.end()

    async def _main(self) -> list[str]:
        for host in self.hosts():
            host.start()
        await self._ready()
        begin = self.loop.time()
        hours = self.loop.create_task(self._count_tables(begin))
        for fault in self.story.faults:
            self.loop.call_at(begin + fault.at_s, self.apply, fault)
        clients = [self.loop.create_task(self._client(ask, begin)) for ask in self.story.asks]
        clients += [self.loop.create_task(self._batch(ask, begin)) for ask in self.story.batches]
        last = max([fault.at_s + fault.seconds for fault in self.story.faults] + [ask.at_s for ask in self.story.asks])
        ended, pending = await asyncio.wait(clients, timeout=last + SETTLE_S)
        for task in ended:
            task.result()
        found = [f"request {seen.ask.number} has not ended" for seen in self.seen if not seen.end] + self.wrong
        found += ["a batch has not ended"] * sum(task in pending for task in clients[len(self.story.asks) :])
        for task in pending:
            task.cancel()
        await asyncio.sleep(15.0)
        hours.cancel()
        for host in self.hosts():
            if host.process is not None and host.process.alive:
                found += host.left_over()
        found += self.ranks.left_over()
        if self.story.kv_events:
            found += await self._unheard()
        return found + self._unexcused(begin) + self._grown()

    async def _unheard(self) -> list[str]:
        """Routers that do not hear of what engines cache now, after all that has happened."""
        heard, found = 0, []
        await asyncio.sleep(KEEPALIVE_S)  # until then a connection to a machine without power may be believed in
        context = contextvars.copy_context()
        context.run(current.set, Process("operator"))
        for place, engine in enumerate(self.engines):
            if engine.settings.disaggregation_mode == PREFILL or engine.process is None or not engine.process.alive:
                continue
            # No other prompt begins with it: of a page that was cached before a router followed, it cannot hear.
            prompt = [200 + place] * 130
            digests = block_digests(np.array(prompt, np.int32))
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            asked = client.post((engine.name, PORT), "/v1/completions", body)
            if await self.loop.create_task(asked, context=context) != 200:
                continue
            await asyncio.sleep(HEARD_S)
            for host in self.routers:
                for worker in host.router.workers if host.router is not None else ():
                    names = [target.state.name for target in worker.targets]
                    if str(worker.url) != engine.url:
                        continue
                    if any(host.router.index.match(name, digests) for name in names):
                        heard += 1
                    else:
                        found.append(f"{host.name} has not heard of what {engine.name} has cached")
        self.done["caches heard of by routers"] += heard
        return found

    async def _count_tables(self, begin: float) -> None:
        """Count what the hosts hold that have lived since the beginning, after each hour of a long world."""
        first = {host.name: self._processes_of(host) for host in (*self.engines, *self.routers)}
        for hour in range(1, int(self.story.hours) + 1):
            counts = []
            for before_s in (2 * COUNTED_AGAIN_S, COUNTED_AGAIN_S, 0):
                await asyncio.sleep(begin + 3600 * hour - before_s - self.loop.time())
                counts.append(self._census(first))
            for name in counts[-1]:  # the least of three: requests that are open at the time do not count
                tables = functools.reduce(Counter.__and__, (count[name] for count in counts))
                self.tables.setdefault(name, []).append(tables)

    def _census(self, first: dict[str, set[Process]]) -> dict[str, Counter[str]]:
        """What hosts hold whose processes are still the first ones, and what modules hold."""
        found = {"all processes": shared_tables()}
        for host in (*self.engines, *self.routers):
            processes = self._processes_of(host)
            if processes == first[host.name]:
                roots = [task for task, process in self.loop.tasks.items() if process in processes]
                found[host.name], beyond = census([*roots, *host.tables()])
                self.wrong += [f"{host.name}: {line}" for line in beyond]
        return found

    @staticmethod
    def _processes_of(host: Any) -> set[Process]:
        return {host.process} | {scheduler.process for scheduler in getattr(host, "schedulers", {}).values()}

    def _grown(self) -> list[str]:
        """Tables of processes that live since the beginning that have grown between the first hour and the last."""
        self.tables = {name: hours for name, hours in self.tables.items() if len(hours) == int(self.story.hours)}
        if self.story.hours and not self.tables:
            return ["nothing was counted in the last hour"]
        return [f"{name}: {line}" for name, hours in self.tables.items() for line in growth(hours)]

    async def _ready(self) -> None:
        async with asyncio.timeout(60):
            while not all(
                host.router is not None and all(worker.healthy for worker in host.router.workers)
                for host in self.routers
            ):
                await asyncio.sleep(0.1)

    async def _client(self, ask: client.Ask, begin: float) -> None:
        await asyncio.sleep(begin + ask.at_s - self.loop.time())
        seen = client.Seen(ask)
        self.seen.append(seen)
        process = Process(f"client{ask.number}")
        context = contextvars.copy_context()
        context.run(current.set, process)
        address = f"router{ask.router}", ROUTER_PORT
        await self.loop.create_task(client.run(ask, seen, address), context=context)
        seen.ended_s = self.loop.time() - begin
        if ask.closes:
            await self.loop.create_task(
                client.post(address, "/close_session", {"session_id": ask.session}), context=context
            )

    async def _batch(self, ask: batch.BatchAsk, begin: float) -> None:
        await asyncio.sleep(begin + ask.at_s - self.loop.time())
        context = contextvars.copy_context()
        context.run(current.set, Process(f"batches{ask.number}"))
        address = ask.host, ROUTER_PORT if ask.host.startswith("router") else PORT
        found = await self.loop.create_task(batch.run(ask, address), context=context)
        self.done["lines of batches"] += len(ask.lines)
        self.wrong += [f"batch {ask.number}: {text}" for text in found]

    def _unexcused(self, begin: float) -> list[str]:
        """Answers that were lost although nothing happened that may lose one: only a fault of their own router may."""
        found = []
        for seen in self.seen:
            if seen.end in ("done", "left", ""):
                continue
            if self.foreign and (seen.end.startswith("502 worker_failed") or client.PASSED_ON in seen.end):
                continue  # engines that fail all the time use up the budget of retries
            if self.foreign and seen.end.startswith("503 draining"):
                continue  # what is passed on then may be the refusal of an engine that shuts down
            router = f"router{seen.ask.router}"
            hit = any(at <= seen.ended_s and seen.ask.at_s <= until + 10 for at, until in self.excused.get(router, []))
            if not hit:
                found.append(f"request {seen.ask.number} was lost: {seen.end} after {seen.token_count} tokens")
        return found


def _break_device(executor: Any, kind: str) -> None:
    """Have the next step fail, or lose the device with it, or have each step take longer."""
    collect = executor.collect
    error = DeviceLostError(BROKEN_DEVICE) if kind == "device lost" else RuntimeError(BROKEN_DEVICE)
    owner, name = (executor, "launch") if isinstance(executor, MockExecutor) else (executor.model, "step")

    def fail(given: Any) -> None:
        delattr(owner, name)
        raise error

    def collect_late(ticket: Any) -> Any:
        time.sleep(SLOW_STEP_S)
        return collect(ticket)

    if kind == "device slow":
        executor.collect = collect_late
    else:
        setattr(owner, name, fail)


def _harmless(line: str) -> bool:
    """Errors that say what a fault did, not that something is wrong."""
    return any(
        part in line
        for part in (
            "scheduler ended",
            "was killed",
            "not changed: the scheduler is being started",
            BROKEN_DEVICE,
            "is stalled",
            "cannot begin; it is tried again",  # a batch, while its disk is full or broken
        )
    )


CONTEXT_LENGTH = 512
WORDS = ("once", "upon", "time", "girl", "who", "found", "an", "old", "yard", "of", "trains", "and", "a", "bird")


def _later_turns(first: client.Ask, rng: random.Random, number: int) -> list[client.Ask]:
    """More turns of a session: each repeats the last prompt and its answer, and adds to them."""
    first.session, turns, last = f"session-{number}", [], first
    for _ in range(rng.randint(1, 4)):
        prompt = last.prompt + client.answer_of(last) + [rng.randrange(3, 200) for _ in range(rng.randint(1, 30))]
        if len(prompt) + last.tokens > CONTEXT_LENGTH:
            break
        at_s, router = last.at_s + rng.uniform(0.5, 8), rng.choice((last.router, first.router))
        last = replace(last, number=number + len(turns), at_s=at_s, prompt=prompt, router=router)
        turns.append(last)
    last.closes = rng.random() < 0.5
    return turns


def make_story(seed: int, hours: float = 0.0, rate: float = 4.0) -> Story:
    """Draw a world: 30 to 60 seconds, some five requests a second, at least five faults, one engine left alone.

    hours: how long a long one is, whose first router is left alone too.
    rate: requests a second, without the later turns of sessions.
    """
    rng = random.Random(seed)
    divided = random.Random(f"{seed} tensor parallel")
    tp_size = divided.choice((2, 2, 3)) if divided.random() < 0.2 else 0
    engines, routers, seconds = rng.randint(2, 4), rng.randint(1, 3), rng.uniform(30, 60)
    seconds, more = (3600 * hours, 1 + round(10 * hours)) if hours else (seconds, 1)
    shared = [[rng.randrange(3, 200) for _ in range(rng.choice((8, 60, 150, 300)))] for _ in range(6)]
    adapters = ("", "", *ADAPTERS) if rng.random() < 0.3 and not tp_size else ("",)
    weights = ("", *map(weights_folder, WEIGHTS)) if rng.random() < 0.2 else ("",)
    asks: list[client.Ask] = []
    at = 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        prompt = rng.choice(shared)[: rng.randint(4, 300)] + [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))]
        tokens = rng.choice((1, 4, 12, 30, 80))
        ask = client.Ask(
            len(asks),
            at,
            prompt,
            tokens,
            stream=rng.random() < 0.85,
            leaves_after=rng.randrange(tokens) if rng.random() < 0.1 else None,
            slow_s=rng.choice((0.0, 0.0, 0.0, 0.05)),
            router=rng.randrange(routers),
            chat=" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30))) if rng.random() < 0.3 else "",
            n=rng.choice((1,) * 9 + (3,)),
            priority=rng.choice((0, 0, 0, 1, 5)),
            adapter=rng.choice(adapters),
            regex=f"[a-z ]{{1,{rng.randint(1, 40)}}}" if rng.random() < 0.1 and not tp_size else "",
            weights=weights,
            divided=tp_size > 0,
        )
        asks.append(ask)
        if not ask.chat and rng.random() < 0.1:
            asks += _later_turns(ask, rng, len(asks))
    asks.sort(key=lambda ask: ask.at_s)
    spared = rng.randrange(engines)
    harmed = [f"engine{i}" for i in range(engines) if i != spared]
    kinds = (
        "kill",
        "power",
        "kill scheduler",
        "stop",
        "partition",
        "half-open",
        "slow",
        "drain",
        "rolling upgrade",
        "flush",
        "policy",
        "pause",
        "wall clock",
    )
    if len(weights) > 1:
        kinds += ("weights",) * 4
    if hours:  # An upgrade ends all engines, and with them the tables that are counted.
        kinds = tuple(kind for kind in kinds if kind != "rolling upgrade")
    stores = rng.random() < 0.4
    if stores:
        kinds += ("disk full", "disk slow", "disk broken", "bit flips", "kill", "power", "flush")
    faults = [
        Fault(rng.uniform(1, seconds), rng.choice(kinds), rng.choice(harmed), rng.uniform(0.2, 12))
        for _ in range(rng.randint(5, 9) * more)
    ]
    if routers > 1 and rng.random() < 0.5:
        for _ in range(more):
            kind = rng.choice(("kill", "drain"))
            faults.append(Fault(rng.uniform(1, seconds), kind, "router1", rng.uniform(0.2, 5)))
    settings = {
        "page_size": rng.choice((1, 4, 16)),
        "max_total_tokens": rng.choice((1024, 2048, 8192)),
        "mock_step_ms": rng.choice((20.0, 60.0)),
        "chunked_prefill_size": rng.choice((32, 128, 2048)),
        "enable_mixed_chunk": rng.random() < 0.5,
        "schedule_policy": rng.choice(("fcfs", "lpm", "hrrn", "mlfq")),
        "disable_overlap_schedule": rng.random() < 0.3,
        "enable_priority_scheduling": rng.random() < 0.3,
    }
    if len(adapters) > 1:
        settings |= {"enable_lora": True, "max_loaded_loras": rng.choice((3, 8)), "max_loras_per_batch": 2}
    if stores:
        settings |= {"enable_hierarchical_cache": True, "hicache_storage_gb": rng.choice((0.0002, 0.01))}
    if rng.random() < 0.3 and not tp_size:
        settings |= {"speculative_algorithm": "NGRAM", "mock_draft_acceptance": rng.choice((0.2, 0.8))}
    foreign = 1 if rng.random() < 0.25 else 0
    ranks = rng.choice((1, 1, 2))
    # What joined later draws for itself, so that it leaves the rest of a seed's world as it was.
    rng = random.Random(f"{seed} PD")
    disagg = rng.choice(("",) * 4 + ("both", "ask", "split"))
    if disagg:
        settings |= {"disaggregation_lease_s": rng.choice((2.0, 8.0))}
        at_s, seconds_each = lambda: rng.uniform(1, seconds), lambda: rng.uniform(0.2, 12)
        spared = min(spared, engines - 2) if disagg != "both" else spared
        harmed = [f"engine{i}" for i in range(engines) if i != spared]
        kinds = ("cut off", "wire bits", "wire bits", "kill", "stop", "power", "kill scheduler", "slow")
        faults = [replace(fault, target=harmed[0]) if fault.target == f"engine{spared}" else fault for fault in faults]
        faults += [Fault(at_s(), rng.choice(kinds), rng.choice(harmed), seconds_each()) for _ in range(4 * more)]
    asked: list[batch.BatchAsk] = []
    rng = random.Random(f"{seed} batches")
    if rng.random() < 0.3:
        settings |= {"file_storage_path": "files"}
        for number in range(rng.randint(1, 3) * more):
            lines = [(rng.choice(shared)[: rng.randint(4, 300)], rng.choice((1, 4, 30, 80))) for _ in range(12)]
            engine, at = rng.choice(harmed), rng.uniform(1, seconds)
            asked.append(batch.BatchAsk(number, at, engine, lines, weights, tp_size > 0))
            kind = rng.choice(("kill", "power", "drain", "kill scheduler", "disk full", "disk broken"))
            faults.append(Fault(at + rng.uniform(0, 8), kind, engine, rng.uniform(0.2, 12)))
    rng = random.Random(f"{seed} Valkey")
    has_valkey = rng.random() < 0.3
    if has_valkey:
        kinds = ("kill", "power", "stop", "partition", "half-open", "slow", "wire bits")
        for _ in range(2 * more):
            faults.append(Fault(rng.uniform(1, seconds), rng.choice(kinds), "valkey", rng.uniform(0.2, 12)))
        if not stores and rng.random() < 0.7:
            settings |= {"enable_hierarchical_cache": True, "hicache_storage_backend": "valkey"}
            settings |= {"hicache_storage_url": f"redis://valkey:{valkey.PORT}"}
    rng = random.Random(f"{seed} batches at a router")
    if not foreign and rng.random() < 0.2:
        router = "router0" if routers == 1 else "router1"
        for number in range(len(asked), len(asked) + rng.randint(1, 2) * more):
            lines = [(rng.choice(shared)[: rng.randint(4, 300)], rng.choice((1, 4, 30, 80))) for _ in range(12)]
            at = rng.uniform(1, seconds)
            asked.append(batch.BatchAsk(number, at, router, lines, weights, tp_size > 0))
            kind = rng.choice(("kill", "kill", "drain", "disk full", "disk broken"))
            faults.append(Fault(at + rng.uniform(0, 8), kind, router, rng.uniform(0.2, 12)))
    rng = random.Random(f"{seed} devices")
    kinds = ("device lost", "step fails", "device slow")
    for _ in range(2 * more if rng.random() < 0.4 else 0):
        faults.append(Fault(rng.uniform(1, seconds), rng.choice(kinds), rng.choice(harmed), rng.uniform(0.2, 12)))
    rng = random.Random(f"{seed} KV events")
    events = rng.choice(("",) * 4 + ("events", "replay", "replay"))
    if tp_size:
        kinds = ("rank killed", "rank killed", "rank stopped", "rank slow")
        for _ in range(4 * more):
            seconds_each = divided.choice((0.4, 1.5, 4.0, 12.0))
            faults.append(
                Fault(divided.uniform(1, seconds), divided.choice(kinds), divided.choice(harmed), seconds_each)
            )
    faults.sort(key=lambda fault: fault.at_s)
    rng, device = random.Random(f"{seed} recurrent states"), {}
    # A Valkey takes no KV of models with recurrent states.
    if rng.random() < 0.25 and "hicache_storage_url" not in settings and not tp_size:
        settings |= {"mamba_retention_policy": rng.choice(("worth", "worth", "last", "per-path"))}
        device = {"checkpoints": rng.choice((8, 20, 100)), "track_interval": rng.choice((16, 64))}
        # As a real model's loader decides it: where KV and checkpoints are evicted by one measure.
        if settings["mamba_retention_policy"] == "worth" and not disagg and "enable_hierarchical_cache" not in settings:
            device["slot_pages"] = rng.choice((0, 1, 3))
    preempted = random.Random(f"{seed} threads").random() < 0.08
    return Story(
        *(seed, engines, routers, ranks, asks, faults, settings, foreign, asked, has_valkey, disagg, events),
        *(tp_size, preempted, device, hours),
    )


def run(story: Story) -> Outcome:
    """Run a story in a world of its own."""
    return World(story).run()
