"""Files of weights as products take them, so that a start maps them instead of laying them out.

`tokenyard convert` writes one next to a model. Config, norms and biases are still read from the model's own files. A
file is used only where everything that decides its bytes is as it was.

Layout: MAGIC, the length of the header (uint64), blake2b of the header, the header (JSON), zeros up to a page; the
weights of products, a packed embedding, each with zeros up to a page; the sum of each SUM_WORDS words of these. Numbers
are little-endian.
"""

import fcntl
import glob
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenyard.base import ConfigError
from tokenyard.executor.formats.packed import PackedBytes

logger = logging.getLogger(__name__)

MAGIC = b"tokenyard packed"
HEAD = struct.Struct(f"<{len(MAGIC)}sQ16s")
PAGE = mmap.ALLOCATIONGRANULARITY
SUM_WORDS = 1 << 19
"""Words of 64 bits with one checksum: 4 MiB."""
MAX_HEADER_BYTES = 1 << 26
HEADER = {"facts": dict, "sources": list, "layout": str, "bytes": list}
"""Fields of the header: see MISFITS, source_files and WeightsMemory."""
BESIDE = ".packed"
"""What follows a GGUF file's name, or `model` in a folder."""

MISFITS = {
    "kernels": "was made by another version of tokenyard",
    "instructions": "was made for {there} kernels, and this machine uses {here}",
    "dtype": "was made for --dtype {there}, and this is {here}",
    "quantization": "was made with --quantization {there}, and this is {here}",
    "config": "was made for another config.json",
    "weights": "was made from other weights",
    "layout": "was made from other weights",
    "bytes": "was made from other weights",
}
"""What is wrong with a file, by the fact that differs."""


class UnusableFileError(ConfigError):
    """A converted file cannot be used; the message is one sentence."""


class WeightsMemory(Protocol):
    """Where a model's weights of products, and a packed embedding, lie."""

    filled: bool
    """Whether they are there already."""

    def reserve(self, layout: str, sizes: tuple[int, int]) -> tuple[PackedBytes, PackedBytes]:
        """Return memory of so many bytes for each; may be called once. layout: says how the bytes lie.

        Raises UnusableFileError where they lie otherwise.
        """


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that weights come from. mtime_ns: when it was changed; digest: of all its bytes, "" if not known."""

    name: str
    size: int
    mtime_ns: int
    digest: str = ""


def source_files(folder: Path, *, digests: bool = False) -> list[SourceFile]:
    """Return the files of a model's weights, GGUF or safetensors, with links resolved."""
    found = []
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))):
        stat = path.stat()
        found.append(SourceFile(path.name, stat.st_size, stat.st_mtime_ns, _digest(path) if digests else ""))
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def same_sources(folder: Path, recorded: Any) -> bool:
    """Whether a folder's files are those of `recorded`: by size and time, or by content where only the time differs."""
    try:
        there = [SourceFile(**one) for one in recorded]
    except TypeError:
        return False
    here = source_files(folder)
    if [(one.name, one.size) for one in here] != [(one.name, one.size) for one in there]:
        return False
    return all(
        ours.mtime_ns == theirs.mtime_ns or _digest(folder / ours.name) == theirs.digest
        for ours, theirs in zip(here, there, strict=True)
    )


