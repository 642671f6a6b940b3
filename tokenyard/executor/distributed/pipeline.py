"""Pipeline parallelism: a model in stages, each with some of its layers (GPipe, arXiv 1811.06965).

Rank 0 has the last stage, because tokens are sampled there; rank s + 1 has stage s. Hidden states go from stage to
stage. Rank 0 sends the first stage the tokens that only rank 0 knows.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tokenyard.base import ConfigError, DeviceLostError, StepPlan, StepResult, TokenyardError
from tokenyard.executor.cuda_streams import StepTimer
from tokenyard.executor.distributed.partition import AgreePages, Range, stage_of
from tokenyard.executor.distributed.process_group import TorchProcessGroup
from tokenyard.executor.distributed.rank0 import ModelRanks, Rank0Executor
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.runner import Ticket
from tokenyard.executor.weights import Weights

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """See ModelPartition."""

    flag: ClassVar[str] = "--pp-size"
    takes_all: ClassVar[bool] = False
    within_rank: ClassVar[bool] = True
    captures: ClassVar[bool] = False

    rank: int
    size: int
    group: TorchProcessGroup
    agree: AgreePages

    @property
    def tp_comm(self) -> None:
        """None: layers are whole."""
        return

    def layers(self, whole: ModelConfig) -> range:
        """Return the layers of this stage; the first stages have one more where the number does not divide evenly."""
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

    def compute(self, model: ModelBackend, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPartition; only the last stage computes logits."""
        assert isinstance(model, TorchModel)
        if self.rank > 1:
            batch.hidden = self.group.receive(model.hidden_like(batch), self.rank - 1)
        elif open_tokens:
            batch.token_ids = self.group.receive(batch.token_ids, 0)
        self.group.send(model.layers(batch), (self.rank + 1) % self.size)

    def receive_hidden(self, model: TorchModel, batch: ForwardBatch, *, open_tokens: bool) -> None:
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


class PipelineExecutor(Rank0Executor):
    """Executor over the last stage of a model.

    A launch only sends the plan to the other stages, so that they work ahead; the last stage computes and samples a
    step when it is collected. Plans launched meanwhile are in flight in the earlier stages.
    """

    def __init__(self, ranks: ModelRanks, stage: PipelineStage, *parts: Any) -> None:
        super().__init__(ranks, *parts)
        self._stage = stage
        self._launched: deque[Ticket] = deque()
        self._open_tokens = False

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step in the first stage; see Executor."""
        self.ranks.send(plan)
        ticket = Ticket(plan, StepTimer(self._device))
        self._launched.append(ticket)
        return ticket

    def sample(self, ticket: Ticket) -> None:
        """Let a step be sampled as soon as it is computed; see Executor."""
        ticket.plan = replace(ticket.plan, delay_sampling=False)

    def collect(self, ticket: Ticket) -> StepResult:
        """Compute the last stage of a step, sample it and return the result; see Executor."""
        if ticket.plan.delay_sampling:
            raise TokenyardError(f"step {ticket.plan.step} is collected before it was sampled")
        try:
            while (first := self._launched.popleft()) is not ticket:
                # The result is not needed, but the earlier stages have computed it.
                self._compute(first)
            return super().collect(self._compute(ticket))
        except DeviceLostError:
            raise
        except Exception as error:
            # The earlier stages are at another step, so this one cannot rejoin them.
            raise self.ranks.give_up(f"{self.ranks.own_name} failed: {type(error).__name__}: {error}") from error

    def _compute(self, ticket: Ticket) -> Ticket:
        plan = ticket.plan
        self._open_tokens = bool(len(plan.tokens)) and bool(plan.tokens.min() < 0)
        computed = super().launch(replace(plan, delay_sampling=True))
        if not plan.delay_sampling:
            super().sample(computed)
        return computed

    def _inputs(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        batch.token_ids, model = super()._inputs(plan, batch), self.model
        assert isinstance(model, TorchModel)
        self._stage.receive_hidden(model, batch, open_tokens=self._open_tokens)
        return batch.token_ids
