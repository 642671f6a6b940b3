"""The last token each row sampled, kept on the device so that the next step need not wait for the host."""

import numpy as np
import torch

from tokenyard.base import LAST_SAMPLED, StepPlan, TokenyardError


class FutureMap:
    """The last token of each pool row, written by sampling and read where a plan has LAST_SAMPLED. SGLang's FutureMap.

    Steps run in order on one stream, so step N + 1 reads what step N wrote without a trip to the host.

    last_tokens: int64[max_pool_rows + 1]; the last one belongs to rows that fill up a captured step (`padding_row`).
    """

    def __init__(self, max_pool_rows: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(max_pool_rows + 1, dtype=torch.int64, device=device)
        self.padding_row = max_pool_rows

    def resolve(self, tokens: torch.Tensor, pool_rows: torch.Tensor) -> torch.Tensor:
        """Return int64[tokens] with each LAST_SAMPLED replaced by its row's last token; pool_rows: int64[tokens]."""
        return torch.where(tokens < 0, self.last_tokens[pool_rows], tokens)

    def store(self, pool_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the sampled int64[n] tokens of int64[n] rows."""
        self.last_tokens[pool_rows] = tokens


class DelayedSamplingRows:
    """Rows whose latest token is not sampled yet, because their step delays sampling.

    A step that reads such a token would read an older one. With two steps in flight that does not happen, as the first
    is sampled before the third is launched; only a pipeline, which computes its last stage later, can have more.
    """

    def __init__(self, max_pool_rows: int) -> None:
        self._steps = np.full(max_pool_rows, -1, np.int64)
        self._any = False

    def launch(self, plan: StepPlan) -> None:
        """Register a step that starts. Raises TokenyardError if it reads a token that is not sampled yet."""
        if self._any:
            reading = np.repeat(plan.pool_rows, plan.counts)[plan.tokens == LAST_SAMPLED]
            if (late := int(self._steps[reading].max(initial=-1))) >= 0:
                raise TokenyardError(f"step {plan.step} is launched before step {late} was sampled")
            self._steps[plan.pool_rows] = -1
        if plan.delay_sampling:
            self._steps[plan.pool_rows[plan.samples > 0]] = plan.step
            self._any = True

    def sample(self, plan: StepPlan) -> None:
        """Register that a step is sampled."""
        if self._any:
            self._steps[plan.pool_rows] = -1
            self._any = bool((self._steps >= 0).any())
