"""Walks the header of a GGUF file before the gguf package reads it. The package believes each count and reads on past
the end of a file: a length with a flipped bit keeps it busy for ever.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path

SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type."""
STRING, ARRAY = 8, 9
MAX_DEPTH = 4
"""Of arrays in arrays."""


def check_header(path: Path) -> None:
    """Raise ValueError where a header does not end within its file, and OSError where that cannot be read.

    A file of another kind is left to the package to refuse.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] == b"GGUF":
            _Walk(data).header()


class _Walk:
    """A position in a file, `at`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 4  # behind the magic number
        self._order = "<"
        # As the package does: a version that is small in the other byte order.
        if not self.number("I") & 0xFFFF:
            self._order = ">"

    def header(self) -> None:
        """Walk over all metadata and the description of each tensor."""
        tensors, values = self.number("Q"), self.number("Q")
        for _ in range(values):
            self.string()
            self.value(self.number("I"), MAX_DEPTH)
        for _ in range(tensors):
            self.string()
            self.skip(8 * self.number("I") + 4 + 8)  # dimensions, type, place

    def number(self, form: str) -> int:
        """Return the next unsigned number, of a format of `struct`."""
        begin = self.at
        self.skip(struct.calcsize(self._order + form))
        return int(struct.unpack_from(self._order + form, self._data, begin)[0])

    def skip(self, size: int) -> None:
        """Skip bytes. Raises ValueError at the end of the file."""
        self.at += size
        if self.at > len(self._data):
            raise ValueError("a length in its header reaches beyond its end")

    def string(self) -> None:
        """Skip a string."""
        self.skip(self.number("Q"))

    def value(self, kind: int, depth: int) -> None:
        """Skip a value of a type."""
        if kind == STRING:
            self.string()
        elif kind != ARRAY:
            self.skip(_size(kind))
        elif not depth:
            raise ValueError("arrays in its header are nested too deep")
        else:
            inner, count = self.number("I"), self.number("Q")
            if inner not in (STRING, ARRAY):
                self.skip(count * _size(inner))
                return
            # Each takes 8 bytes at least, so that the file's size bounds this.
            for _ in range(count):
                self.value(inner, depth - 1)


def _size(kind: int) -> int:
    if kind not in SCALARS:
        raise ValueError(f"a value in its header has the type {kind}, which GGUF does not have")
    return SCALARS[kind]
