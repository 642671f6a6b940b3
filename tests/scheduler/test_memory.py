"""Counts of KV pages that are free, or will be once the plans in flight have committed."""

import numpy as np

from tokenyard.base import SchedulerSettings
from tokenyard.scheduler.memory import KvMemory, Release


def test_a_prefix_that_another_row_locks_after_the_release_does_not_count_as_free():
    memory = KvMemory(SchedulerSettings(context_length=64), 20, 4)
    ids = np.arange(10, dtype=np.int32)
    memory.tree.insert(ids.tobytes(), memory.take_pages(10))
    first = memory.match(ids.tobytes(), "", 10)
    pool_row, _ = memory.allocate_row(ids, first.node, 10)
    assert memory.free_tokens == 10
    memory.release(
        Release(last_step=5, pool_row=pool_row, node=first.node, cached=10, computed=10, held=10, priority=0)
    )
    assert memory.free_tokens == 20
    # A row that begins behind a part of that prefix keeps this part.
    second = memory.match(ids.tobytes(), "", 4)
    assert (second.tokens, memory.free_tokens) == (4, 16)
    memory.committed(5)
    assert memory.free_tokens == 16
    memory.unlock(second)
    assert memory.free_tokens == 20
