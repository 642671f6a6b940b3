"""An engine of the world: the API process with its HTTP server, and a scheduler process for each rank.

All code is the product's. Only what starts processes is written anew: `running_engine` starts real ones.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engine.text_helpers import DEMO_TOKENIZER
from tests.world.lockstep import LockstepThread
from tests.world.network import FakeSocket, Process
from tests.world.ranks import RankProcess
from tokenyard.base import DeviceLostError, EngineDeadError
from tokenyard.base.request import weight_version
from tokenyard.config import Settings
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.ipc import FROM_SCHEDULER, TO_SCHEDULER
from tokenyard.engine.processes.launch import load_tokenizer_and_template
from tokenyard.engine.processes.messages import Fence
from tokenyard.engine.scheduler_process.driver import DeviceBrokenError
from tokenyard.engine.scheduler_process.health.liveness import HEARTBEAT_INTERVAL_S
from tokenyard.engine.scheduler_process.health.watchdog import Watchdog
from tokenyard.engine.scheduler_process.scheduler_loop import SchedulerLoop
from tokenyard.routing.balance import RankBalancer
from tokenyard.server.http.connections import ConnectionLimits
from tokenyard.server.http.server import DrainingServer
from tokenyard.server.state import ServerState
from tokenyard.wiring import engine_config, server_options, with_model_folder

MODEL = str(DEMO_TOKENIZER.parent)
ADAPTERS = ("red", "blue", "green")
WEIGHTS = ("second", "third")
PORT = 30000
IPC_S = 0.0001
RESTART_S = 1.0
END_S = 10.0
"""In which a scheduler closes all that it has, once it is told to."""


@functools.cache
def text_side(model: str) -> Any:
    """Tokenizer and template, which are read once for all worlds."""
    return load_tokenizer_and_template(engine_config(with_model_folder(Settings(model_path=model, executor="mock"))))


@functools.cache
def adapter_folder(name: str) -> str:
    """The folder of a LoRA adapter, as far as the mock executor looks at it."""
    folder = _scratch_folder() / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(name)
    return str(folder)


@functools.cache
def weights_folder(name: str) -> str:
    """The folder of other weights of the model, of which the mock executor takes the path."""
    (_scratch_folder() / name).mkdir(exist_ok=True)
    return str(_scratch_folder() / name)


@functools.cache
def _scratch_folder() -> Path:
    # It has the same name for all worlds, on which tokens of other weights depend, and is tiny, so it stays.
    folder = Path(tempfile.gettempdir(), f"tokenyard-worlds-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Scheduler:
    """One scheduler process: the product's loop in a lockstep thread, with messages encoded as between processes."""

    def __init__(self, world: Any, api: Process, config: Any, rank: int, source: int) -> None:
        self.world, self.api, self.rank, self.source = world, api, rank, source
        self.process = Process(f"{api.name}/scheduler-{source}")
        self.inbox: list[bytes | None] = []
        self.ready: asyncio.Future[Any] = world.loop.create_future()
        self.loop: SchedulerLoop | None = None
        self._config = config
        self.receive_output: Any = None
        self.on_failed: Any = None
        """Called once its device is lost, which ends the process."""

        self.thread = LockstepThread(world.loop, world.clock, self.process, self._main)
        world.threads.append(self.thread)

    def _main(self) -> None:
        try:
            self.loop = SchedulerLoop(self._config.for_rank(self.rank), self, self.put, rank=self.rank)
        except (EngineDeadError, DeviceLostError):
            self.world.outside(0.0, self.on_failed, self)
            return
        if self.loop.divided is not None:
            watchdog = Watchdog(0.0, self.loop.core, lambda report: None, self.loop.flush_tape)
            self.loop.divided.on_lost(watchdog.device_lost)
        self.world.outside(0.0, self._started)
        try:
            self.loop.run()
        except DeviceBrokenError:
            self.world.outside(0.0, self.on_failed, self)
        self.loop.close()

    def _started(self) -> None:
        if self.api.alive and not self.ready.done():
            self.ready.set_result(self.loop.info)
        self._beat()

    def _beat(self) -> None:
        if self.process.alive and self.api.alive:
            if not self.process.stopped:
                self._deliver(FROM_SCHEDULER.encode(self.loop.state.beat(self.world.clock.now_ns), self.source))
            self.world.outside(HEARTBEAT_INTERVAL_S, self._beat)

    def put(self, message: Any) -> None:
        """A message to the scheduler, which arrives a little later."""
        self.world.outside(IPC_S, self._arrive, TO_SCHEDULER.encode(message))

    def _arrive(self, frame: bytes) -> None:
        if self.process.alive:
            self.inbox.append(frame)
            self.thread.wake()

    # The scheduler's port.

    def receive(self, timeout_ns: int) -> list[Any] | None:
        """Messages so far, after a wait for the first."""
        if not self.inbox and timeout_ns > 0:
            self.thread.wait_until(self.world.clock.now_ns + timeout_ns, wakes_early=True)
        frames, self.inbox = self.inbox, []
        return None if None in frames else [TO_SCHEDULER.decode(frame)[0] for frame in frames]

    def send(self, message: Any) -> None:
        """A message to the API process."""
        self.world.outside(IPC_S, self._deliver, FROM_SCHEDULER.encode(message, self.source))

    def _deliver(self, frame: bytes) -> None:
        if self.api.alive and self.receive_output is not None:
            self.world.call_in(self.api, self.receive_output, *FROM_SCHEDULER.decode(frame))

    def kill(self, *, host: bool = False) -> None:
        """kill -9."""
        self.world.network.kill(self.process, host=host)
        self.process.stopped = False
        for thread in list(self.process.threads):
            thread.kill()
        self.world.ranks.ended(self.process)


