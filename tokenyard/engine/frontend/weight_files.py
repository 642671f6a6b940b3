"""Files of tensors that a trainer sends: kept until they are in use, and checked before the engine hears of them."""

import json
import shutil
import tempfile
from pathlib import Path

from tokenyard.base import ConfigError, InvalidRequestError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class WeightFiles:
    """Safetensors files in a private folder, numbered in the order in which they came. Closed by `close`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def new_path(self) -> Path:
        """A path for the next file. Raises ConfigError if no folder can be made."""
        if self._folder is None:
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-weights-")
            except OSError as error:
                raise ConfigError(f"there is no folder for the tensors: {error}") from error
        self._count += 1
        return Path(self._folder.name, f"{self._count}.safetensors")

    def copy(self, path: str) -> Path:
        """Copy a file, which its owner may write to again. Raises InvalidRequestError for one that cannot be read."""
        copy = self.new_path()
        try:
            shutil.copyfile(path, copy)
        except (OSError, ValueError) as error:
            copy.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else "no file name"
            raise InvalidRequestError(f"{path[:200]!r} cannot be read: {reason}", param="path") from error
        return copy

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def check_tensor_file(path: Path) -> None:
    """Raise InvalidRequestError, and remove the file, unless it is a whole safetensors file with tensors."""
    try:
        names = _read_names(path)
        if not names:
            raise InvalidRequestError("the safetensors file has no tensor")
    except (OSError, ValueError, InvalidRequestError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the tensors are no safetensors file: {error}") from error


def _read_names(path: Path) -> list[str]:
    """The names of the tensors of a file. Raises ValueError for one that is cut off or something else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its {size} bytes do not begin with the length of a header")
        try:
            header = json.loads(file.read(length))
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError("its header does not say where each tensor lies") from error
    if end != size - 8 - length:
        raise ValueError(f"it has {size - 8 - length} bytes of tensors, and its header means {end}")
    return list(entries)
