"""Slab files: what survives, what is refused, and what is skipped."""

import os
import signal
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.contract.test_stores import DIGESTS, FORM, content, holds
from tokenyard.base import ConfigError
from tokenyard.kv_store import slab
from tokenyard.kv_store.slab import FILE_HEAD_BYTES, SLOT_HEAD_BYTES, SlabStore
from tokenyard.kv_store.store import StoreFullError, block_buffer, padded

SLOT = SLOT_HEAD_BYTES + padded(FORM.block_bytes)


def opened(folder, slots: int = 20, **changes) -> SlabStore:
    return SlabStore(str(folder), msgspec.structs.replace(FORM, **changes), SLOT * slots)


def filled(folder, count: int = 6) -> Path:
    store = opened(folder)
    for place in range(count):
        store.put(DIGESTS[place], content(place))
    store.close()
    return folder / "slab-0000.kv"


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def slot_at(place: int) -> int:
    return FILE_HEAD_BYTES + place * SLOT


def test_a_restart_finds_all_blocks_and_continues(tmp_path):
    filled(tmp_path)
    store = opened(tmp_path)
    assert store.counters.found == store.count_stored(DIGESTS) == 6
    assert all(holds(store, place) for place in range(6))
    store.put(DIGESTS[6], content(6))
    store.close()
    store = opened(tmp_path)
    assert store.count_stored(DIGESTS) == 7
    store.close()


def test_a_process_that_is_killed_loses_nothing_that_it_wrote(tmp_path):
    code = (
        "import sys; from tests.kv_store.test_slab import *; store = opened(sys.argv[1])\n"
        "for place in range(6): store.put(DIGESTS[place], content(place))\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path.cwd(), **pipes) as process:
        assert process.stdout.readline() == b"written\n"
        with pytest.raises(ConfigError, match=f"in use by another engine .process {process.pid}"):
            opened(tmp_path)
        process.send_signal(signal.SIGKILL)
    store = opened(tmp_path)
    assert all(holds(store, place) for place in range(6))
    assert store.counters.damaged == 0
    store.close()


def test_what_a_crash_cut_short_is_skipped_and_counted(tmp_path):
    path = filled(tmp_path)
    os.truncate(path, slot_at(5) + SLOT // 2)
    poke(path, slot_at(1) + SLOT_HEAD_BYTES + 100, b"spoilt")
    poke(path, slot_at(3) + 10, b"spoilt")
    store = opened(tmp_path)
    assert (store.counters.found, store.counters.damaged) == (4, 2)
    assert [holds(store, place) for place in range(6)] == [True, False, True, False, True, False]
    assert store.counters.damaged == 3, "a block is looked at when it is read"
    assert store.blocks == 3
    for place in (1, 3, 5):
        store.put(DIGESTS[place], content(place))
    assert all(holds(store, place) for place in range(6))
    assert path.stat().st_size == slot_at(6), "room of damaged slots is used again"
    store.close()


def newer_head():
    """The header of a slab of the next version, whose digest covers the version."""
    version, body = struct.pack("<I", slab.VERSION + 1), b"{}"
    check = blake2b(version + body, digest_size=slab.CHECK_BYTES).digest()
    return slab.MAGIC + version + struct.pack("<I", len(body)) + check + body


@pytest.mark.parametrize("bit", [0, 8 * 8 + 1, 12 * 8, 16 * 8 + 3, 30 * 8])
def test_a_slab_with_a_wrong_bit_in_its_header_is_recreated(tmp_path, bit):
    path = filled(tmp_path)
    poke(path, bit // 8, bytes([path.read_bytes()[bit // 8] ^ 1 << bit % 8]))
    store = opened(tmp_path)
    assert (store.blocks, store.counters.damaged) == (0, 1)
    store.put(DIGESTS[0], content(0))
    store.close()
    store = opened(tmp_path)
    assert (store.counters.found, store.counters.damaged) == (1, 0)
    store.close()


def test_a_damaged_slab_is_left_alone_where_another_is_refused(tmp_path):
    path = filled(tmp_path)
    poke(path, 30, b"x")
    before = path.read_bytes()
    (tmp_path / "slab-0001.kv").write_bytes(b"SQLite format 3\0".ljust(FILE_HEAD_BYTES, b"x"))
    with pytest.raises(ConfigError, match="no slab of KV"):
        opened(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, FILE_HEAD_BYTES])
def test_a_slab_without_a_header_is_recreated(tmp_path, size):
    path = tmp_path / "slab-0000.kv"
    path.write_bytes(bytes(size))
    store = opened(tmp_path)
    assert (store.blocks, store.counters.damaged) == (0, 1)
    store.put(DIGESTS[0], content(0))
    assert holds(store, 0)
    store.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: poke(path, 0, newer_head()), "version 2, and this is version 1"),
        (lambda path: poke(path, 0, b"SQLite format 3\0"), "no slab of KV"),
    ],
)
def test_what_is_not_ours_is_refused_in_one_line_and_left_alone(tmp_path, spoil, says):
    path = filled(tmp_path)
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=says) as refusal:
        opened(tmp_path)
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("changes", [{"model": "another"}, {"dtype": "bfloat16"}, {"block_bytes": 3968}])
def test_kv_of_another_model_is_refused(tmp_path, changes):
    path = filled(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another model or setting") as refusal:
        opened(tmp_path, **changes)
    assert str(next(iter(changes.values()))) in str(refusal.value)
    assert path.read_bytes() == before
    store = opened(tmp_path)
    assert store.count_stored(DIGESTS) == 6, "a refusal leaves no lock behind"
    store.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_lock_that_is_no_plain_file_is_refused_and_left_alone(tmp_path, kind):
    victim, folder = tmp_path / "victim", tmp_path / "kv"
    victim.write_text("precious")
    folder.mkdir()
    if kind == "link":
        (folder / "lock").symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, folder / "lock")
    else:
        os.mkfifo(folder / "lock")
    with pytest.raises(ConfigError, match="its file lock is no plain file"):
        opened(folder)
    assert victim.read_text() == "precious"


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(slab, "LOCK_WAIT_S", 0.0)
    store = opened(tmp_path / "used")
    with pytest.raises(ConfigError, match="in use by another engine"):
        opened(tmp_path / "used")
    store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: "):
        opened(tmp_path / "file")
    with pytest.raises(ConfigError, match="less than one block"):
        opened(tmp_path / "small", slots=0)


