"""A store of KV blocks on disk: slab files with self-describing slots.

A slab file begins with a header that names the model whose KV it holds. Each slot is a header of 64 bytes (digest,
sequence, checksum) and the block's bytes. The bytes are written before the header: a slot whose write was cut short has
no header, or its checksum fails. The index is rebuilt from the headers at start. Nothing is synced: a killed process
loses no completed write, and a block that a power failure damages fails its checksum. Self-describing slots follow
log-structured stores (Rosenblum and Ousterhout, "The design and implementation of a log-structured file system", 1992).
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from tokenyard.base import ConfigError
from tokenyard.base.blocks import DIGEST_BYTES, touch_all
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.kv_store.store import (
    Block,
    BlockFormat,
    SingleStore,
    StoreCounters,
    StoreFullError,
    block_checksum,
    padded,
)

logger = logging.getLogger(__name__)

MAGIC, SLOT_MAGIC = b"TYKVSLAB", b"SLOT"
VERSION = 1
FILE_HEAD = struct.Struct("<8sII8s")
"""Magic, version, length of the JSON that follows, digest (`_check_head`)."""
FILE_HEAD_BYTES = 4096
SLOT_HEAD = struct.Struct("<4sI16sQQ")
"""Magic, padding, digest of the block, sequence (larger is younger), checksum of its bytes."""
SLOT_HEAD_BYTES = 64
CHECK_BYTES = 8
FILE_BYTES = 1 << 30
LOCK_WAIT_S = 3.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class SlabStore(SingleStore):
    """Blocks in slab files of one folder, which one process uses at a time. See `store.BlockStore`.

    Each block takes `slot_bytes` of at most `max_bytes`, and `min_free_bytes` of the disk stay free. At the limit, and
    on a full disk, the least recently used blocks are evicted.
    """

    def __init__(self, folder: str, form: BlockFormat, max_bytes: int, min_free_bytes: int = 0) -> None:
        """Creates the folder if it does not exist. Raises ConfigError (one line) for a folder that cannot be used, that
        another process uses, or whose slabs hold the KV of another model or have a newer version.
        """
        self.counters = StoreCounters()
        self.slot_bytes = SLOT_HEAD_BYTES + padded(form.block_bytes)
        self._form = form
        self._folder = Path(folder)
        self._max_blocks = max_bytes // self.slot_bytes
        if self._max_blocks < 1:
            raise ConfigError(f"--hicache-storage-gb is less than one block of KV, {self.slot_bytes} bytes")
        self._per_file = max(1, (FILE_BYTES - FILE_HEAD_BYTES) // self.slot_bytes)
        self._min_free_bytes = min_free_bytes
        self._index: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._end = 0
        self._sequence = 0
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        with contextlib.ExitStack() as opened:
            opened.callback(self._close_files)
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock_fd = _lock(self._folder)
                opened.callback(os.close, self._lock_fd)
                self._open_files()
            except OSError as error:
                raise ConfigError(f"--hicache-storage-dir {folder} cannot be used: {error.strerror}") from error
            self._opened = opened.pop_all()

    # ---- lookups ---------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """How many blocks are stored."""
        return len(self._index)

    @property
    def stored_bytes(self) -> int:
        """How many bytes the blocks take."""
        return len(self._index) * self.slot_bytes

    def count_stored(self, digests: list[bytes]) -> int:
        """Length of the longest prefix of `digests` that is stored."""
        with self._lock:
            return next((i for i, digest in enumerate(digests) if digest not in self._index), len(digests))

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """The same as `count_stored`."""
        return self.count_stored(digests)

    def find_slow(self, digests: list[bytes]) -> list[int]:
        """All places: no block is in host memory, as far as this process knows."""
        return list(range(len(digests)))

    def lacks(self, digest: bytes) -> bool:
        """Whether a block is not stored."""
        return digest not in self._index

    def touch(self, digests: list[bytes]) -> None:
        """Mark the blocks of a prompt (in order) as used; the first is evicted last."""
        with self._lock:
            touch_all(self._index, digests)

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def put(self, digest: bytes, block: Block) -> bool:
        """Write a block (`padded` bytes); False if it was stored already. Raises OSError, or StoreFullError if the disk
        is full and no older block can be evicted; nothing is stored then.
        """
        with self._writing:
            if digest in self._index:
                return False
            while True:
                slot, fresh = self._take_slot()
                try:
                    self._write(slot, digest, block, fresh)
                    break
                except OSError as error:
                    with self._lock:
                        self._free.append(slot)
                    if error.errno not in FULL or not fresh:
                        raise
                    # The file stops growing here; from now on older blocks are evicted.
                    self._drop_end(slot)
            with self._lock:
                self._index[digest] = slot
            return True

    def get(self, digest: bytes, block: Block) -> bool:
        """Read a block into `block` (`padded` bytes); False, and `block` undefined, if it is missing or damaged.
        Raises OSError.
        """
        with self._lock:
            slot = self._index.get(digest)
        if slot is None:
            return False
        head = bytearray(SLOT_HEAD_BYTES)
        fd, offset = self._place(slot)
        read = os.preadv(fd, [head, block.data], offset)
        parsed = _parse_slot(head)
        if (
            read == self.slot_bytes
            and parsed is not None
            and parsed[0] == digest
            and parsed[2] == block_checksum(block)
        ):
            return True
        with self._lock:
            # A block that was evicted during the read is not damaged.
            if self._index.get(digest) == slot:
                del self._index[digest]
                self._free.append(slot)
                self.counters.damaged += 1
        return False

    def prefetch(self, digest: bytes) -> bool:
        """Read a block into the kernel's page cache and wait for it; False if it is missing."""
        with self._lock:
            slot = self._index.get(digest)
        if slot is None:
            return False
        fd, offset = self._place(slot)
        os.pread(fd, self.slot_bytes, offset)
        return True

    def clear(self) -> None:
        """Remove all blocks and free their space."""
        with self._writing, self._lock:
            self._index.clear()
            self._free.clear()
            self._end = 0
            for fd in self._files.values():
                os.ftruncate(fd, FILE_HEAD_BYTES)

    def close(self) -> None:
        """Close the files and let other processes use the folder."""
        self._opened.close()

    # ---- slots -----------------------------------------------------------------------------------------------------

    def _take_slot(self) -> tuple[int, bool]:
        """Return a slot to write to, and whether the file grows. Raises StoreFullError, or OSError for a new file."""
        with self._lock:
            if self._free:
                return self._free.pop(), False
            grows = self._end < self._max_blocks and self._may_grow()
            if not grows:
                if not self._index:
                    raise StoreFullError("the disk is full")
                self.counters.evicted += 1
                return self._index.popitem(last=False)[1], False
            slot = self._end
            if slot // self._per_file not in self._files:
                self._files[slot // self._per_file] = self._new_file(slot // self._per_file)
            self._end += 1
            return slot, True

    def _may_grow(self) -> bool:
        room = os.statvfs(self._folder)
        return room.f_bavail * room.f_frsize - self.slot_bytes >= self._min_free_bytes

    def _drop_end(self, slot: int) -> None:
        """Handle a full disk: truncate the file before this slot, and stop growing."""
        with self._lock:
            self._free.remove(slot)
            self._end = slot
            self._max_blocks = slot
            fd, offset = self._place(slot)
            os.ftruncate(fd, offset)

    def _write(self, slot: int, digest: bytes, block: Block, fresh: bool) -> None:
        fd, offset = self._place(slot)
        if not fresh:
            _write_all(fd, bytes(SLOT_HEAD_BYTES), offset)
        _write_all(fd, block.data, offset + SLOT_HEAD_BYTES)
        self._sequence += 1
        head = SLOT_HEAD.pack(SLOT_MAGIC, 0, digest, self._sequence, block_checksum(block))
        head += _check(head)
        _write_all(fd, head.ljust(SLOT_HEAD_BYTES, b"\0"), offset)

    def _place(self, slot: int) -> tuple[int, int]:
        """File descriptor and offset of a slot."""
        number, place = divmod(slot, self._per_file)
        return self._files[number], FILE_HEAD_BYTES + place * self.slot_bytes

    # ---- files -----------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / f"slab-{number:04d}.kv"

    def _new_file(self, number: int) -> int:
        fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            body = msgspec.json.encode(self._form)
            head = FILE_HEAD.pack(MAGIC, VERSION, len(body), _check_head(VERSION, body)) + body
            os.ftruncate(fd, 0)
            _write_all(fd, head.ljust(FILE_HEAD_BYTES, b"\0"), 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _open_files(self) -> None:
        """Find the blocks in existing slabs; drop those beyond the limit."""
        found: list[tuple[int, bytes, int]] = []
        numbers = sorted(int(path.stem[5:]) for path in self._folder.glob("slab-[0-9]*.kv") if path.stem[5:].isdigit())
        # Check all slabs before changing any.
        for number in numbers:
            self._files[number] = os.open(self._path(number), os.O_RDWR)
        for number in [number for number in numbers if not self._is_ours(number)]:
            self.counters.damaged += 1
            os.close(self._files.pop(number))
            # On a full disk the engine starts all the same, without the room of this slab.
            with _unless_full():
                self._files[number] = self._new_file(number)
        for number in self._files:
            self._scan(number, found)
        found.sort()
        for sequence, digest, slot in found:
            if (older := self._index.pop(digest, None)) is not None:
                self._free.append(older)
            self._index[digest] = slot
            self._sequence = sequence
        taken = {*self._index.values()}
        self._end = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._end) if slot not in taken and slot // self._per_file in self._files]
        self.counters.found = len(self._index)

    def _is_ours(self, number: int) -> bool:
        """Check the header of a slab; False if it has none or a damaged one, so that the slab is to be created again.

        Raises ConfigError for a slab of another model or a newer version, and for a file that is not a slab.
        """
        path, fd = self._path(number), self._files[number]
        head = os.pread(fd, FILE_HEAD_BYTES, 0)
        if len(head) < FILE_HEAD_BYTES or not head.strip(b"\0"):
            return False
        magic, version, length, check = FILE_HEAD.unpack_from(head)
        body = head[FILE_HEAD.size : FILE_HEAD.size + length]
        whole = check == _check_head(version, body)
        advice = "give another --hicache-storage-dir, or delete the file"
        if magic != MAGIC and not whole:
            raise ConfigError(f"{path} is no slab of KV; {advice}")
        if magic != MAGIC or not whole:
            # Ours, with wrong bits. Whose KV it holds is not known, and a cache is no reason not to start.
            logger.warning("%s is a slab whose header is damaged; its blocks are dropped", path)
            return False
        if version > VERSION:
            raise ConfigError(f"{path} is a slab of version {version}, and this is version {VERSION}; {advice}")
        try:
            form = msgspec.json.decode(body, type=BlockFormat)
        except DECODE_ERRORS:
            raise ConfigError(f"{path} is a slab that names no model; {advice}") from None
        if form != self._form:
            differ = [name for name in form.__struct_fields__ if getattr(form, name) != getattr(self._form, name)]
            shown = ", ".join(f"{name} {getattr(form, name)}, here {getattr(self._form, name)}" for name in differ)
            raise ConfigError(f"{path} holds KV of another model or setting ({shown}); {advice}")
        return True

    def _scan(self, number: int, found: list[tuple[int, bytes, int]]) -> None:
        """Append (sequence, digest, slot) of each complete slot of a slab to `found`."""
        fd, first = self._files[number], number * self._per_file
        size = os.fstat(fd).st_size
        allowed = FILE_HEAD_BYTES + max(0, min(self._per_file, self._max_blocks - first)) * self.slot_bytes
        if size > allowed:
            os.ftruncate(fd, allowed)
            size = allowed
        for place in range(-(-(size - FILE_HEAD_BYTES) // self.slot_bytes)):
            offset = FILE_HEAD_BYTES + place * self.slot_bytes
            head = os.pread(fd, SLOT_HEAD_BYTES, offset)
            parsed = _parse_slot(head)
            whole = offset + self.slot_bytes <= size
            if parsed is not None and whole:
                found.append((parsed[1], parsed[0], first + place))
            elif not whole or head.strip(b"\0"):
                self.counters.damaged += 1

    def _close_files(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _lock(folder: Path) -> int:
    """Lock a folder for this process; wait briefly for another to end. Raises ConfigError if it stays in use."""
    try:
        # A link could lead to any file of this user, which the process id would overwrite.
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_nlink != 1:
            os.close(fd)
            raise OSError(errno.ELOOP, "it is a link")
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise ConfigError(f"--hicache-storage-dir {folder}: its file lock is no plain file; remove it") from None
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise ConfigError(
                f"--hicache-storage-dir {folder} is in use by another engine (process {owner}); give each its own"
            ) from None
        os.ftruncate(fd, 0)
        # Only a message to others names the process.
        with _unless_full():
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    """Do something, or not, where the disk is full. Raises other errors of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`. Raises OSError."""
    left = memoryview(data).cast("B")
    while len(left):
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done


def _check(data: bytes) -> bytes:
    return blake2b(data, digest_size=CHECK_BYTES).digest()


def _check_head(version: int, body: bytes) -> bytes:
    """Digest in a slab's header. From version 2 on it covers the version, so that a wrong bit is no newer version."""
    return _check(body if version <= 1 else version.to_bytes(4, "little") + body)


def _parse_slot(head: bytes | bytearray) -> tuple[bytes, int, int] | None:
    """Digest, sequence and checksum in the header of a slot; None if it is empty or damaged."""
    if len(head) < SLOT_HEAD_BYTES:
        return None
    magic, _, digest, sequence, check = SLOT_HEAD.unpack_from(head)
    whole = magic == SLOT_MAGIC and len(digest) == DIGEST_BYTES
    data = bytes(head[: SLOT_HEAD.size])
    return (digest, sequence, check) if whole and head[SLOT_HEAD.size :][:CHECK_BYTES] == _check(data) else None
