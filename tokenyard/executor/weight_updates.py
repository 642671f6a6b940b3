"""Other weights for a loaded model: they are read and checked next to those in use, and then take their place."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, WeightGroup, WeightSource
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.lora_manager import LoraManager
from tokenyard.executor.models.model_backend import ModelBackend
from tokenyard.executor.weight_group import WeightGroups
from tokenyard.executor.weights import SafetensorsFile, SafetensorsWeights, open_safetensors

DIGEST_BYTES = 16
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute steps.

    model: computes them, over the executor's KV pool.
    adapters: its LoRA adapters, None if they are off.
    draft_model: the draft model with the weights that came with those of the model; None if none did.
    """

    model: ModelBackend
    adapters: LoraManager | None
    draft_model: ModelBackend | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the weights of a model are.

    folder: the checkpoint.
    updates: files with tensors that replace those of the checkpoint, the latest last.
    digest: of all of them; "" for those that the model was loaded with.
    draft: other weights of the draft model, None to keep those in use.
    """

    folder: Path
    updates: tuple[SafetensorsFile, ...] = ()
    digest: str = ""
    draft: Path | None = None


class WeightUpdates:
    """Reads other weights for a model, all or nothing.

    load: makes a model of a checkpoint over the executor's KV pool; raises ConfigError for one that does not fit.
    rank, ranks: which part of the model this process has, and among how many it is divided.
    """

    def __init__(
        self, folder: Path, load: Callable[[Checkpoint], LoadedModel], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._load = load
        self._rank, self._ranks = rank, ranks
        self.current = Checkpoint(folder)
        self.groups = WeightGroups()
        self._received: list[SafetensorsFile] = []
        self._prepared: tuple[Checkpoint, LoadedModel] | None = None

    def join(self, group: WeightGroup) -> None:
        """Join a trainer's group; see Executor.join_weight_group."""
        self.groups.join(group, group.rank_offset + group.dp_rank * self._ranks + self._rank)

    def receive(self, group: str, tensors: list[tuple[str, str, list[int]]], device: torch.device) -> None:
        """Receive tensors for the next update; see Executor.receive_weights."""
        self._received.append(self.groups.receive(group, tensors, device))

    def prepare(self, source: WeightSource) -> str:
        """Read weights and check them; returns their digest. See Executor.prepare_weights."""
        checkpoint = self._checkpoint(source)
        self._prepared = checkpoint, self._load(checkpoint)
        return checkpoint.digest

    def take(self) -> LoadedModel:
        """Return what was prepared, which is in use from now on."""
        if self._prepared is None:
            raise ConfigError("no weights are ready to be used; send them again")
        (self.current, loaded), self._prepared = self._prepared, None
        return loaded

    def rows(self, name: str, rows: int) -> Any:
        """Return the first rows of a tensor of the checkpoint in use; see Executor.weight."""
        files = SafetensorsWeights(self.current.folder, torch.device("cpu"), torch.float32, self.current.updates)
        return files.stored(name)[:rows].float().tolist()

    def drop(self) -> None:
        """Free what was prepared or received."""
        self._prepared = None
        self._received = []

    def _checkpoint(self, source: WeightSource) -> Checkpoint:
        folder, digest, files = self.current.folder, self.current.digest, [*self.current.updates]
        if source.folder:
            folder = resolve_model_path(source.folder)
            digest, files = folder_digest(folder), []
        received, self._received = self._received if source.received else [], []
        for file in [*map(open_safetensors, map(Path, source.files)), *received]:
            files.append(file)
            content = file_digest(file.path) if file.path.exists() else tensors_digest(file)
            digest = blake2b(f"{digest}\0{content}".encode(), digest_size=DIGEST_BYTES).hexdigest()
        # Of a file whose tensors have all been replaced since, by one file or by several, nothing is read any more.
        kept: list[SafetensorsFile] = []
        replaced: set[str] = set()
        for file in reversed(files):
            if not file.names <= replaced:
                kept.append(file)
                replaced |= file.names
        draft = resolve_model_path(source.draft_folder) if source.draft_folder else None
        return Checkpoint(folder, tuple(reversed(kept)), digest, draft)


def folder_digest(folder: Path) -> str:
    """Return a digest of all that a checkpoint's weight files hold. Raises ConfigError for one that cannot be read."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    digest = blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        digest.update(f"{file.name}\0{file_digest(file)}\0".encode())
    return digest.hexdigest()


def tensors_digest(file: SafetensorsFile) -> str:
    """Return a digest of the names and numbers of tensors in memory."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(file.names):
        tensor = file.handle.get_tensor(name)
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return a digest of a file. Raises ConfigError for one that cannot be read."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    try:
        with path.open("rb") as content:
            while block := content.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
