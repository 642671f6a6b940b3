"""What is kept of batches: on a disk that is full for a moment, and how many; and that held lines go on."""

import asyncio
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenyard.batch import batch_runner, batch_store
from tokenyard.batch.batch_runner import BatchRunner
from tokenyard.batch.batch_store import ENDPOINTS, MAX_OPEN_BATCHES, Answer, Batch, BatchStore, TooManyBatchesError
from tokenyard.batch.file_store import FileStore


def test_an_answer_that_found_no_room_hides_no_later_one(tmp_path):
    store = BatchStore(tmp_path / "batches", FileStore(tmp_path / "files", 10**6))
    batch = Batch("batch_1", "", ENDPOINTS[0], "file-1", "24h", 0, 1)
    store.add(batch, [Answer(0, True, {"custom_id": "a"})])
    size = (tmp_path / "batches" / "batch_1.answers").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            store.add(batch, [Answer(1, True, {"custom_id": "b"})])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for place in (2, 1):
        store.add(batch, [Answer(place, True, {"custom_id": str(place)})])
    assert sorted(store.answers(batch)) == [0, 1, 2]


@pytest.fixture
def kept(tmp_path):
    """A store of batches, and what makes one for a tenant."""
    files = FileStore(tmp_path / "files", 10**6)
    store = BatchStore(tmp_path / "batches", files)

    def create(tenant, lines=b"{}"):
        file = files.new_file(tenant, "lines.jsonl", "batch", lines, 60)
        fields = {"endpoint": ENDPOINTS[0], "input_file_id": file.id, "completion_window": "24h", "metadata": None}
        return store.create(tenant, SimpleNamespace(**fields))

    return store, create


class HeldOnce:
    """Room for all lines, which are held back until it adapts a second time."""

    closing = False

    def __init__(self):
        self.calls, self.go = 0, asyncio.Event()

    def adapt(self):
        self.calls += 1
        if self.calls > 1:
            self.go.set()

    async def free(self, open_lines):
        return 16

    def started(self, rid):
        pass

    ended = started


LINE = b'{"custom_id":"x","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n'


async def answer_all(runner, batch):
    runner.start()
    async with asyncio.timeout(10):
        while batch.status != "completed":
            await asyncio.sleep(0.01)
    await runner.close()


def test_lines_that_are_held_back_go_on_when_no_other_is_left(kept):
    store, create = kept
    batch = create("a", LINE)

    async def main():
        room = HeldOnce()

        async def ask(path, headers, body):
            await room.go.wait()
            return 200, b"{}"

        await answer_all(BatchRunner(store, ask, room), batch)

    asyncio.run(main())
    assert batch.completed == 1


def test_a_line_is_asked_again_soon_though_the_wall_clock_was_set_back(kept, monkeypatch):
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)
    store, create = kept
    batch, asked_s = create("a", LINE), [time.time()]

    async def ask(path, headers, body):
        asked_s.append(asked_s[-1] - 900)
        return (503 if len(asked_s) < 4 else 200), b"{}"

    async def main():
        await answer_all(BatchRunner(store, ask, HeldOnce(), lambda: asked_s[-1]), batch)

    asyncio.run(main())
    assert (batch.completed, len(asked_s)) == (1, 4)


def test_what_is_kept_survives_a_loss_of_power_under_its_name(kept, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    store, create = kept
    batch = create("a")
    assert synced[-2:] == [f".{batch.id}.json.part", "batches"]
    store.add(batch, [Answer(0, True, {})])
    assert synced[-2:] == [f"{batch.id}.answers", "batches"]


def test_open_batches_of_a_tenant_are_bounded_and_cost_no_other_tenant(kept):
    store, create = kept
    first, *_ = [create("a") for _ in range(MAX_OPEN_BATCHES)]
    with pytest.raises(TooManyBatchesError, match="100 batches are open"):
        create("a")
    create("b")
    store.move(first, "cancelled")
    create("a")


def test_the_oldest_batches_that_have_ended_are_forgotten(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_ENDED_BATCHES", 2)
    store, create = kept
    made = [create("a") for _ in range(4)]
    other = create("b")
    for place, batch in enumerate([*made, other]):
        batch.created_at = place
        store.move(batch, "failed")
    last = create("a")
    assert store.of_tenant("a") == [last, made[3], made[2]]
    assert store.of_tenant("b") == [other]
    records = {path.stem for path in (tmp_path / "batches").glob("batch_*.json")}
    assert records == {batch.id for batch in (last, made[3], made[2], other)}


def test_lines_beyond_the_most_are_not_read(kept, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_LINES", 3)
    store, create = kept
    for lines, code in ((3, "invalid_method"), (1000, "too_many_requests")):
        batch = create("a", b"".join(b'{"custom_id": "%d"}\n' % number for number in range(lines)))
        assert store.validate(batch) == [0, 19, 38]
        assert batch.errors[-1].code == code
