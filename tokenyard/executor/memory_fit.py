"""Whether a model fits the memory of a machine without a GPU, by the headers of its files. Needs no torch."""

import json
import logging
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tokenyard.base import ConfigError
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.gguf_file.folder import LINK
from tokenyard.executor.gguf_file.gguf_reader import GgufFile

logger = logging.getLogger(__name__)

GB = 1e9
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
HEADS = ("lm_head.weight", "output.weight")
PACKED_NUMBERS = {"I32": 8, "U8": 2}
"""Numbers of 4 bits in an element of a packed matrix, by safetensors' name of its type."""
PLAIN_KINDS = ("F64", "F32", "F16", "BF16")
BYTE_KINDS = ("F8_E4M3", "I8")
PACKED_ENDINGS = ("qweight", "weight_packed", "blocks")
BITS_OF_8, BITS_OF_4 = 34 / 32, 18 / 32
"""Bytes of a number in Q8_0 and Q4_0."""
STEP_TOKENS = 2048
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. kind: the file's name of its type; numbers: after unpacking; packed: whether native steps
    multiply its bytes as they are.
    """

    name: str
    kind: str
    nbytes: int
    numbers: int
    matrix: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a model takes."""

    weights: int
    kv_pool: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv_pool + self.activations

    def describe(self, free: int) -> str:
        """Return the parts in one line, compared with `free` bytes."""
        parts = ((self.weights, "weights"), (self.kv_pool, "KV pool"), (self.activations, "activations"))
        said = ", ".join(f"{name} {size / GB:.2f} GB" for size, name in parts)
        return f"{said}: {self.total / GB:.2f} of {free / GB:.2f} GB free"

    def check(self, free: int) -> None:
        """Raise ConfigError if the parts take more than `free` bytes."""
        if self.total > free:
            raise ConfigError(
                f"the model does not fit: {self.describe(free)}; choose a smaller or more quantized model,"
                " --quantization q4, or a smaller --max-total-tokens"
            )


def weight_bytes(
    folder: Path,
    itemsize: int,
    *,
    native: bool,
    quantization: str = "none",
    tied: bool = False,
    without: tuple[str, ...] = (),
) -> int:
    """Return the bytes of a folder's weights once they are loaded, 0 where it has no file that can be read.

    itemsize: of a number in the model's dtype. native: whether native steps compute it, so that packed matrices stay
    packed. quantization: as `--quantization`. tied: whether the embedding is the head too. Native steps have one
    matrix for both, and two with int8, which rounds the head alone. without: endings of names that do not count.
    """
    total = 0.0
    for tensor in stored_tensors(folder):
        if tensor.name.endswith(without):
            continue
        size = _loaded(tensor, itemsize, native, quantization)
        if tensor.name.endswith(EMBEDDINGS) and native and tensor.packed and not tied:
            size = 0.0  # it is mapped, and takes memory only as long as there is some to spare
        elif tensor.name.endswith(EMBEDDINGS) and native and quantization == "int8" and not tensor.packed:
            size = float(tensor.numbers * itemsize) + (size if tied else 0.0)
        total += size
    return int(total)


def _loaded(tensor: StoredTensor, itemsize: int, native: bool, quantization: str) -> float:
    """Bytes of a tensor in memory."""
    if tensor.packed and native:
        return tensor.nbytes
    if not tensor.matrix or not native or quantization == "none":
        return tensor.numbers * itemsize
    if quantization == "int8":
        return tensor.numbers
    in_8 = quantization == "q8" or tensor.name.endswith(EMBEDDINGS + HEADS)
    return tensor.numbers * (BITS_OF_8 if in_8 else BITS_OF_4)


def describe_formats(folder: Path, instructions: str, quantization: str = "none") -> str:
    """Return which kinds of matrices a folder's files have, and what multiplies each, in one line.

    instructions: those of packed weights in native steps, "" where torch computes the model. quantization: as
    `--quantization`.
    """
    counts = Counter[tuple[str, str]]()
    for tensor in stored_tensors(folder):
        if not tensor.matrix:
            continue
        if tensor.packed:
            counts[tensor.kind, f"packed, by {instructions}" if instructions else "unpacked"] += 1
        elif tensor.kind in PLAIN_KINDS:
            rounded = quantization in ("q4", "q8") or (quantization == "int8" and not tensor.name.endswith(EMBEDDINGS))
            made = f"as {quantization}, by {instructions}" if instructions and rounded else "as numbers"
            counts[tensor.kind, made] += 1
        else:
            counts[tensor.kind, "unpacked"] += 1
    return "; ".join(f"{count} of {kind} {how}" for (kind, how), count in sorted(counts.items()))


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Return what a model's GGUF file or safetensors files hold. Raises ConfigError for files that are damaged."""
    if (folder / LINK).exists():
        found = GgufFile(folder / LINK).tensors.values()
        return [
            StoredTensor(
                tensor.name,
                tensor.tensor_type.name,
                int(tensor.n_bytes),
                int(tensor.n_elements),
                len(tensor.shape) > 1,
                tensor.tensor_type.name in FORMATS,
            )
            for tensor in found
        ]
    return [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _safetensors(path)]


def _safetensors(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(size, path.stat().st_size)))
        return [_stored_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from error


def _stored_tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    """The tensor of an entry in a file's header; raises whatever a wrong entry leads to."""
    shape, dtype, (begin, end) = entry["shape"], entry["dtype"], entry["data_offsets"]
    packed = name.endswith(PACKED_ENDINGS) and dtype in PACKED_NUMBERS
    numbers = math.prod(shape) * (PACKED_NUMBERS[dtype] if packed else 1)
    in_bytes = dtype in BYTE_KINDS and len(shape) == 2 and shape[1] % 32 == 0
    return StoredTensor(name, dtype, end - begin, numbers, len(shape) > 1, packed or in_bytes)


def activation_bytes(hidden: int, inter: int, vocabulary: int, rows: int) -> int:
    """Return about the bytes of a step of STEP_TOKENS tokens, of which `rows` have logits."""
    return 4 * (STEP_TOKENS * (6 * hidden + inter) + min(rows, STEP_TOKENS) * vocabulary)


def free_memory() -> int:
    """Return the bytes that this process can still get, of the machine with its swap and of its cgroup (version 2)."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        facts = (CGROUP / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no cgroup, or "max"
        return int(free)
    # Pages of files go when memory is short.
    cached = sum(int(facts[facts.index(name) + 1]) for name in ("active_file", "inactive_file") if name in facts)
    return int(min(free, max(0, limit - used + cached)))
