"""What is kept of a batch on a disk that is full for a moment."""

import resource

import pytest

from tokenyard.batch.batch_store import ENDPOINTS, Answer, Batch, BatchStore
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
