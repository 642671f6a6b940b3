"""The store below, as an engine uses it: threads that read and write, and stores that fail or hang."""

import contextlib
import logging
import queue
import threading
import time
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from tests.scheduler.test_store_queue import PER_BLOCK, make_yard, prompt
from tokenyard.base import Cancel, ConfigError, Finish, Pause, Request, Resume, SamplingParams, Submit, TokenBatch
from tokenyard.base.blocks import block_digests
from tokenyard.engine.processes.engine_config import EngineConfig, KvStoreConfig
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.engine.scheduler_process.attachments.kv_store_backends import open_pool, open_store
from tokenyard.kv_layout.layout import PoolView, map_pages
from tokenyard.kv_store import machine
from tokenyard.kv_store.store import MemoryStore

TOKENS = prompt()
NO_TOKENS = np.empty(0, np.int32)


class Trouble(MemoryStore):
    """A store that does what a test wants at `get`, `put` and `prefetch`."""

    def __init__(self) -> None:
        super().__init__(10_000)
        self.before = {"get": lambda: None, "put": lambda: None, "prefetch": lambda: None}

    def get(self, digest, block):
        self.before["get"]()
        return super().get(digest, block)

    def put(self, digest, block):
        self.before["put"]()
        return super().put(digest, block)

    def prefetch(self, digest):
        self.before["prefetch"]()
        return super().prefetch(digest)


class Hang:
    """Blocks each caller until it is released."""

    def __init__(self) -> None:
        self.reached, self._go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._go.wait(60)

    def release(self) -> None:
        self._go.set()


class Device:
    """A pool that is not in host memory: only its own copies reach it."""

    def __init__(self, pool: PoolView) -> None:
        self._pool, self.page_bytes, self.copies = pool, pool.page_bytes, 0

    def gather(self, pages, block):
        self.copies += 1
        self._pool.gather(pages, block)

    def scatter(self, block, pages_in_block, first, pages):
        self.copies += 1
        self._pool.scatter(block, pages_in_block, first, pages)


class Engine:
    """A scheduler and a mock device with a real `KvStoreConnector` below; turns its loop as a driver does."""

    def __init__(
        self, store: MemoryStore, yard_changes: dict | None = None, device: type | None = None, **config
    ) -> None:
        self.yard = make_yard(**(yard_changes or {}))
        core, executor = self.yard.scheduler, self.yard.executor
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        pool = PoolView(map_pages(executor.pieces), executor.info.num_pages)
        self.pool = pool if device is None else device(pool)
        config = KvStoreConfig(**{"backend": "disk", "timeout_s": 60.0} | config)
        self.kv_store = KvStoreConnector(config, store, self.pool, core, executor.info, self.inbox.put)
        self._numbers = count(1)
        self._told: set[int] = set()

    def submit(self, tokens=TOKENS, max_new: int = 12, lora: str = "") -> int:
        number = next(self._numbers)
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0)
        request = Request(number, f"r{number}", np.array(tokens, np.int32), sampling, lora=lora)
        self.yard.apply(Submit(self.kv_store.submitted(request, time.monotonic_ns())))
        return number

    def turn(self) -> None:
        for event in self.kv_store.poll(time.monotonic_ns()):
            self.yard.apply(event)
        worked = self.yard.advance()
        with contextlib.suppress(queue.Empty):
            while True:
                self.yard.apply(self.inbox.get(timeout=0.0 if worked else 0.01))
                worked = True
        ended: list[Finish] = [finish for number, finish in self.yard.finished.items() if number not in self._told]
        self._told.update(finish.number for finish in ended)
        self.kv_store.on_output(TokenBatch(NO_TOKENS.astype(np.int64), NO_TOKENS, NO_TOKENS, finished=ended))
        self.kv_store.take(self.yard.scheduler.drain_moves())
        self.yard.check()

    def flush(self) -> bool:
        for event in self.kv_store.before_flush(self.yard.now):
            self.yard.apply(event)
        return self.yard.scheduler.flush(self.yard.now)

    def until(self, condition, most_s: float = 60.0) -> None:
        end = time.monotonic() + most_s
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            self.turn()

    def serve(self, tokens=TOKENS, lora: str = "") -> list[int]:
        number = self.submit(tokens, lora=lora)
        self.until(lambda: number in self.yard.finished)
        return self.yard.tokens[number]

    @property
    def at_rest(self) -> bool:
        state = self.yard.scheduler.state
        return not (state.memory.holds or state.stores.waiting or self.yard.scheduler.has_work)

    def close(self) -> None:
        self.until(lambda: self.at_rest)
        assert self.yard.scheduler.idle() is None
        self.kv_store.close()


