"""Rank 0 of a model in stages: the last of them, behind which tokens are sampled."""

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from tokenyard.base import DeviceLostError, StepPlan, StepResult, TokenyardError
from tokenyard.executor.cuda_streams import StepTimer
from tokenyard.executor.distributed.pipeline_stages import PipelineStage
from tokenyard.executor.distributed.rank0 import ModelRanks, Rank0Executor
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.runner import Ticket


class PipelineExecutor(Rank0Executor):
    """Executor over the last stage of a model.

    A launch only tells the other stages what to compute, so that they work ahead; the last stage computes and samples a
    step when it is collected. Plans that are launched meanwhile are in flight in the stages before.
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
                # Nobody wants to know, but the stages before have computed it.
                self._compute(first)
            return super().collect(self._compute(ticket))
        except DeviceLostError:
            raise
        except Exception as error:
            # The stages before are at another step by now.
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
        self._stage.meet(model, batch, open_tokens=self._open_tokens)
        return batch.token_ids
