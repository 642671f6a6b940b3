"""The part of a divided model that a rank has, and the names of the ranks."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol

from tokenyard.base import ExecutorInfo
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.parallel import TensorParallelComm
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import ModelBackend
from tokenyard.executor.weights import Weights

ParallelKind = Literal["tensor", "pipeline"]
"""How a model is divided: every layer among all ranks, or whole layers in stages."""

Range = tuple[int, int]
"""First and end of some tokens of a plan."""

AgreePages = Callable[[ExecutorInfo], ExecutorInfo]
"""Compares what a rank has loaded with the others; returns it with the number of pages that all have."""


class ModelPartition(Protocol):
    """Rank `rank` of the `size` ranks of a model. Rank 0 is the one that schedules and samples.

    flag: the command-line flag of this kind of parallelism.
    takes_all: whether every rank has a part of each tensor.
    within_rank: whether all ranks belong to one data-parallel rank.
    captures: whether all ranks compute a plan by the same steps at the same time, so that they can capture them.
    tp_comm: combines the ranks' parts of a layer; None where layers are not divided.
    """

    flag: ClassVar[str]
    takes_all: ClassVar[bool]
    within_rank: ClassVar[bool]
    captures: ClassVar[bool]

    @property
    def rank(self) -> int:
        """The rank's number, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def agree(self) -> AgreePages:
        """See AgreePages."""

    @property
    def tp_comm(self) -> TensorParallelComm | None:
        """See TensorParallelComm."""

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The part of a model that this rank computes, as a model. Raises ConfigError where it cannot be divided."""

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """This rank's part of the tensors of `source`, which are those of the whole model."""

    def compute(self, model: ModelBackend, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """Compute a step at a rank other than 0. ranges: see `encode_step`. open_tokens: whether only rank 0 knows
        all tokens of the batch.
        """


def stage_of(rank: int, size: int) -> int:
    """The stage of a pipeline that a rank computes: rank 0, which samples, has the last one."""
    return rank - 1 if rank else size - 1


def name_of(form: ParallelKind, rank: int, size: int) -> str:
    """Return the name of a rank in messages and logs."""
    return f"tensor-parallel rank {rank}" if form == "tensor" else f"pipeline stage {stage_of(rank, size)}"