@pytest.fixture(scope="module")
def answer():
    yard = make_yard(enable_hierarchical_cache=False)
    number = yard.submit(TOKENS, max_new=12)
    yard.run()
    return yard.tokens[number]


@pytest.fixture
def store(answer):
    """A store that holds the prompt."""
    made = Trouble()
    engine = Engine(made)
    assert engine.serve() == answer
    engine.close()
    assert made.blocks == 3
    return made


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_what_was_stored_is_loaded_after_a_restart(store, answer, policy):
    engine = Engine(store, prefetch_policy=policy)
    assert engine.serve() == answer
    assert engine.kv_store.counters.loaded_tokens == 192
    assert engine.yard.scheduler.snapshot(1).counters.prefill_tokens == len(TOKENS) - 192
    engine.close()


def test_kv_of_an_adapter_is_found_for_the_same_weights_alone(answer):
    store = Trouble()
    engine = Engine(store)
    changed = engine.serve(lora="tuned#01")
    assert changed != answer
    engine.close()
    engine = Engine(store)
    assert engine.serve() == answer
    assert engine.serve(lora="tuned#02") not in (answer, changed)
    assert engine.kv_store.counters.loaded_tokens == 0
    assert engine.serve(lora="tuned#01") == changed
    assert engine.kv_store.counters.loaded_tokens == 192
    engine.close()


def test_best_effort_closes_no_gate(store, answer):
    store.before["prefetch"] = hang = Hang()
    engine = Engine(store, prefetch_policy="best_effort")
    assert engine.serve() == answer
    assert engine.kv_store.counters.loaded_tokens == 0
    hang.release()
    engine.close()


def test_requests_with_the_same_prompt_share_a_load(store, answer):
    engine = Engine(store)
    numbers = [engine.submit() for _ in range(5)]
    engine.until(lambda: len(engine.yard.finished) == 5)
    assert all(engine.yard.tokens[number] == answer for number in numbers)
    assert engine.kv_store.counters.loaded_tokens == 192
    engine.close()


@pytest.mark.parametrize("where", ["prefetch", "get"])
def test_a_read_that_hangs_is_given_up_and_spoils_nothing_later(store, answer, where):
    store.before[where] = hang = Hang()
    engine = Engine(store, timeout_s=0.05, timeout_per_1k_tokens_s=0.0)
    assert engine.serve() == answer
    assert hang.reached.is_set()
    assert engine.kv_store.counters.loaded_tokens == 0
    other = prompt(300, seed=5)
    before = engine.serve(other)
    hang.release()
    assert engine.serve(other) == before
    assert engine.kv_store.counters.loaded_tokens == 0
    engine.close()


def test_a_request_that_ends_while_it_loads_gives_its_pages_back(store):
    store.before["get"] = hang = Hang()
    engine = Engine(store)
    number = engine.submit()
    engine.until(hang.reached.is_set)
    engine.yard.apply(Cancel([number]))
    engine.until(lambda: engine.at_rest)
    hang.release()
    engine.close()


def broken() -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("where", ["prefetch", "get"])
def test_a_read_that_fails_is_computed(store, answer, where):
    store.before[where] = broken
    engine = Engine(store)
    assert engine.serve() == answer
    assert engine.kv_store.counters.loaded_tokens == 0
    engine.close()


def test_a_paused_request_resumes_with_its_kv(monkeypatch):
    monkeypatch.setattr(machine, "FIND_INTERVAL_NS", 0)
    alone = make_yard(enable_hierarchical_cache=False)
    expected = alone.submit(TOKENS, max_new=60)
    alone.run()
    engine = Engine(MemoryStore(1000), {"pages": 32})
    core = engine.yard.scheduler
    number = engine.submit(max_new=60)
    engine.until(lambda: len(engine.yard.tokens.get(number, [])) >= 3)
    engine.yard.apply(Pause(numbers=[number]))
    (row,) = core.state.waiting.rows.tolist()
    engine.until(lambda: not (core.state.stores.waiting or engine.kv_store.machine.storing))
    for seed in range(5, 9):
        engine.serve(prompt(300, seed=seed))
    assert core.state.memory.tree.peek(core.state.table.request_state(row).known_ids.tobytes()) == 0
    before = engine.kv_store.counters.loaded_tokens
    engine.yard.apply(Resume(numbers=[number]))
    engine.until(lambda: number in engine.yard.finished)
    assert engine.yard.tokens[number] == alone.tokens[expected]
    assert engine.kv_store.counters.loaded_tokens - before == 192
    engine.close()


