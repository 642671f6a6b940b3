"""The KV store's machine decides the same in the engine, with threads, and in the simulator, in virtual time."""

import queue
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import numpy as np
import pytest

from tests.scheduler.harness import make_info
from tokenyard.base import (
    KvAvailable,
    KvLoaded,
    Load,
    PagesReleased,
    Request,
    SamplingParams,
    StateGroup,
    Store,
    TokenBatch,
)
from tokenyard.base.events import Finish
from tokenyard.cost import LinearCost, get_profile
from tokenyard.engine.processes.engine_config import KvStoreConfig
from tokenyard.engine.scheduler_process.attachments import kv_store as engine_module
from tokenyard.kv_store.machine import KvStoreMachine, Tick
from tokenyard.kv_store.slab import SlabStore
from tokenyard.kv_store.store import BlockFormat, MemoryStore
from tokenyard.sim.kv import kv_store as sim_module
from tokenyard.sim.kv.disagg_settings import KvStoreSettings

PAGE, PER_BLOCK, BLOCKS, PAGES = 16, 4, 6, 64
TIMEOUT_S = 60.0
INFO = replace(make_info(PAGES, PAGE, 7, 1024), kv_bytes_per_token=8)
STATE_BYTES = 1200
"""Of the recurrent states in a slot, which take three blocks."""
WITH_STATES = replace(INFO, states=StateGroup(8, STATE_BYTES))
PROMPT = np.arange(64 * BLOCKS, dtype=np.int32)


def cost():
    """Computing takes so long that loading always pays, however slow this machine is."""
    given = get_profile("h100", "llama-3-8b").cost()
    return LinearCost(given.terms.scaled(1e5), given.links)


class Core:
    """A scheduler that has nothing in its cache."""

    def __init__(self):
        self.cost = cost()

    def cached_tokens(self, request):
        return 0

    def requeued(self, max_requests):
        return []

    def store_whole_cache(self, now):
        pass

    def drain_moves(self):
        return []


class Pool:
    """Pages in memory; page `n` is full of `n`."""

    page_bytes = PAGE * INFO.kv_bytes_per_token

    def __init__(self):
        self.pages = np.repeat(np.arange(PAGES, dtype=np.uint8)[:, None], self.page_bytes, axis=1)

    def gather(self, pages, block):
        block[: len(pages) * self.page_bytes] = self.pages[pages].ravel()

    def scatter(self, block, pages_in_block, first, pages):
        source = block[: pages_in_block * self.page_bytes].reshape(pages_in_block, -1)
        self.pages[pages] = source[first : first + len(pages)]


class Slots:
    """Recurrent states in memory; slot `n` is full of `n`."""

    slot_bytes = STATE_BYTES

    def __init__(self):
        self.states = np.repeat(np.arange(8, dtype=np.uint8)[:, None], STATE_BYTES, axis=1)

    def read(self, slot, content):
        content[:STATE_BYTES] = self.states[slot]

    def write(self, slot, content):
        self.states[slot] = content[:STATE_BYTES]


class RecordingMachine(KvStoreMachine):
    """Writes down what it hears and says, without times."""

    __slots__ = ("heard",)

    def __post_init__(self):
        super().__post_init__()
        self.heard = []

    def handle(self, event, now):
        actions = super().handle(event, now)
        if not isinstance(event, Tick):
            self.heard.append((plain(event), [plain(action) for action in actions]))
        return actions


def plain(thing):
    fields = [name for name in thing.__dataclass_fields__ if name not in ("seconds", "stored", "max_blocks")]
    return type(thing).__name__, *(shown(getattr(thing, name)) for name in fields)