class WorldServer(DrainingServer):
    """A server that gets its signals from the world."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Engine:
    """One `tokenyard serve`. Also the API process's link to its schedulers."""

    def __init__(self, world: Any, name: str, device: dict[str, int], tp_size: int, **settings: Any) -> None:
        """device: further options of the mock executor. tp_size: ranks of each model, 0 for the mock."""
        self.world, self.name = world, name
        stores = settings.get("enable_hierarchical_cache") and "hicache_storage_url" not in settings
        self.disk = world.disks.add(name) if stores or settings.get("file_storage_path") else None
        if settings.get("file_storage_path"):
            settings["file_storage_path"] = str(self.disk.folder / "files")
        if stores:
            settings |= {"hicache_storage_backend": "disk", "hicache_storage_dir": str(self.disk.folder / "kv")}
        if settings.get("enable_lora"):
            settings |= {"lora_paths": tuple(f"{adapter}={adapter_folder(adapter)}" for adapter in ADAPTERS)}
        self.settings = with_model_folder(
            Settings(model_path=MODEL, executor="mock", host=name, port=PORT, watchdog_timeout_s=0.0, **settings)
        )
        self.config = engine_config(self.settings)
        options = self.config.executor_options | {"check_kv": True} | device
        # The flags refuse to divide a mock, and the world's model is loaded in the place of a real one.
        self.config = dataclasses.replace(self.config, executor_options=options, tp_size=max(1, tp_size))
        self.schedulers: dict[int, Scheduler] = {}
        self.process: Process | None = None
        self.manager: TokenizerManager | None = None
        self.server: DrainingServer | None = None
        self._sources = 0

    @property
    def url(self) -> str:
        """The address of its server."""
        return f"http://{self.name}:{PORT}"

    def start(self) -> None:
        """Start its processes; again and again while their disk is broken."""
        if self.disk is not None and self.disk.broken:
            self.world.loop.call_later(1.0, self.start)
            return
        self.process = Process(self.name)
        self.manager = self.server = None
        self.world.spawn(self.process, self._run)

    async def _run(self) -> None:
        state = ServerState(server_options(self.settings))
        self.server = WorldServer(state, shutdown_timeout_s=self.settings.shutdown_timeout_s, limits=ConnectionLimits())
        serving = asyncio.create_task(self.server.serve(sockets=[FakeSocket(self.name, PORT)]))
        loading = asyncio.create_task(self._load(state))
        try:
            await serving
        finally:
            loading.cancel()
        for scheduler in self.schedulers.values():
            scheduler.inbox.append(None)
            scheduler.thread.wake()
        async with asyncio.timeout(END_S):
            while not all(scheduler.thread.ended for scheduler in self.schedulers.values()):
                await asyncio.sleep(0.05)
        self.world.exited(self)

    async def _load(self, state: ServerState) -> None:
        tokenizer, template = text_side(MODEL)
        first = [self._launch(rank) for rank in range(self.config.ranks)]
        infos = [await scheduler.ready for scheduler in first]
        info = infos[0]
        pool_tokens, method = info.num_pages * info.page_size, self.config.load_balance_method
        balancer = RankBalancer(method, self.config.ranks, pool_tokens, self.config.scheduler, 0)
        self.manager = TokenizerManager(
            info, tokenizer, template, self, assembler=TextAssembler(tokenizer), balancer=balancer
        )
        for scheduler in first:
            self._joined(scheduler)
        await self.manager.adapters.start(self.config.adapters, enabled=self.config.scheduler.enable_lora)
        state.set_ready(self.manager)

    def _launch(self, rank: int) -> Scheduler:
        self._sources += 1
        scheduler = self.schedulers[self._sources] = Scheduler(
            self.world, self.process, self.config, rank, self._sources
        )
        scheduler.on_failed = self.kill_scheduler
        return scheduler

    def _joined(self, scheduler: Scheduler) -> None:
        scheduler.receive_output = self.manager.outputs.receive
        self.manager.failover.rank_ready(scheduler.rank, scheduler.source)

    def kill_scheduler(self, scheduler: Scheduler) -> None:
        """kill -9 a scheduler process; the supervisor notices and starts another."""
        if scheduler.source not in self.schedulers:
            return  # all of the engine has ended meanwhile
        if self.manager is None:  # an engine that cannot start ends, and is started again
            self.world.exited(self)
            return
        scheduler.kill()
        self.world.disks.crash(scheduler.process.name, power=False)
        del self.schedulers[scheduler.source]
        if self.process.alive and self.manager is not None:
            self.world.call_in(self.process, self._replace, scheduler)

    def _replace(self, lost: Scheduler) -> None:
        self.manager.failover.rank_lost(lost.source, "it was killed", suspect_user_code=False)
        asyncio.get_running_loop().call_later(RESTART_S, self._restart, lost.rank)

    def _restart(self, rank: int) -> None:
        if self.disk is not None and self.disk.broken:
            asyncio.get_running_loop().call_later(RESTART_S, self._restart, rank)
            return
        scheduler = self._launch(rank)
        scheduler.ready.add_done_callback(lambda done: self._joined(scheduler))

    def kill(self, *, host: bool = False) -> None:
        """kill -9 all processes; with `host`, the machine loses power and no peer hears of it."""
        self.world.network.kill(self.process, host=host)
        for rank in self.ranks():
            rank.kill()
        for scheduler in self.schedulers.values():
            scheduler.kill(host=host)
        self.schedulers.clear()
        self.world.disks.crash(self.name, power=host)

    def stop(self) -> None:
        """SIGSTOP all processes."""
        for process in self._processes():
            process.stop()

    def resume(self) -> None:
        """SIGCONT all processes."""
        for process in self._processes():
            self.world.loop.resume(process)

    def _processes(self) -> list[Process]:
        schedulers = [scheduler.process for scheduler in self.schedulers.values()]
        return [self.process, *schedulers, *(rank.process for rank in self.ranks())]

    def ranks(self) -> list[RankProcess]:
        """The other ranks of its models."""
        return [rank for scheduler in self.schedulers.values() for rank in self.world.ranks.of(scheduler.process)]

    def drain(self) -> None:
        """SIGTERM."""
        if self.server is not None:
            self.world.call_in(self.process, self.server.handle_exit, 15, None)

    # The API process's link.

    def connect(self, source: int) -> Any:
        """The way to a scheduler."""
        return self.schedulers[source].put

    def disconnect(self, source: int) -> None:
        """Nothing is to be closed."""

    def fence(self, fence: Fence) -> None:
        """The text side is in the API process and is asked there."""

    def reset_detokenizer(self) -> None:
        """There is none to reset."""

    def close(self) -> None:
        """Nothing is to be closed."""

    def tables(self) -> list[Any]:
        """Where what it keeps begins."""
        return [self.manager, self.server, *(scheduler.loop for scheduler in self.schedulers.values())]

    def left_over(self) -> list[str]:
        """What it still holds, for the check that everything drains."""
        found = []
        for scheduler in self.schedulers.values():
            if scheduler.loop is None:
                found.append(f"{scheduler.process.name} has not started")
                continue
            core = scheduler.loop.core
            state = core.snapshot(self.world.clock.now_ns)
            self.world.done["tokens of prompts from prefix caches"] += state.counters.hit_tokens
            if state.used_tokens or state.held_tokens or core.has_work:
                found.append(f"{scheduler.process.name} holds {state.used_tokens} KV tokens, has work: {core.has_work}")
            found += self._left_elsewhere(scheduler.process)
            others = len(self.world.ranks.of(scheduler.process))
            if others != self.config.tp_size - 1:
                found.append(f"{scheduler.process.name} has {others} of {self.config.tp_size - 1} other ranks")
            if self.manager is not None and weight_version(core.weights) != self.manager.weights.version:
                wanted = self.manager.weights.version
                found.append(f"{scheduler.process.name} has weights {core.weights!r} in place of {wanted!r}")
        if self.server is not None and self.server.state.open_requests:
            found.append(f"{self.name} has {self.server.state.open_requests} open requests")
        return found

    def _left_elsewhere(self, process: Process) -> list[str]:
        """What is still held for other engines, or by them."""
        connector, store = self.world.connectors.get(process), self.world.kv_stores.get(process)
        if store is not None:
            self.world.done["tokens of KV from stores"] += store.counters.loaded_tokens
        if connector is None:
            return []
        (counters,) = connector.describe(self.world.clock.now_ns)["transfer"].values()
        self.world.done["prompts from other engines"] += counters.get("transferred", 0)
        held = ((what, counters[what]) for what in ("open", "computing_for_others", "held_for_others"))
        return [f"{process.name} has {count} keys {what}" for what, count in held if count]
