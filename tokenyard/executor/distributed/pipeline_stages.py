"""A model in stages, each some of its layers: pipeline parallelism (GPipe, arXiv 1811.06965).

Rank 0 has the last stage, as what comes out of it is sampled there; rank s + 1 has stage s. Hidden states go from stage
to stage, and the first stage is told the tokens that only rank 0 knows.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.distributed.partition import AgreePages, stage_of
from tokenyard.executor.distributed.process_group import TorchProcessGroup
from tokenyard.executor.distributed.step_message import Range
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.weights import Weights

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """See ModelPartition."""

    flag: ClassVar[str] = "--pp-size"
    takes_all: ClassVar[bool] = False
    within_rank: ClassVar[bool] = True

    rank: int
    size: int
    group: TorchProcessGroup
    agree: AgreePages

    @property
    def tp_comm(self) -> None:
        """None: layers are whole."""
        return

    def layers(self, whole: ModelConfig) -> range:
        """The layers of this stage; the first stages have one more where they cannot all have as many."""
        stage, (least, more) = stage_of(self.rank, self.size), divmod(whole.num_layers, self.size)
        first = stage * least + min(stage, more)
        return range(first, first + least + (stage < more))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPartition."""
        if whole.num_layers < self.size:
            raise ConfigError(f"--pp-size {self.size} is more than the model's {whole.num_layers} layers")
        layers, experts = self.layers(whole), whole.experts
        if experts is not None:
            experts = replace(experts, layers=frozenset(i - layers.start for i in experts.layers if i in layers))
        return replace(
            whole,
            num_layers=len(layers),
            windows=whole.windows[layers.start : layers.stop],
            experts=experts,
            has_embedding=layers.start == 0,
            has_lm_head=self.rank == 0,
        )

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPartition."""
        return _StageWeights(source, self.layers(whole).start)

    def compute(self, model: TorchModel, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPartition; logits are the last stage's affair."""
        if self.rank > 1:
            batch.hidden = self.group.receive(model.hidden_like(batch), self.rank - 1)
        elif open_tokens:
            batch.token_ids = self.group.receive(batch.token_ids, 0)
        self.group.send(model.layers(batch), (self.rank + 1) % self.size)

    def meet(self, model: TorchModel, batch: ForwardBatch, *, open_tokens: bool) -> None:
        """Put into a batch of the last stage, whose tokens are all known, what those before it compute of it."""
        if open_tokens:
            self.group.send(batch.token_ids, 1)
        batch.hidden = self.group.receive(model.hidden_like(batch), self.size - 1)


class _StageWeights:
    """The tensors of a model whose layer 0 is layer `first` of another one."""

    def __init__(self, source: Weights, first: int) -> None:
        self._source, self._first = source, first

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        if match := _LAYER.fullmatch(name):
            before, layer, behind = match.groups()
            name = f"{before}{int(layer) + self._first}{behind}"
        return self._source.get(name, shape)