def shown(value):
    if hasattr(value, "__dataclass_fields__"):
        return plain(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


class EngineDriver:
    def __init__(self, store, info):
        self.inbox, self.pool, self.slots = queue.SimpleQueue(), Pool(), Slots()
        states = self.slots if info.states else None
        config = KvStoreConfig(backend="disk", timeout_s=TIMEOUT_S, write_mb_s=0.0)
        self.kv_store = engine_module.KvStoreConnector(
            config, store, self.pool, Core(), info, self.inbox.put, states=states
        )
        self.machine = self.kv_store.machine

    def submit(self, request):
        return self.kv_store.submitted(request, 0)

    def take(self, move):
        assert self.kv_store.take([move]) == []

    def end(self, number):
        nothing = np.empty(0, np.int32)
        finish = Finish(number, "stop")
        self.kv_store.on_output(TokenBatch(nothing.astype(np.int64), nothing, nothing, finished=[finish]))

    def until(self, event):
        assert self.inbox.get(timeout=TIMEOUT_S) == event

    def settle(self):
        while self.machine.storing:
            self.kv_store.poll(0)


class SimDriver:
    def __init__(self, settings, info):
        self.calls, self.order, self.applied, self.now = [], count(), [], 0
        self.kv_store = sim_module.SimKvStore(
            settings, Core(), info, cost(), lambda event, now: self.applied.append(event), self.at, None
        )
        self.machine = self.kv_store.machine

    def at(self, when, call):
        heappush(self.calls, (when, next(self.order), call))

    def submit(self, request):
        return self.kv_store.submitted(request, self.now)

    def take(self, move):
        assert self.kv_store.take([move], self.now) == []

    def end(self, number):
        self.kv_store.ended(number)
        self.kv_store.take([], self.now)

    def until(self, event):
        while not self.applied:
            self.now, _, call = heappop(self.calls)
            call(self.now)
        assert self.applied.pop(0) == event

    def settle(self):
        while self.machine.storing:
            self.now, _, call = heappop(self.calls)
            call(self.now)


def request(number, tokens):
    return Request(number, f"r{number}", tokens, SamplingParams(max_new_tokens=4))


def play(driver, source=-1, target=-1):
    """Offers, hits, misses, a request that ends before its load, and an offer of what is stored.

    source, target: the slots of recurrent states that are stored and loaded.
    """
    offer = Store(-1, "", PROMPT, np.arange(BLOCKS * PER_BLOCK, dtype=np.int32), source)
    driver.take(offer)
    driver.until(PagesReleased(-1))
    driver.settle()

    longer = np.concatenate((PROMPT, np.arange(40, dtype=np.int32)))
    assert driver.submit(request(1, longer)).awaits_kv
    driver.until(KvAvailable(1, len(PROMPT)))
    into = np.arange(30, 30 + BLOCKS * PER_BLOCK - 2, dtype=np.int32)
    driver.take(Load(1, 2 * PAGE, into, target))
    driver.until(KvLoaded(1, len(PROMPT)))
    driver.end(1)

    assert not driver.submit(request(2, longer[::-1].copy())).awaits_kv
    half = PROMPT[: 64 * BLOCKS // 2]
    assert driver.submit(request(3, np.concatenate((half, half)))).awaits_kv == (source < 0)
    if source < 0:
        driver.until(KvAvailable(3, len(half)))
    driver.end(3)

    driver.take(Store(-2, "", longer, np.arange(len(longer) // PAGE, dtype=np.int32)))
    driver.until(PagesReleased(-2))
    driver.settle()
    return into


@pytest.mark.parametrize("info", [INFO, WITH_STATES], ids=["", "states"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_both_drivers_tell_and_do_the_same(kind, info, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "KvStoreMachine", RecordingMachine)
    monkeypatch.setattr(sim_module, "KvStoreMachine", RecordingMachine)
    block_bytes = PER_BLOCK * Pool.page_bytes
    form = BlockFormat("model", "float32", 64, 1, block_bytes)
    store = MemoryStore(100) if kind == "host" else SlabStore(str(tmp_path), form, 100 * 2 * block_bytes)
    engine, slots = EngineDriver(store, info), (2, 5) if info.states else ()
    sizes = {"host_gb": 1.0, "disk_gb": 0.0} if kind == "host" else {"disk_gb": 1.0}
    simulated = SimDriver(KvStoreSettings(**sizes, timeout_s=TIMEOUT_S, write_mb_s=0.0), info)
    play(simulated, *slots)
    into = play(engine, *slots)
    assert len(engine.machine.heard) > 8
    assert engine.machine.heard == simulated.machine.heard
    assert engine.machine.counters == simulated.machine.counters
    expected = np.arange(2, BLOCKS * PER_BLOCK, dtype=np.uint8)
    assert (engine.pool.pages[into] == expected[:, None]).all(), "the load brings what was stored"
    assert (engine.slots.states[5] == (2 if slots else 5)).all()
    engine.kv_store.close()