def test_a_smaller_quota_drops_what_is_beyond(tmp_path):
    path = filled(tmp_path)
    store = opened(tmp_path, slots=4)
    assert store.blocks == 4
    assert path.stat().st_size == slot_at(4)
    store.put(DIGESTS[7], content(7))
    assert (store.blocks, holds(store, 7), holds(store, 0)) == (4, True, False)
    store.close()


def test_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(slab, "FILE_BYTES", FILE_HEAD_BYTES + 3 * SLOT)
    filled(tmp_path, count=8)
    assert sorted(path.name for path in tmp_path.glob("*.kv")) == [f"slab-000{number}.kv" for number in range(3)]
    store = opened(tmp_path)
    assert all(holds(store, place) for place in range(8))
    store.close()


def test_a_full_disk_takes_what_fits_and_then_evicts_old_blocks(tmp_path, monkeypatch):
    """A limit on the size of files simulates a full disk; writes fail in the middle of a slot."""
    room, real = slot_at(3) + SLOT // 2, os.pwrite

    def full(fd, data, offset):
        left = room - offset
        if left <= 0:
            raise OSError(28, "No space left on device")
        return real(fd, bytes(data)[:left], offset)

    store = opened(tmp_path)
    monkeypatch.setattr(slab.os, "pwrite", full)
    for place in range(6):
        assert store.put(DIGESTS[place], content(place))
    assert store.blocks == 3
    assert all(holds(store, place) for place in (3, 4, 5))
    monkeypatch.undo()
    store.close()
    store = opened(tmp_path)
    assert (store.blocks, store.counters.damaged) == (3, 0)
    store.close()


def test_a_full_disk_lets_the_engine_start_again_and_stores_once_there_is_room(tmp_path, monkeypatch):
    """A kill while a slab was made has left one without a header."""
    (tmp_path / "slab-0000.kv").touch()

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slab.os, "pwrite", full)
    store = opened(tmp_path)
    with pytest.raises(OSError, match="No space"):
        store.put(DIGESTS[0], content(0))
    monkeypatch.undo()
    assert store.put(DIGESTS[0], content(0))
    assert holds(store, 0)
    store.close()


def test_a_disk_with_less_free_than_it_must_have_takes_nothing(tmp_path):
    store = SlabStore(str(tmp_path), FORM, SLOT * 20, min_free_bytes=1 << 60)
    with pytest.raises(StoreFullError):
        store.put(DIGESTS[0], content(0))
    assert store.blocks == 0
    store.close()


def test_a_write_that_fails_keeps_nothing(tmp_path, monkeypatch):
    store = opened(tmp_path, slots=1)
    store.put(DIGESTS[0], content(0))

    def broken(fd, data, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(slab.os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output"):
        store.put(DIGESTS[1], content(1))
    monkeypatch.undo()
    assert store.count_stored([DIGESTS[1]]) == 0
    assert store.put(DIGESTS[1], content(1))
    assert holds(store, 1)
    store.close()


def test_buffers_have_room_for_the_checksum():
    assert len(block_buffer(FORM.block_bytes)) == padded(FORM.block_bytes) == 4096
    assert np.count_nonzero(block_buffer(1)) == 0
