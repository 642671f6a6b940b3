"""Files that clients upload and batches write, on disk. A file belongs to a tenant, who alone can see it."""

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenyard.base import ConfigError, InvalidRequestError

MAX_FILE_BYTES = 200_000_000
"""OpenAI's limit for the input of a batch."""

DEFAULT_AGE_S = 30 * 86400
MIN_AGE_S, MAX_AGE_S = 3600, 30 * 86400
"""OpenAI's limits of `expires_after`."""

OUTPUT = "batch_output"
"""The purpose of files that batches write, which do not count against what a tenant may keep."""

Clock = Callable[[], float]


class StoredFile(msgspec.Struct):
    """A file.

    purpose: `batch` for an input, `batch_output` for what a batch wrote.
    created_at, expires_at: Unix times.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def public(self) -> dict[str, Any]:
        """The file object of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class StorageFullError(InvalidRequestError):
    """A tenant's files take all that they may."""

    code = "storage_full"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is either whole or not there, and there once this returns."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a loss of power. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def lock_folder(folder: Path, flag: str) -> int:
    """Take a folder for this process until it ends; returns the descriptor of the lock. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"{flag} {folder} is used by another process; each needs a folder of its own") from error
    return lock


class FileStore:
    """The files in a folder. Used from several threads: uploads and ends of batches write at the same time.

    max_bytes: what the files of one tenant may take together.
    """

    def __init__(self, folder: Path, max_bytes: int, clock: Clock = time.time) -> None:
        self._folder, self._max_bytes, self._clock = folder, max_bytes, clock
        self._files: dict[str, StoredFile] = {}
        self._lock = threading.Lock()
        self._writing: Counter[str] = Counter()
        """Bytes of each tenant that are being written."""

        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("file-*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except (OSError, msgspec.MsgspecError):
                continue
            if self._data(record.id).is_file():
                self._files[record.id] = record
        for path in (*folder.glob("file-*.data"), *folder.glob("file-*.part")):
            # An upload that never ended.
            if path.suffix == ".part" or path.stem not in self._files:
                path.unlink(missing_ok=True)

    def writer(self, tenant: str, *, limited: bool = True) -> "FileWriter":
        """A new file of a tenant, which is there once its writer is closed. limited: whether it counts against what the
        tenant may keep. Raises OSError.
        """
        self.sweep()
        return FileWriter(self, tenant, limited=limited)

    def new_file(self, tenant: str, filename: str, purpose: str, data: bytes, age_s: int = DEFAULT_AGE_S) -> StoredFile:
        """Keep a file. Raises StorageFullError, and OSError if the disk does not take it."""
        writer = self.writer(tenant, limited=purpose != OUTPUT)
        try:
            writer.write(data)
            return writer.close(filename, purpose, age_s)
        finally:
            writer.discard()

    def reserve(self, tenant: str, size: int) -> None:
        """Count bytes that are about to be written. Raises StorageFullError beyond what the tenant may keep."""
        with self._lock:
            kept = (file.bytes for file in self._all() if file.tenant == tenant and file.purpose != OUTPUT)
            used = self._writing[tenant] + sum(kept)
            if used + size > self._max_bytes:
                what = f"your files may take {self._max_bytes} bytes, and this one does not fit; delete some"
                raise StorageFullError(what, param="file")
            self._writing[tenant] += size

    def release(self, tenant: str, size: int) -> None:
        """Undo `reserve`: the bytes are in a file, or are not kept."""
        with self._lock:
            self._writing[tenant] -= size
            if not self._writing[tenant]:
                del self._writing[tenant]

    def add(self, file: StoredFile, scratch: Path) -> None:
        """Keep a file whose content is written to `scratch`. Raises OSError."""
        try:
            scratch.replace(self._data(file.id))
            write_whole(self._record(file.id), msgspec.json.encode(file))
        except OSError:
            self._data(file.id).unlink(missing_ok=True)
            raise
        self._files[file.id] = file

    def now_s(self) -> int:
        """The Unix time."""
        return int(self._clock())

    def scratch(self, name: str) -> Path:
        """Where the content of a file is while it is written."""
        return self._folder / f"{name}.part"

    def find(self, tenant: str, name: str) -> StoredFile | None:
        """A tenant's file; None if there is none of this id, or it has expired."""
        file = self._files.get(name)
        if file is None or file.tenant != tenant or file.expires_at <= self._clock():
            return None
        return file

    def keep_until(self, file: StoredFile, time_s: int) -> None:
        """Have a file not expire before a Unix time. Raises OSError."""
        if file.expires_at < time_s:
            file.expires_at = time_s
            write_whole(self._record(file.id), msgspec.json.encode(file))

    def of_tenant(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the newest first."""
        self.sweep()
        own = [file for file in self._all() if file.tenant == tenant]
        return sorted(own, key=lambda file: (file.created_at, file.id), reverse=True)

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._data(file.id)

    def delete(self, file: StoredFile) -> None:
        """Remove a file."""
        self._files.pop(file.id, None)
        self._record(file.id).unlink(missing_ok=True)
        self._data(file.id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files that have expired."""
        now = self._clock()
        for file in [file for file in self._all() if file.expires_at <= now]:
            self.delete(file)

    def _all(self) -> list[StoredFile]:
        """All files as of now; others may come and go meanwhile."""
        return list(self._files.values())

    def _data(self, name: str) -> Path:
        return self._folder / f"{name}.data"

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}.json"


class FileWriter:
    """A file while it is written, piece by piece. Used from one thread at a time; `discard` once at the end."""

    def __init__(self, files: FileStore, tenant: str, *, limited: bool) -> None:
        """Raises OSError."""
        self._files, self._tenant, self._limited = files, tenant, limited
        self._id = f"file-{uuid.uuid4().hex}"
        self._scratch = files.scratch(self._id)
        self._file = self._scratch.open("wb")
        self._reserved = 0
        self.size = 0
        """Bytes written so far."""

    def write(self, data: bytes) -> None:
        """Append to the file. Raises StorageFullError, and OSError if the disk does not take it."""
        if self._limited:
            self._files.reserve(self._tenant, len(data))
            self._reserved += len(data)
        self._file.write(data)
        self.size += len(data)

    def close(self, filename: str, purpose: str, age_s: int = DEFAULT_AGE_S) -> StoredFile:
        """Keep the file. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        now = self._files.now_s()
        file = StoredFile(self._id, self._tenant, filename, purpose, self.size, now, now + age_s)
        self._files.add(file, self._scratch)
        return file

    def discard(self) -> None:
        """Give back what it holds; the file is gone unless it was closed."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._scratch.unlink(missing_ok=True)
        if self._reserved:
            self._files.release(self._tenant, self._reserved)
            self._reserved = 0


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line of a file that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)
