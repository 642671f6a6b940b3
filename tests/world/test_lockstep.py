"""Threads of the world switch at waits, and with a preemption between any two lines that they share."""

import asyncio
import random

import pytest

from tests.world.clock import Clock
from tests.world.lockstep import LockstepThread, Preemption
from tests.world.loop import WorldLoop
from tests.world.network import Network, Process

RACE = """
def count(box, turns):
    for _ in range(turns):
        before = box[0]
        box[0] = before + 1
"""


@pytest.mark.parametrize("preempted", [False, True])
def test_a_race_between_two_lines_is_lost_where_threads_are_preempted(preempted):
    clock = Clock()
    network = Network(clock, random.Random(0))
    loop, place, box = WorldLoop(clock, network), {}, [0]
    if preempted:
        loop.preemption = Preemption(random.Random(1), chance=0.1)
    exec(compile(RACE, "/tokenyard/kv_store/race.py", "exec"), place)
    process = Process("engine")
    threads = [LockstepThread(loop, clock, process, lambda: place["count"](box, 100)) for _ in range(2)]

    async def wait():
        while not all(thread.ended for thread in threads):
            await asyncio.sleep(0.01)

    loop.run_until_complete(wait())
    assert all(thread.error is None for thread in threads)
    assert (box[0] < 200) == preempted
