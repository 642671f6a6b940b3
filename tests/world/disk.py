"""Disks of the world: files in a folder of each host whose writes take time, are cut short, get lost or fail."""

import errno
import os
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.world.clock import NS, Clock
from tests.world.lockstep import running
from tests.world.loop import current

UNSYNCED_S = 5.0
"""What was written so long before the power fails may be lost, in any order."""


@dataclass
class Disk:
    """The disk of a host.

    slow_s: what each call takes in addition.
    full: whether files cannot grow.
    broken: whether reads and writes fail.
    open_fds: by number, the process that opened it, and the path.
    written: what was there before each of the latest writes: time, path, offset, bytes.
    synced: what files held when they were last synced, by inode.
    names: the inodes of the names in each folder when that was last synced.
    """

    folder: Path
    slow_s: float = 0.0
    full: bool = False
    broken: bool = False
    open_fds: dict[int, tuple[str, Path]] = field(default_factory=dict)
    written: deque[tuple[int, Path, int, bytes]] = field(default_factory=deque)
    synced: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, dict[str, int]] = field(default_factory=dict)


class Disks:
    """Stands for the module `os` where files of KV are read and written."""

    def __init__(self, clock: Clock, rng: random.Random, folder: Path) -> None:
        self._clock, self._rng, self._folder = clock, rng, folder
        self.of: dict[str, Disk] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def add(self, host: str) -> Disk:
        """Give a host a disk."""
        disk = self.of[host] = Disk(self._folder / host)
        disk.folder.mkdir()
        return disk

    # Faults.

    def crash(self, name: str, *, power: bool) -> None:
        """A process, or all of a host, has ended: the kernel closes its files. Without power, it loses what it kept."""
        disk = self.of.get(name.partition("/")[0])
        if disk is None:
            return
        for fd, (owner, _) in list(disk.open_fds.items()):
            if f"{owner}/".startswith(f"{name}/"):
                os.close(fd)
                del disk.open_fds[fd]
        if "/" not in name:  # The API process, which writes answers, lives on when its scheduler ends.
            self._lose_unsynced(disk, power=power)
        while power and disk.written:
            at_ns, path, offset, before = disk.written.pop()
            if self._clock.now_ns - at_ns < UNSYNCED_S * NS and self._rng.random() < 0.5:
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(before)

    def _lose_unsynced(self, disk: Disk, *, power: bool) -> None:
        """Cut a write to a file of answers short; without power, also undo at random what was not synced."""
        for path in sorted(disk.folder.glob("files/batches/*.answers")):
            if self._rng.random() < 0.5:
                with path.open("ab") as file:
                    file.write(b'{"place":0,"succeeded":tr')
        for folder in sorted(disk.folder.glob("files/*/")) if power else ():
            names = disk.names.get(folder, {})
            for name in sorted(_inodes(folder).keys() | names.keys()):
                self._lose_name(disk, folder / name, names.get(name))
            disk.names[folder] = _inodes(folder)
            disk.synced |= {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}

    def _lose_name(self, disk: Disk, path: Path, synced: int | None) -> None:
        """Bring a name back to the inode that it had when its folder was synced, or not, and lose unsynced content."""
        now = path.stat().st_ino if path.exists() else None
        if now != synced and self._rng.random() < 0.5:
            path.unlink(missing_ok=True)
            now = synced
        if now is not None:
            kept = disk.synced.get(now, b"")
            rest = path.read_bytes()[len(kept) :] if path.exists() else b""
            path.write_bytes(kept + rest[: self._rng.randint(0, len(rest))])

    def flip(self, host: str) -> None:
        """Change some bits of what is stored."""
        for path in sorted(self.of[host].folder.glob("**/slab-*.kv")):
            size = path.stat().st_size
            with open(path, "r+b") as file:
                for _ in range(8 if size > 4096 else 0):
                    file.seek(at := self._rng.randrange(4096, size))
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    # What the product calls.

    def _disk(self) -> Disk:
        process = current.get()
        assert process is not None
        return self.of[process.name.partition("/")[0]]

    def _wait(self, disk: Disk) -> None:
        thread = running.get()
        assert thread is not None, "the event loop waits for a disk"
        seconds = self._rng.uniform(0.00005, 0.001) + disk.slow_s
        thread.wait_until(self._clock.now_ns + round(seconds * NS), wakes_early=False)
        if disk.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        process = current.get()
        assert process is not None
        fd = os.open(path, flags, mode)
        self._disk().open_fds[fd] = process.name, Path(path)
        return fd

    def close(self, fd: int) -> None:
        if self._disk().open_fds.pop(fd, None) is not None:
            os.close(fd)

    def fsync(self, fd: int) -> None:
        disk = self._disk()
        if disk.broken or disk.full:
            raise OSError(errno.ENOSPC if disk.full else errno.EIO, "the disk fails")
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            disk.names[path] = _inodes(path)
        else:
            disk.synced[os.fstat(fd).st_ino] = path.read_bytes()

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        disk, left = self._disk(), memoryview(data).cast("B")
        self._wait(disk)
        if disk.full and offset + len(left) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(left) > 1 and self._rng.random() < 0.3:
            left = left[: self._rng.randrange(1, len(left))]
        before = os.pread(fd, len(left), offset).ljust(len(left), b"\0")
        disk.written.append((self._clock.now_ns, disk.open_fds[fd][1], offset, before))
        if len(disk.written) > 1000:
            disk.written.popleft()
        return os.pwrite(fd, left, offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._wait(self._disk())
        return os.pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self._wait(self._disk())
        return os.preadv(fd, buffers, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        self._wait(self._disk())
        os.ftruncate(fd, size)


def _inodes(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