class ConvertedFile:
    """See WeightsMemory. A file that was written before, mapped.

    facts: what must be as it was, by the names in MISFITS; of `weights` the model's folder.

    Raises UnusableFileError for a file that is damaged or of other facts.
    """

    filled = True

    def __init__(self, path: Path, facts: Mapping[str, str], folder: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header, begin = _read_header(file.read(HEAD.size), file, size)
            self._data: PackedBytes = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise UnusableFileError(f"{path} is damaged or no converted file: {error}") from error
        for name, here in facts.items():
            self._compare(name, header["facts"].get(name), here)
        if not same_sources(folder, header["sources"]):
            self._refuse("weights")
        self._header = header
        self._body = self._data[begin:]

    def reserve(self, layout: str, sizes: tuple[int, int]) -> tuple[PackedBytes, PackedBytes]:
        """See WeightsMemory. Reads everything once, to compare it with its checksums."""
        self._compare("layout", self._header["layout"], layout)
        self._compare("bytes", self._header["bytes"], list(sizes))
        end = sum(map(_up, sizes))
        body, sums = self._body[:end], self._body[end:]
        if len(body) < end or _checksums(body).tobytes() != sums.tobytes():
            raise UnusableFileError(f"{self._path} is damaged: its checksums do not fit; run `tokenyard convert` again")
        return _cut(body, sizes)

    def _compare(self, name: str, there: Any, here: Any) -> None:
        if there != here:
            self._refuse(name, there=there, here=here)

    def _refuse(self, name: str, **values: Any) -> None:
        raise UnusableFileError(f"{self._path} {MISFITS[name].format(**values)}; run `tokenyard convert` again")


def _read_header(head: bytes, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where its bytes begin. Raises what reading other bytes raises."""
    magic, length, digest = HEAD.unpack(head)
    if magic != MAGIC:
        raise ValueError("it does not begin as one")
    if length > min(size, MAX_HEADER_BYTES):
        raise ValueError("its header is cut off")
    text = file.read(length)
    if header_digest(text) != digest:
        raise ValueError("its header has another checksum")
    header = json.loads(text)
    if not isinstance(header, dict) or any(not isinstance(header.get(name), kind) for name, kind in HEADER.items()):
        raise ValueError("its header lacks fields")
    return header, _up(HEAD.size + length)


class ConvertedFileWriter:
    """See WeightsMemory. A file that is written; it appears whole, at `finish`, or not at all.

    facts: see ConvertedFile.
    """

    filled = False

    def __init__(self, path: Path, facts: Mapping[str, str], folder: Path) -> None:
        self._path = path
        sources = source_files(folder, digests=True)
        self._header = {"facts": dict(facts), "sources": [asdict(one) for one in sources]}
        # Who may not read the weights may not read them here either.
        self._mode = 0o644
        for one in sources:
            self._mode &= 0o600 | (folder / one.name).stat().st_mode
        self._scratch: Path | None = None
        self._lock: int | None = None

    def reserve(self, layout: str, sizes: tuple[int, int]) -> tuple[PackedBytes, PackedBytes]:
        """See WeightsMemory. Raises ConfigError where the file cannot be written."""
        text = json.dumps(self._header | {"layout": layout, "bytes": list(sizes)}).encode()
        head = HEAD.pack(MAGIC, len(text), header_digest(text)) + text
        begin, size = _up(len(head)), sum(map(_up, sizes))
        with self._writing():
            self._remove_abandoned()
            handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
            self._scratch = Path(name)
            self._lock = os.dup(handle)
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            with os.fdopen(handle, "r+b") as file:
                # A sparse file would fail, where the disk is full, only as it is written, and by a signal.
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, begin + size)
                os.ftruncate(file.fileno(), begin + size)
                file.write(head)
                file.flush()
                body: PackedBytes = np.memmap(file, np.uint8, "r+", begin, (size,))
        self._body = body
        return _cut(body, sizes)

    def finish(self) -> int:
        """Write the checksums and put the file in its place; returns its bytes. Raises ConfigError where it cannot."""
        assert self._scratch is not None
        sums = _checksums(self._body)
        with self._writing():
            with self._scratch.open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(sums.tobytes())
                file.flush()
                os.fsync(file.fileno())
            size = self._scratch.stat().st_size
            self._scratch.chmod(self._mode)
            self._scratch.replace(self._path)
        self._scratch = None
        self._unlock()
        return size

    def discard(self) -> None:
        """Remove what was written of a file that is not finished."""
        if self._scratch is not None:
            self._scratch.unlink(missing_ok=True)
            self._scratch = None
        self._unlock()

    def _remove_abandoned(self) -> None:
        """Remove what converts left that were killed: their files are locked by nobody.

        What is locked, another user's, or gone meanwhile stays as it is.
        """
        for path in self._path.parent.glob(f".{glob.escape(self._path.name)}.*"):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from error


def _cut(body: PackedBytes, sizes: tuple[int, int]) -> tuple[PackedBytes, PackedBytes]:
    first, second = sizes
    return body[:first], body[_up(first) : _up(first) + second]


def _up(size: int) -> int:
    """Bytes of whole pages."""
    return -(-size // PAGE) * PAGE


def header_digest(text: bytes) -> bytes:
    """The checksum that stands before a header; it finds damage, and keeps nobody from writing a header."""
    return hashlib.blake2b(text, digest_size=16).digest()


def _checksums(body: PackedBytes) -> npt.NDArray[np.uint64]:
    """The sum of each SUM_WORDS words, the last of fewer; body: whole pages."""
    words = body.view(np.uint64)
    return np.add.reduceat(words, np.arange(0, len(words), SUM_WORDS)) if len(words) else words
