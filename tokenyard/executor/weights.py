"""Hands out the tensors of a checkpoint by name, checked and converted."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenyard.base import ConfigError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
EXACT = ".e_score_correction_bias"
"""The end of names of tensors that stay float32: rounded, they would choose other experts (as in transformers)."""


class Weights(Protocol):
    """Where a model takes its tensors from."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor on the model's device and in its dtype. Raises ConfigError if missing or misshapen."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if the file is missing or no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; the model folder needs it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open safetensors file. It stays readable when it is removed.

    names: its tensors, without the prefix of the language model in a multimodal model.
    """

    path: Path
    handle: Any
    names: frozenset[str]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a file. Raises ConfigError for one that is damaged."""
    try:
        handle: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from error
    return SafetensorsFile(path, handle, frozenset(map(_plain_name, handle.keys())))


class SafetensorsWeights:
    """The `*.safetensors` files of a folder, with or without an index; tensors are read one at a time.

    updates: files with tensors that replace those of the folder.
    finite: whether a tensor with a number that is NaN or infinite is refused.

    Raises ConfigError for a folder without such files, for files that are damaged, and for updates with other tensors
    than the folder.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        updates: Iterable[SafetensorsFile] = (),
        *,
        finite: bool = False,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._finite = finite
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        updates = tuple(updates)
        # A model that began with random weights may get all of its tensors as updates.
        shards = _shards(folder) if not updates or any(folder.glob("*.safetensors")) else []
        for path in shards:
            # One handle per shard for the whole load, because opening a file parses its header.
            self._add(open_safetensors(path))
        for file in updates:
            unknown = sorted(name for name in file.names - self._file_of.keys() if not _may_be_extra(name))
            if shards and unknown:
                more = f" and {len(unknown) - 1} more tensors" if len(unknown) > 1 else ""
                raise ConfigError(f"the model has no tensor {unknown[0]!r}{more}")
            self._add(file)
        self._unused = set(self._file_of)

    def _add(self, file: SafetensorsFile) -> None:
        self._files[file.path] = file.handle
        for stored in file.handle.keys():  # noqa: SIM118 - no mapping
            name = _plain_name(stored)
            self._file_of[name], self._stored[name] = file.path, stored

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as the files have it. Raises ConfigError if there is none of this name."""
        if name not in self._file_of:
            raise ConfigError(f"the model has no tensor {name!r}")
        found = self._read(name)
        return found if found.dim() else found[None]

    def get(self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None) -> torch.Tensor:
        """Return the tensor `name`; see Weights. cut: axis, first and end of the part to read; None for all."""
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(
                f"the checkpoint has no tensor {name!r}; config.json and the weights do not belong together"
            )
        found = tuple(self._files[path].get_slice(self._stored[name]).get_shape())
        if found != shape:
            raise ConfigError(f"{path}: tensor {name!r} has shape {found}, but config.json means {shape}")
        tensor = self._read(name, cut)
        # Numbers of one byte mean nothing without their scales.
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise ConfigError(f"{path}: tensor {name!r} is {tensor.dtype}, but config.json names no quantization of it")
        return tensor.to(self._device, torch.float32) if name.endswith(EXACT) else self.convert(tensor)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._file_of

    def parts(self, prefix: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return those of the tensors `prefix + name` that there are, by name, as the file has them."""
        return {name: self._read(prefix + name) for name in names if prefix + name in self._file_of}

    def stored_kind(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the file's name of a tensor's type, and its shape, without reading it; None where there is none."""
        if name not in self._file_of:
            return None
        found = self._files[self._file_of[name]].get_slice(self._stored[name])
        return found.get_dtype(), tuple(found.get_shape())

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the model's device and in its dtype."""
        return tensor.to(device=self._device, dtype=self._dtype)

    def _read(self, name: str, cut: tuple[int, int, int] | None = None) -> torch.Tensor:
        path, stored = self._file_of[name], self._stored[name]
        self._unused.discard(name)
        try:
            tensor: torch.Tensor
            if cut is None:
                tensor = self._files[path].get_tensor(stored)
            else:
                axis, first, end = cut
                tensor = self._files[path].get_slice(stored)[(*[slice(None)] * axis, slice(first, end))]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        if self._finite and tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ConfigError(f"tensor {name!r} has numbers that are NaN or infinite")
        return tensor

    def warn_unused(self, harmless: tuple[str, ...] = ()) -> None:
        """Log the tensors that were not read, except those skipped on purpose. harmless: beginnings of more names."""
        harmless = ("lm_head.weight", *harmless)
        left = sorted(name for name in self._unused if not name.startswith(harmless) and not _is_known(name))
        if left:
            logger.warning("%d tensors of the checkpoint are not used, for example %s", len(left), left[0])


def _may_be_extra(name: str) -> bool:
    """Whether a file may have this tensor although the checkpoint has none: the head of a model whose embedding it is
    is often saved twice.
    """
    return name == "lm_head.weight" or _is_known(name)


def _plain_name(stored: str) -> str:
    """Return the name of a tensor without the prefix of the language model in a multimodal model."""
    if stored.startswith("language_model."):
        return stored.removeprefix("language_model.")
    return stored.replace("model.language_model.", "model.", 1)


def _is_known(name: str) -> bool:
    """Whether a tensor is skipped on purpose: a computed table, a part of a vision encoder or of a draft head."""
    towers = "vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_vision.", "embed_audio."
    return name.endswith("inv_freq") or name.startswith("mtp.") or any(tower in name for tower in towers)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{index} has no weight_map")
        paths = [folder / name for name in sorted(set(names.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = next(folder.glob("*.bin"), None)
        hint = (
            f"{pickled.name} is not read, as loading it could run code; convert it to safetensors"
            if pickled
            else "use load_format dummy to try a config without weights"
        )
        raise ConfigError(f"{folder} holds no *.safetensors file ({hint})")
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise ConfigError(f"{path} is named in {INDEX_NAME} but is not in the model folder")
    return paths


class DummyWeights:
    """Seeded random tensors of any name and shape, scaled so that activations and logits stay in a usual range.

    A tensor depends on the seed, its name and its shape, so that a model gets the same weights however it is divided.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._seed = seed
        self._generator = torch.Generator(device=device)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ones for a norm, zeros for a bias, else normal numbers of variance 1 / (inputs)."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        if name.endswith(".bias"):
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        values = torch.empty(shape, device=self._device, dtype=self._dtype)
        digest = blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest))
        return values.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)
