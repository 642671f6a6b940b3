"""What is kept of a batch on a disk that is full for a moment."""

import resource
from types import SimpleNamespace

import pytest

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


def test_open_batches_of_a_tenant_are_bounded_and_cost_no_other_tenant(tmp_path):
    files = FileStore(tmp_path / "files", 10**6)
    store = BatchStore(tmp_path / "batches", files)

    def create(tenant):
        file = files.new_file(tenant, "lines.jsonl", "batch", b"{}", 60)
        fields = {"endpoint": ENDPOINTS[0], "input_file_id": file.id, "completion_window": "24h", "metadata": None}
        return store.create(tenant, SimpleNamespace(**fields))

    first, *_ = [create("a") for _ in range(MAX_OPEN_BATCHES)]
    with pytest.raises(TooManyBatchesError, match="100 batches are open"):
        create("a")
    create("b")
    store.move(first, "cancelled")
    create("a")
