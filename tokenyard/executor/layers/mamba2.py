"""Mamba-2: a state space model whose decay is one number per head (Dao and Gu 2024, arXiv 2405.21060)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.layers.recurrent import recur
from tokenyard.executor.models.config import Mamba2Config

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The tensors of one layer.

    inputs: the product whose rows are the output gate, what the convolution takes, and a step size per head.
    conv: [kernel, channels], the oldest token first; conv_bias: [channels] or None.
    log_decay, step_bias, skip: [heads], the checkpoint's A_log, dt_bias and D.
    norm: [heads * head_dim]. output: the product from there to the hidden size.
    """

    inputs: Product
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    log_decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    output: Product


class Mamba2:
    """One layer. index: its number among those with a state. All between the two products is in float32."""

    def __init__(self, config: Mamba2Config, index: int, weights: Mamba2Weights, norm_eps: float) -> None:
        self._config, self._index, self._eps = config, index, norm_eps
        self.inputs, self.output = weights.inputs, weights.output
        self._conv = weights.conv.float()
        self._conv_bias = None if weights.conv_bias is None else weights.conv_bias.float()
        self._decay = -weights.log_decay.float().exp()
        self._step_bias, self._skip = weights.step_bias.float(), weights.skip.float()[:, None]
        self._norm = weights.norm.float()

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden], in the dtype of `x`."""
        config = self._config
        inner = config.heads * config.head_dim
        gate, mixed, step = torch.split(self.inputs(x), [inner, config.channels, config.heads], dim=-1)
        step = F.softplus(step.float() + self._step_bias).clamp(*config.step_limits)
        decay = self._decay * step

        def advance(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> torch.Tensor:
            values, writes, reads = self._heads(convolved)
            return ssm_step(values * step[tokens, :, None], writes, reads, decay[tokens], state) + self._skip * values

        def run(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, writes, reads = self._heads(convolved)
            found, state = ssm_chunks(values * step[tokens, :, None], writes, reads, decay[tokens], state)
            return found + self._skip * values, state

        found = recur(batch, self._index, mixed, self._conv, self._conv_bias, advance, run)
        gated = (found.flatten(1) * F.silu(gate.float())).view(len(x), config.groups, -1)
        return self.output((F.rms_norm(gated, gated.shape[-1:], None, self._eps).flatten(1) * self._norm).to(x.dtype))

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [tokens, heads, head_dim], and how heads write and read, each [tokens, heads, state_size]."""
        config, tokens = self._config, len(convolved)
        sizes = [config.heads * config.head_dim, *[config.groups * config.state_size] * 2]
        values, writes, reads = torch.split(F.silu(convolved), sizes, dim=-1)
        writes, reads = (
            part.view(tokens, config.groups, -1).repeat_interleave(config.heads // config.groups, dim=1)
            for part in (writes, reads)
        )
        return values.view(tokens, config.heads, -1), writes, reads


def ssm_step(
    values: torch.Tensor, writes: torch.Tensor, reads: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Advance the states of several rows by one token each, in place; returns float32[rows, heads, head_dim].

    values: [rows, heads, head_dim]; writes, reads: [rows, heads, state_size]. decay: [rows, heads], the logarithm of
    what remains of the state, [rows, heads, head_dim, state_size].
    """
    state.mul_(decay.exp()[..., None, None]).addcmul_(values.unsqueeze(-1), writes.unsqueeze(-2))
    return (state @ reads.unsqueeze(-1)).squeeze(-1)


def ssm_chunks(
    values: torch.Tensor, writes: torch.Tensor, reads: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance one row by several tokens: float32[tokens, heads, head_dim], and the state after them.

    The arguments are those of `ssm_step` with tokens in the place of rows; state: [heads, head_dim, state_size]. Within
    a chunk of CHUNK_TOKENS tokens the recurrence is masked attention (section 6 of the paper).
    """
    found = []
    for first in range(0, len(values), CHUNK_TOKENS):
        tokens = slice(first, first + CHUNK_TOKENS)
        v, b, c = (part[tokens].transpose(0, 1) for part in (values, writes, reads))
        since = decay[tokens].T.cumsum(dim=-1)
        size = since.shape[-1]
        # The logarithm is masked, not its exponential, which overflows above the diagonal.
        later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
        between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        of_state = (c @ state.mT) * since.exp().unsqueeze(-1)
        found.append(((c @ b.mT) * between @ v + of_state).transpose(0, 1))
        remains = (since[:, -1:] - since).exp().unsqueeze(-1)
        state = state * since[:, -1].exp()[:, None, None] + (v * remains).mT @ b
    return torch.cat(found), state