def test_a_block_that_is_gone_ends_the_load_there(store, answer):
    digests = block_digests(np.array(TOKENS, np.int32))
    engine = Engine(store)
    number = engine.submit()
    engine.until(lambda: engine.yard.scheduler.state.table.loadable_tokens.any())
    get = store.get
    store.get = lambda digest, block: digest != digests[1] and get(digest, block)
    engine.until(lambda: number in engine.yard.finished)
    assert engine.yard.tokens[number] == answer
    assert (engine.kv_store.counters.loaded_tokens, engine.kv_store.counters.failed_loads) == (64, 1)
    engine.close()


def test_writes_that_fail_are_counted(answer, caplog, monkeypatch):
    monkeypatch.setattr(machine, "MIN_BACKOFF_NS", 10**12)
    monkeypatch.setattr(machine, "MAX_BACKOFF_NS", 10**12)
    store = Trouble()
    store.before["put"] = broken
    engine = Engine(store)
    with caplog.at_level(logging.WARNING):
        assert engine.serve() == answer
        engine.until(lambda: engine.at_rest)
        engine.serve(prompt(100, seed=3))
        engine.until(lambda: engine.at_rest)
    counters = engine.kv_store.counters
    assert counters.failed_writes == 1, "there is a pause after a failure"
    assert counters.dropped_blocks >= 1
    assert [record.getMessage() for record in caplog.records] == [
        "KV is not stored for now: [Errno 5] Input/output error"
    ]
    engine.close()


def test_after_a_write_that_failed_it_is_tried_again(answer, monkeypatch):
    monkeypatch.setattr(machine, "MIN_BACKOFF_NS", 1)
    monkeypatch.setattr(machine, "MAX_BACKOFF_NS", 1)
    store = Trouble()
    store.before["put"] = broken
    engine = Engine(store)
    assert engine.serve() == answer
    engine.until(lambda: engine.at_rest and engine.kv_store.counters.failed_writes)
    store.before["put"] = lambda: None
    engine.serve(prompt(100, seed=4))
    engine.until(lambda: store.blocks > 0 and engine.at_rest)
    engine.close()


def test_what_waits_for_the_write_limit_is_written_while_the_engine_is_idle():
    store = Trouble()
    # The first run, two blocks, takes 0.5 s by this limit.
    engine = Engine(store, write_mb_s=0.002)
    engine.serve()
    engine.until(lambda: engine.at_rest)
    end = time.monotonic() + 60.0
    while store.blocks < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert store.blocks == 3
    engine.close()


def test_a_write_that_hangs_holds_no_pages():
    store = Trouble()
    store.before["put"] = hang = Hang()
    engine = Engine(store)
    engine.serve()
    engine.until(hang.reached.is_set)
    engine.until(lambda: engine.at_rest)
    assert engine.kv_store.counters.dropped_blocks == 0, "the blocks are staged"
    assert engine.flush()
    hang.release()
    engine.until(lambda: store.blocks == 3)
    engine.close()


def test_the_cache_can_be_flushed_while_it_is_stored(answer):
    store = Trouble()
    store.before["put"] = hang = Hang()
    engine = Engine(store)
    assert engine.serve() == answer
    engine.until(hang.reached.is_set)
    assert engine.flush()
    assert engine.yard.scheduler.state.memory.allocator.available == engine.yard.scheduler.state.memory.num_pages
    hang.release()
    engine.close()


def test_what_is_slower_to_load_than_to_compute_is_computed(store, answer):
    engine = Engine(store)
    engine.kv_store.machine.fast_s = 1e6
    assert engine.serve() == answer
    assert (engine.kv_store.counters.recomputed_requests, engine.kv_store.counters.hit_requests) == (1, 0)
    engine.close()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_all_is_stored_at_the_end(answer, policy):
    store = Trouble()
    # So slow that nothing but the first run would be written in time.
    engine = Engine(store, {"hicache_write_policy": policy}, write_mb_s=1e-9)
    assert engine.serve() == answer
    engine.kv_store.close()
    assert store.blocks == 3


