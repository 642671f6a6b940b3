"""Plans as bytes, and the ring that carries them."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.plans import chunk, decode, int32
from tokenyard.base import StepPlan
from tokenyard.base.plan_bytes import decode_plan, encode_plan
from tokenyard.executor.distributed.shm_broadcast import RING_BYTES, RingReader, RingWriter, SharedMemory

NUMBERS = st.integers(-2, 2**31 - 1)


@st.composite
def plans(draw):
    rows, pages, copies = draw(st.integers(0, 5)), draw(st.integers(0, 7)), draw(st.integers(0, 2))
    row = st.lists(NUMBERS, min_size=rows, max_size=rows)
    page = st.lists(NUMBERS, min_size=pages, max_size=pages)
    columns = [int32(*draw(kind)) for kind in (*[row] * 5, st.lists(NUMBERS, max_size=9), *[page] * 3)]
    return StepPlan(
        draw(st.integers(0, 2**60)),
        *columns,
        decode_rows=draw(st.integers(0, rows)),
        verify_rows=draw(st.integers(0, rows)),
        delay_sampling=draw(st.booleans()),
        num_steps=draw(st.integers(1, 9)),
        state_copies=int32(*draw(st.lists(NUMBERS, min_size=2 * copies, max_size=2 * copies))).reshape(copies, 2),
    )


@given(plan=plans())
def test_plans_survive_encoding(plan):
    found = decode_plan(encode_plan(plan))
    for name in StepPlan.__dataclass_fields__:
        mine, theirs = getattr(plan, name), getattr(found, name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        assert type(mine) is type(theirs)


def test_row_starts_stay_behind():
    assert decode_plan(encode_plan(chunk(0, 1, [4, 5, 6], 0, 3))).row_starts == []


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data[:10], lambda data: data + b"1234"])
def test_other_bytes_are_refused(damage):
    with pytest.raises(ValueError, match="a plan of"):
        decode_plan(damage(encode_plan(decode(1, [0, 2], [5, 6]))))


class Ends:
    """A ring of one writer and two readers within this process."""

    def __init__(self, check=lambda: None):
        writing, fd = SharedMemory.create(3)
        bells = [os.pipe() for _ in range(2)]
        self.readers = [
            RingReader(SharedMemory(os.dup(fd), 3), rank, hears) for rank, (hears, _) in enumerate(bells, start=1)
        ]
        os.close(fd)
        self.writer = RingWriter(writing, [rings for _, rings in bells], check)


def test_frames_reach_every_reader_in_order_and_whole():
    """Many rounds of the ring, short frames and such as are longer than the ring."""
    ends, made = Ends(), np.random.default_rng(0)
    sizes = [1, 5000, 3 * RING_BYTES + 17, 40, RING_BYTES, *made.integers(1, RING_BYTES // 3, 60).tolist()]
    frames = [made.bytes(size) for size in sizes]
    found = [[], []]

    def read(place):
        while (frame := ends.readers[place].receive()) is not None:
            found[place].append(frame)

    threads = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for frame in frames:
        ends.writer.send(frame)
    ends.writer.close()
    for thread in threads:
        thread.join()
    assert found[0] == frames
    assert found[1] == frames


def test_a_full_ring_waits_only_as_long_as_it_should():
    def check():
        raise RuntimeError("rank 2 has gone")

    ends = Ends(check)

    def send_on():
        while True:
            ends.writer.send(bytes(100_000))
            assert ends.readers[0].receive() == bytes(100_000)

    with pytest.raises(RuntimeError, match="rank 2 has gone"):
        send_on()
