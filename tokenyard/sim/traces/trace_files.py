"""Reads trace files: plain, gzip or zstd, with a one-line error if something is wrong with them.

The compression is detected by the first bytes of a file, not by its name.
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tokenyard.base import ConfigError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""How packed files begin (RFC 1952 2.3.1, RFC 8878 3.1.1)."""

_SUFFIXES = {".gz": GZIP, ".zst": ZSTD}
MAX_NUMBER = 1e20
"""Larger numbers are mistakes: even nanoseconds since 1970 are below."""


def read_bytes(path: Path) -> bytes:
    """The whole file, unpacked. Raises ConfigError if it cannot be read or is cut off."""
    try:
        raw = path.read_bytes()
        packing = _packing(raw, path)
        if packing == GZIP:
            return gzip.decompress(raw)
        if packing == ZSTD:
            return _unpack_zstd(raw, path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise ConfigError(f"{path} is cut off or no gzip file") from None
    return raw


def _packing(raw: bytes, path: Path) -> bytes:
    """GZIP, ZSTD or nothing, by the first bytes `raw`.

    If these match none, the name decides, so that a compressed file whose beginning is lost is not read as text.
    """
    found = next((magic for magic in (GZIP, ZSTD) if raw.startswith(magic)), b"")
    return found or _SUFFIXES.get(path.suffix, b"")


def _unpack_zstd(raw: bytes, path: Path) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{path}: reading .zst needs the package zstandard; run pip install 'tokenyard[sim]', or unpack the file"
        ) from None
    parts: list[bytes] = []
    try:
        while raw:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(raw))
            if not frame.eof:
                raise zstandard.ZstdError("the last frame has no end")
            raw = frame.unused_data
        return b"".join(parts)
    except zstandard.ZstdError:
        raise ConfigError(f"{path} is cut off or no zstd file") from None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with `file, line N` for error messages. The file is read lazily.

    Raises ConfigError, when reading gets there, for a file that cannot be read, is cut off or is not text.
    """
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path.name}, line {number}", line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text file in UTF-8; is it another format?") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{path} is cut off or no gzip file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        packing = _packing(file.read(len(ZSTD)), path)
    if packing == GZIP:
        return gzip.open(path, "rt", encoding="utf-8-sig")
    if packing == ZSTD:
        return io.StringIO(read_bytes(path).decode("utf-8-sig"))
    return path.open(encoding="utf-8-sig")


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One JSON object per line. Raises ConfigError naming a line that is cut off or not an object."""
    for where, line in read_lines(path):
        yield where, json_object(line, where)


def json_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of one line. Raises ConfigError if it is cut off or something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: cut off or not JSON: {line[:60]!r}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a JSON object is needed, not {line[:60]!r}")
    return value


def read_members(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Files ending with `suffix` in a folder or a tar archive, by name, or the single file itself.

    Archive and file may be compressed (.gz or .zst).
    """
    if path.is_dir():
        for entry in sorted(path.rglob(f"*{suffix}")):
            yield entry.name, read_bytes(entry)
        return
    if path.name.removesuffix(".gz").removesuffix(".zst").endswith(suffix):
        yield path.name, read_bytes(path)
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(read_bytes(path))) as archive:
            members = [member for member in archive.getmembers() if member.isfile() and member.name.endswith(suffix)]
            for member in sorted(members, key=lambda member: member.name):
                file = archive.extractfile(member)
                assert file is not None  # only regular files were kept
                yield Path(member.name).name, file.read()
    except (tarfile.TarError, EOFError):
        raise ConfigError(f"{path} is cut off or no tar archive") from None


def number(record: dict[str, Any], key: str, where: str) -> float:
    """`record[key]` as a number. Raises ConfigError if it is missing, not a number, or out of range."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "is missing" if key not in record else f"is {str(value)[:40]!r}, not a number"
        raise ConfigError(f"{where}: {key} {what}; is this the right --trace-format?")
    if not abs(value) < MAX_NUMBER:
        raise ConfigError(f"{where}: {key} is {str(value)[:40]}; it must be a finite number below {MAX_NUMBER:g}")
    return value


def whole(record: dict[str, Any], key: str, where: str) -> int:
    """`record[key]` as a whole number. Raises ConfigError if it is missing or not a whole number."""
    value = number(record, key, where)
    if value != int(value):
        raise ConfigError(f"{where}: {key} is {value}, not a whole number")
    return int(value)


def name_of(record: dict[str, Any], key: str, where: str) -> str:
    """`record[key]` as a name, "" if it is missing or null; a number is a name too. Raises ConfigError for others."""
    value = record.get(key)
    if value is not None and not isinstance(value, str | int):
        raise ConfigError(f"{where}: {key} is {str(value)[:40]!r}, not a name")
    return "" if value is None else str(value)
