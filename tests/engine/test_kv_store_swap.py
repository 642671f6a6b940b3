"""Swap-out end to end: the engine's loops over a device that is a fake, with a tier in host memory, and too few pages.

A row that is retracted because pages have run out is copied to host memory and loaded from there. The mock's KV marks
move with the pages, so that a row which reads anything but its own history fails its step.
"""

import contextlib
import queue

import pytest

from tests.engine.engines import watched_mock
from tests.engine.test_driver import LOOPS, ScriptedPort, run, submit
from tests.engine.test_kv_store import DeviceExecutor
from tests.scheduler.harness import check_books
from tokenyard.base import SchedulerSettings
from tokenyard.engine.processes.engine_config import EngineConfig, KvStoreConfig
from tokenyard.engine.scheduler_process.attachments import kv_store as module
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.kv_store import machine
from tokenyard.scheduler import Scheduler

PAGE, PAGES, ROWS, TOKENS = 16, 40, 4, 150
MAX_ROUNDS = 50


def prompt(round_number, which):
    """70 tokens that no other prompt begins with."""
    return tuple(3 + (which + 5 * round_number + 11 * place * (which + 1)) % 80 for place in range(70))


class SwapPort(ScriptedPort):
    """Submits a few requests at a time, which together need more pages than there are, until one was swapped in.

    Each time it is asked it hands over what the threads of the tiers have to say, and looks at the books.
    """

    def __init__(self):
        super().__init__()
        self.inbox, self.scheduler, self.kv_store = queue.SimpleQueue(), None, None
        self.rounds = 0

    def receive(self, timeout_ns):
        check_books(self.scheduler)
        waits = len(self.finished()) < ROWS * self.rounds or self.scheduler.state.memory.holds
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.inbox.get(timeout=min(timeout_ns / 1e9, 0.02) if waits else 0.0))
            while True:
                found.append(self.inbox.get_nowait())
        if found or waits:
            return found
        if self.kv_store.counters.swapped_in_requests and self.kv_store.counters.loaded_tokens:
            return None
        assert self.rounds < MAX_ROUNDS, "none was swapped in"
        self.rounds += 1
        numbers = range(ROWS * (self.rounds - 1) + 1, ROWS * self.rounds + 1)
        return [submit(number, prompt(self.rounds, which), TOKENS) for which, number in enumerate(numbers)]


def mock(pages):
    return watched_mock(step_ms=0.0, page_size=PAGE, max_total_tokens=pages * PAGE, max_pool_rows=8)


@pytest.mark.part(4)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize(("loop", "depth"), LOOPS, ids=["normal", "overlap"])
def test_a_victim_is_swapped_to_host_memory_and_back(loop, depth, policy, monkeypatch):
    monkeypatch.setattr(machine, "FIND_INTERVAL_NS", 0)
    executor, port = DeviceExecutor(mock(PAGES)), SwapPort()
    settings = SchedulerSettings(
        page_size=PAGE,
        max_in_flight=depth,
        init_new_token_ratio=0.01,
        enable_hierarchical_cache=True,
        hicache_write_policy=policy,
    )
    scheduler = Scheduler(settings, executor.info)
    config = EngineConfig(model_path="", executor="mock", kv_store=KvStoreConfig(enabled=True, host_ratio=8.0))
    kv_store = module.open_kv_store_connector(config, scheduler, executor, port.inbox.put)
    port.scheduler, port.kv_store = scheduler, kv_store
    driver = Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), attachments=[kv_store])
    loop(driver)
    assert executor.device.copies > 0
    snapshot = scheduler.snapshot(1)
    assert snapshot.counters.retracted > 0
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    # What was taken for loads and stores is free again, and the tree is all that holds pages.
    memory = scheduler.state.memory
    assert (memory.held_pages, memory.allocator.available + memory.tree.total_pages) == (0, PAGES)
    assert scheduler.flush(1)
    assert memory.allocator.available == PAGES
    kv_store.close()

    alone = ScriptedPort(*([submit(1 + which, prompt(port.rounds, which), TOKENS)] for which in range(ROWS)))
    run(*LOOPS[0], alone, executor=mock(4 * PAGES), page_size=PAGE)
    first = ROWS * (port.rounds - 1)
    assert {n: port.tokens()[first + n] for n in range(1, ROWS + 1)} == alone.tokens()
