"""Matrices whose rows stay packed, and how a fused product is divided into parts of one format each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tokenyard.executor.formats.weight_format import WeightFormat
from tokenyard.executor.weights import Weights

PackedBytes = npt.NDArray[np.uint8]
"""uint8[rows, bytes of a row], rows one after the other."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A matrix, or some of its rows, as a checkpoint has it.

    format: of all its rows.
    shape: rows and numbers of a row.
    read: returns its bytes. A file's are mapped into memory for as long as the result lives.
    order: which input each number of a row belongs to, None for the order of inputs.
    """

    format: WeightFormat
    shape: tuple[int, int]
    read: Callable[[], PackedBytes]
    order: npt.NDArray[np.int32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.format.row_bytes(self.shape[1])


@runtime_checkable
class PackedSource(Weights, Protocol):
    """Weights some of which are packed."""

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """Return a matrix as it is stored, None where it has no format that can be multiplied. Reads nothing yet.

        Raises ConfigError if it is missing or misshapen.
        """


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Consecutive outputs of a product that have one format.

    matrices: name and rows of each matrix.
    packed: the same matrices as they are stored; () where they are unpacked.
    """

    matrices: tuple[tuple[str, int], ...]
    packed: tuple[PackedRows, ...] = ()

    @property
    def outputs(self) -> int:
        """Rows of all matrices."""
        return sum(rows for _, rows in self.matrices)

    @property
    def format(self) -> WeightFormat | None:
        """None where the matrices are unpacked."""
        return self.packed[0].format if self.packed else None

    def read(self) -> PackedBytes:
        """Return the bytes of all rows of a packed part."""
        found = [rows.read() for rows in self.packed]
        return found[0] if len(found) == 1 else np.concatenate(found)


def unpacked(outputs: Mapping[str, int]) -> tuple[LinearPart, ...]:
    """Return the parts of a product none of which is packed; see divide."""
    return (LinearPart(tuple(outputs.items())),)


def divide(
    weights: Weights, outputs: Mapping[str, int], inputs: int, *, multiple: int, gated: bool = False
) -> tuple[LinearPart, ...]:
    """Divide a product of several matrices over the same input into parts of one format each.

    outputs: the matrices' names, without `.weight`, and rows.
    multiple: the outputs of each part but the last are a multiple of it, else all is unpacked.
    gated: whether outputs are multiplied in pairs, so that all have one format.

    All packed parts take their inputs in one order, else all is unpacked.
    """
    whole = unpacked(outputs)
    if not isinstance(weights, PackedSource):
        return whole
    parts: list[LinearPart] = []
    for name, rows in outputs.items():
        found = weights.packed(f"{name}.weight", (rows, inputs))
        own = LinearPart(((name, rows),), () if found is None else (found,))
        if parts and parts[-1].format == own.format:
            before = parts.pop()
            own = LinearPart(before.matrices + own.matrices, before.packed + own.packed)
        parts.append(own)
    orders = {None if rows.order is None else rows.order.tobytes() for part in parts for rows in part.packed}
    if len(orders) > 1 or (gated and len(parts) > 1) or any(part.outputs % multiple for part in parts[:-1]):
        return whole
    return tuple(parts)
