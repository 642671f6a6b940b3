"""Gated delta net: linear attention with a recurrent state (Yang et al. 2024, arXiv 2412.06464), as Qwen3.5 has it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.layers.recurrent import recur
from tokenyard.executor.models.config import DeltaNetConfig

CHUNK_TOKENS = 64
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The tensors of one layer.

    inputs: the product whose rows are queries, keys and values (`DeltaNetConfig.channels`), the output gate
        [value_heads * value_dim], and per value head the strength of writes and the step size of the decay.
    conv: [kernel, channels], the weights of each channel's convolution over the last tokens, the oldest first.
    log_decay, step_bias: float32[value_heads], the checkpoint's A_log and dt_bias.
    norm: [value_dim]. output: the product from [value_heads * value_dim] to the hidden size.
    """

    inputs: Product
    conv: torch.Tensor
    log_decay: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    output: Product


class GatedDeltaNet:
    """One layer. It reads and writes the states of the batch's rows in the batch's state pool.

    index: the layer's number among those with a state. Everything between the two products is in float32.
    """

    def __init__(self, config: DeltaNetConfig, index: int, weights: DeltaNetWeights, norm_eps: float) -> None:
        self._config, self._index, self._eps = config, index, norm_eps
        self.inputs, self.output = weights.inputs, weights.output
        self._decay = -weights.log_decay.exp()
        self._step_bias, self._conv = weights.step_bias, weights.conv.float()
        self._norm = weights.norm.float()

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden], in the dtype of `x`."""
        config = self._config
        values = config.value_heads * config.value_dim
        sizes = [config.channels, values, config.value_heads, config.value_heads]
        mixed, gate, strength, step = torch.split(self.inputs(x), sizes, dim=-1)
        strength = strength.float().sigmoid()
        decay = self._decay * F.softplus(step.float() + self._step_bias)

        def advance(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> torch.Tensor:
            return delta_step(*self._heads(convolved), decay[tokens], strength[tokens], state)

        def run(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return delta_chunks(*self._heads(convolved), decay[tokens], strength[tokens], state)

        found = recur(batch, self._index, mixed, self._conv, None, advance, run)
        return self.output(self._normed(found, gate).to(x.dtype))

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [tokens, value_heads, key_dim], of length one, and values [tokens, value_heads, value_dim]
        of what the convolution gives, float32[tokens, channels].
        """
        config = self._config
        keys = config.key_heads * config.key_dim
        mixed = F.silu(mixed)
        q, k, v = torch.split(mixed, [keys, keys, config.value_heads * config.value_dim], dim=-1)
        qk = torch.stack((q, k)).view(2, len(mixed), config.key_heads, config.key_dim)
        qk = qk * torch.rsqrt(qk.square().sum(dim=-1, keepdim=True) + L2_EPS)
        qk = qk.repeat_interleave(config.value_heads // config.key_heads, dim=2)
        return qk[0] * config.key_dim**-0.5, qk[1], v.reshape(len(mixed), config.value_heads, -1)

    def _normed(self, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise each head of float32[tokens, heads, value_dim], then gate: float32[tokens, heads * value_dim]."""
        return F.rms_norm(found, self._norm.shape, self._norm, self._eps).flatten(1) * F.silu(gate.float())


def delta_step(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Advance the states of several rows by one token each, in place; returns float32[rows, heads, value_dim].

    queries, keys: [rows, heads, key_dim]; values: [rows, heads, value_dim]. decay: [rows, heads], the logarithm of what
    remains of the state; strength: [rows, heads], of what the token writes. state: [rows, heads, key_dim, value_dim].
    """
    state.mul_(decay.exp()[..., None, None])
    written = (values - (keys.unsqueeze(-2) @ state).squeeze(-2)) * strength.unsqueeze(-1)
    state.addcmul_(keys.unsqueeze(-1), written.unsqueeze(-2))
    return (queries.unsqueeze(-2) @ state).squeeze(-2)


def delta_chunks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance one row by several tokens: float32[tokens, heads, value_dim], and the state after them.

    The arguments are those of `delta_step` with tokens in the place of rows; state: [heads, key_dim, value_dim].

    What the tokens of a chunk write solves a triangular system (section 3 of the paper: the WY form), so that the
    recurrence is a few products of matrices for each chunk of CHUNK_TOKENS tokens.
    """
    tokens, size = len(queries), min(CHUNK_TOKENS, len(queries))
    padding = -tokens % size

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] -> [heads, chunks, size, ...]; tokens added at the end neither decay nor write."""
        if padding:
            x = torch.cat((x, x.new_zeros(padding, *x.shape[1:])))
        return x.reshape(-1, size, *x.shape[1:]).movedim(2, 0)

    q, k, v, strengths = map(chunked, (queries, keys, values, strength.unsqueeze(-1)))
    since = chunked(decay).cumsum(dim=-1)
    # The logarithm is masked, not its exponential, which overflows above the diagonal.
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    remains = since.exp().unsqueeze(-1)
    system = (k @ k.mT) * between * strengths
    wanted = torch.cat((v, k * remains), dim=-1) * strengths
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.mT) * between
    q, k = q * remains, k * (since[..., -1:] - since).exp().unsqueeze(-1)
    found = []
    for chunk in range(q.shape[1]):
        written = writes[:, chunk] - reads[:, chunk] @ state
        found.append(q[:, chunk] @ state + scores[:, chunk] @ written)
        state = state * remains[:, chunk, -1:] + k[:, chunk].mT @ written
    return torch.cat(found, dim=1).transpose(0, 1)[:tokens], state
