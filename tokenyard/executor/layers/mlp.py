"""What a layer does to each token by itself: a gated MLP, or a mixture of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from tokenyard.executor.layers.fused import FusedKernels
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.models.config import MoeConfig

Gating = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The activation between the gate and up projections and the down projection; it may change its inputs in place."""


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate).mul_(up)


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, by the formula with tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, *, limit: float) -> torch.Tensor:
    """gate * sigmoid(1.702 * gate) * (up + 1), with gate up to `limit` and up within it either way (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul_(torch.sigmoid(gate * 1.702)).mul_(up.add_(1))


def gating(activation: str, limit: float) -> Gating:
    """Return the gating of a ModelConfig's activation."""
    if activation == "clamped_swiglu":
        return partial(clamped_swiglu, limit=limit)
    return {"silu": silu, "gelu_tanh": gelu_tanh}[activation]


class GatedMlp:
    """`down(gated(gate(x), up(x)))` (Shazeer 2020, arXiv 2002.05202); gate and up are one product."""

    def __init__(self, gate_up: Product, down: Product, gated: Gating = silu) -> None:
        self.gate_up, self.down, self._gated = gate_up, down, gated

    def fuse(self, kernels: FusedKernels) -> None:
        """Gate by these kernels from now on where they know how."""
        if self._gated is silu:
            self._gated = kernels.silu_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], in the dtype of `x`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._gated(gate, up))


class SharedExpert:
    """Experts, and one more that every token goes to, weighted by a sigmoid gate (Qwen2-MoE) or as it is.

    gate: the product from the hidden size to one number, None for no gate.
    """

    def __init__(self, routed: Product, shared: GatedMlp, gate: Product | None) -> None:
        self._routed, self._shared, self._gate = routed, shared, gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], in the dtype of `x`."""
        shared = self._shared(x)
        return self._routed(x) + (shared if self._gate is None else self._gate(x).sigmoid() * shared)


Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""[rows, experts] -> weights and numbers of the chosen experts, each [rows, active]."""

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From [rows, hidden], and weights and numbers of the chosen experts, each [rows, active], to the weighted sums of what
these find, [rows, hidden]."""


class TopK:
    """The choice of the `active` experts that a softmax over all of them scores best.

    normed: whether the scores of the chosen ones are scaled to sum to one.
    """

    def __init__(self, active: int, normed: bool) -> None:
        self._active, self._normed = active, normed

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Choose."""
        scores, chosen = logits.float().softmax(dim=-1).topk(self._active, dim=-1)
        return (scores / scores.sum(dim=-1, keepdim=True) if self._normed else scores), chosen


class GroupedTopK:
    """DeepSeek's choice of experts: those with the best scores in the best groups of experts.

    Scores are a softmax, and a group counts as much as its best expert; or they are sigmoids, to which `correction`,
    float32[experts], is added for the choice, and a group counts as much as its best two (arXiv 2412.19437).
    """

    def __init__(self, config: MoeConfig, correction: torch.Tensor | None) -> None:
        self._config, self._correction = config, correction

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Choose."""
        config, logits = self._config, logits.float()
        scores = logits.softmax(dim=-1) if self._correction is None else logits.sigmoid()
        ranks = scores if self._correction is None else scores + self._correction
        if config.groups > 1:
            grouped = ranks.view(len(ranks), config.groups, -1)
            best = grouped.topk(1 if self._correction is None else 2, dim=-1).values.sum(dim=-1)
            out = torch.ones_like(best, dtype=torch.bool)
            out.scatter_(1, best.topk(config.top_groups, dim=-1).indices, False)
            ranks = grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = ranks.topk(config.active, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.normed:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.scale, chosen


class SparseMoe:
    """A mixture of experts: each token goes to the experts that `choose` takes by the router's numbers.

    before: what the experts are given of the input; the router has the input itself.
    """

    def __init__(self, router: Product, experts: Experts, choose: Choose, before: Product | None = None) -> None:
        self._router, self._experts, self._choose, self._before = router, experts, choose, before

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], in the dtype of `x`."""
        scores, chosen = self._choose(self._router(x))
        return self._experts(x if self._before is None else self._before(x), scores.to(x.dtype), chosen)


class ExpertLoop:
    """Experts one after the other; see Experts. Only those that a token of the batch chose are computed, each over its
    tokens in one product.
    """

    def __init__(self, experts: Sequence[Product]) -> None:
        self._experts = experts

    def __call__(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        # Sorted by expert, each expert's tokens are one run.
        experts, order = chosen.flatten().sort(stable=True)
        tokens, weights = order // chosen.shape[1], scores.flatten()[order, None]
        ends = torch.bincount(experts, minlength=len(self._experts)).cumsum(0).tolist()
        found, first = torch.zeros_like(x), 0
        for expert, end in zip(self._experts, ends, strict=True):
            if end > first:
                run = tokens[first:end]
                found.index_add_(0, run, expert(x[run]) * weights[first:end])
            first = end
        return found
