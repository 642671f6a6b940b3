"""Tensors that a trainer broadcasts to the engine through `torch.distributed`."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from tokenyard.base import ConfigError, WeightGroup
from tokenyard.executor.weights import SafetensorsFile

JOIN_TIMEOUT = timedelta(seconds=300)
"""For all members to join, and for a broadcast to arrive."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ReceivedTensors:
    """Tensors in memory, with the methods of an open safetensors file that are used here."""

    tensors: dict[str, torch.Tensor]

    def keys(self) -> list[str]:
        """The names."""
        return list(self.tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One of them."""
        return self.tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        """Shape and parts of one of them."""
        return _Slice(self.tensors[name])


@dataclass(frozen=True, slots=True)
class _Slice:
    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.tensor[place]


class WeightGroups:
    """The groups that this process has joined, by name. A group has the trainer as its rank 0.

    They stand beside the process group of torch.distributed, as SGLang's and vLLM's do, so a trainer joins by the same
    function that it uses for those.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._received = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        """Join a group as its rank `rank`; waits until all its members have. Raises ConfigError."""
        if group.name in self._groups:
            raise ConfigError(f"the group {group.name!r} is there already; leave it first")
        if group.backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("backend nccl needs a CUDA device; use gloo")
        if group.backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend {group.backend!r} is unknown; use gloo or nccl")
        if not 1 <= rank < group.size:
            raise ConfigError(
                f"world_size {group.size} has no place for rank {rank}: it is the trainer's ranks, and one for each "
                "process that has weights of the model"
            )
        try:
            place = f"tcp://{group.address}:{group.port}"
            store = next(rendezvous(place, rank, group.size, timeout=JOIN_TIMEOUT))[0]
            store.set_timeout(JOIN_TIMEOUT)
            made, _ = c10d._new_process_group_helper(
                group.size,
                rank,
                [],
                c10d.Backend(group.backend),
                c10d.PrefixStore(group.name, store),
                group_name=c10d.GroupName(group.name),
                timeout=JOIN_TIMEOUT,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"the group {group.name!r} was not joined: {_first_line(error)}") from error
        c10d._world.pg_group_ranks[made] = {member: member for member in range(group.size)}
        self._groups[group.name] = made

    def receive(self, name: str, tensors: list[tuple[str, str, list[int]]], device: torch.device) -> SafetensorsFile:
        """Take a broadcast of each tensor, given as (name, dtype, shape), in this order. Raises ConfigError."""
        group = self._groups.get(name)
        if group is None:
            raise ConfigError(f"there is no group {name!r}; join it with /init_weights_update_group")
        found: dict[str, torch.Tensor] = {}
        for tensor, dtype, shape in tensors:
            kind = DTYPES.get(dtype.removeprefix("torch."))
            if kind is None or any(size < 0 for size in shape):
                raise ConfigError(f"{tensor}: dtype {dtype!r} or shape {shape} cannot be received")
            found[tensor] = torch.empty(shape, dtype=kind, device=device)
        try:
            for received in found.values():
                dist.broadcast(received, src=0, group=group)
        except RuntimeError as error:
            self.leave(name)
            raise ConfigError(f"the tensors did not arrive, and the group is left: {_first_line(error)}") from error
        self._received += 1
        held = ReceivedTensors({tensor: received.cpu() for tensor, received in found.items()})
        return SafetensorsFile(Path(f"broadcast {self._received}"), held, frozenset(found))

    def leave(self, name: str) -> None:
        """Leave a group. Raises ConfigError for one that is not there."""
        group = self._groups.pop(name, None)
        if group is None:
            raise ConfigError(f"there is no group {name!r}")
        dist.destroy_process_group(group)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