def test_describe_counts_blocks_and_bytes(store):
    engine = Engine(store)
    engine.serve()
    (described,) = engine.kv_store.describe(0)["kv_store"].values()
    assert described["loaded_bytes"] == 3 * PER_BLOCK * 16 * 8
    assert (described["blocks"], described["loaded_tokens"], described["loading"]) == (3, 192, 0)
    assert described["read_bytes_per_s"] > 0
    engine.close()


class DeviceExecutor:
    """A mock executor whose KV lies on a device."""

    def __init__(self, executor) -> None:
        self._executor, self.info = executor, executor.info
        self.device = Device(PoolView(map_pages(executor.pieces), executor.info.num_pages))

    def pieces(self, pages):
        return replace(self._executor.pieces(pages), device="cuda:0")

    def device_states(self):
        raise AssertionError("the model has no recurrent states")

    def device_blocks(self):
        return self.device

    def __getattr__(self, name):
        return getattr(self._executor, name)


@pytest.mark.parametrize(("config", "blocks"), [({}, 64), ({"host_ratio": 0.5}, 16), ({"host_gb": 1e-5}, 19)])
def test_a_device_has_a_tier_in_host_memory(config, blocks):
    yard = make_yard()
    executor = DeviceExecutor(yard.executor)
    engine = EngineConfig(model_path="", executor="mock", kv_store=KvStoreConfig(enabled=True, **config))
    pool = open_pool(executor)
    store = open_store(engine, executor, pool, 0)
    assert pool is executor.device
    for place in range(blocks + 1):
        store.put(f"block {place}".encode(), np.zeros(8, np.uint8))
    assert store.blocks == blocks


def test_kv_on_a_device_goes_to_host_memory_and_back(answer):
    engine = Engine(MemoryStore(1000), {"pages": 20}, Device)
    assert engine.serve() == answer
    engine.until(lambda: engine.at_rest and not engine.kv_store.machine.storing)
    engine.serve(prompt(250, seed=3))
    assert engine.serve() == answer
    assert engine.pool.copies > 3
    assert engine.kv_store.counters.loaded_tokens > 0
    engine.close()


def test_a_request_that_lost_its_place_is_swapped_in():
    """Its KV goes down, leaves the device for others, and is loaded when its turn comes."""
    engine = Engine(MemoryStore(1000), {"pages": 24, "chunked_prefill_size": -1})
    alone = Engine(MemoryStore(1000))
    expected = [alone.serve(prompt(150, seed=seed)) for seed in range(4)]
    numbers = [engine.submit(prompt(150, seed=seed)) for seed in range(4)]
    engine.until(lambda: bool(engine.yard.tokens.get(numbers[0])))
    engine.yard.apply(Pause(numbers=numbers[:1]))
    engine.until(lambda: all(number in engine.yard.finished for number in numbers[1:]))
    engine.until(lambda: not engine.yard.scheduler.state.memory.holds)
    engine.serve(prompt(300, seed=9))
    engine.until(lambda: engine.kv_store.counters.swapped_in_requests == 1)
    engine.yard.apply(Resume(numbers[:1]))
    engine.until(lambda: numbers[0] in engine.yard.finished)
    assert [engine.yard.tokens[number] for number in numbers] == expected
    assert engine.kv_store.counters.loaded_tokens >= 128
    for one in (engine, alone):
        one.close()


def test_on_a_cpu_the_pool_is_host_memory_already(caplog, tmp_path):
    yard = make_yard()
    pool = open_pool(yard.executor)
    engine = EngineConfig(model_path="", executor="mock", kv_store=KvStoreConfig(enabled=True))
    with pytest.raises(ConfigError, match="in host memory already"):
        open_store(engine, yard.executor, pool, 0)
    engine.kv_store = KvStoreConfig(enabled=True, backend="disk", folder=str(tmp_path), host_ratio=2.0)
    open_store(engine, yard.executor, pool, 0).close()
    assert "have no effect on a CPU" in caplog.text


class Elsewhere(Trouble):
    """A store that others fill: what is there shows only when it is asked for."""

    def count_maybe_stored(self, digests):
        return len(digests)

    def count_stored(self, digests):
        return 0


@pytest.mark.parametrize("there", [True, False])
def test_what_another_engine_has_stored_is_found_by_asking(store, answer, there):
    made = Elsewhere()
    if there:
        made.get, made.prefetch, made.lacks = store.get, store.prefetch, store.lacks
    engine = Engine(made)
    assert engine.serve() == answer
    assert engine.kv_store.counters.loaded_tokens == (192 if there else 0)
    assert engine.kv_store.counters.hit_requests == there
    engine.close()
