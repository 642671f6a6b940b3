"""Choosing a token from logits: which tokens stay in, and the draw among them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import Int32Array
from tokenyard.executor.sampling.noise import uniform
from tokenyard.executor.sampling.sampling_batch import SamplingRows

Int64Array = npt.NDArray[np.int64]

NAN_MARK = 1 << 30
"""Beyond any vocabulary, and within 32 bits."""

NUCLEUS_FRONT = 1024
"""On a CPU a nucleus is first looked for among this many most likely tokens, because sorting all is slow there."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The tokens to draw, as columns on the device.

    rows: int64[n], the row of logits of each token.
    pool_rows: int64[n], the pool row of each token.
    positions: int64[n], the position of each token.
    likeliest: int64[m], the first of the largest logits of each row of logits.
    parameters: the sampling parameters by pool row.
    """

    rows: torch.Tensor
    pool_rows: torch.Tensor
    positions: torch.Tensor
    likeliest: torch.Tensor
    parameters: SamplingRows

    def uniforms(self) -> torch.Tensor:
        """Return the float64[n] in [0, 1) to draw with."""
        return uniform(self.parameters.seeds(self.pool_rows), self.positions)


class SamplingBackend(Protocol):
    """Samples by kernels of a device. logits: float32[m, vocabulary], contiguous within a row."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return int64[m], the first of the largest logits of each row."""

    def draw(self, logits: torch.Tensor, draws: SamplingInputs) -> torch.Tensor:
        """Draw a token for each of `draws`: int64[n]."""


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return int64[n], the first of the largest logits of each row of float32[n, vocabulary]."""
    if logits.device.type == "cpu":
        # numpy takes a tenth of torch's time, and starts no threads that would compete with those of the next step.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by the inverse of the cumulative distribution, in the order of token ids.

    logits: float32[n, vocabulary], -inf for tokens that are out. uniforms: float64[n] in [0, 1). Returns int64[n].
    """
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # The clamp only matters for rows of NaN, which must not end in an index outside the vocabulary.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_max(logits.shape[-1] - 1)


def mark_nan(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the int64[n] tokens that were chosen from float32[n, vocabulary], less NAN_MARK where the chosen logit is
    NaN. The mark travels to the host with the tokens, so that looking for NaN costs no copy; see `unmark_nan`.
    """
    if tokens.device.type == "cpu":
        # numpy takes less time than torch for so few numbers. The place of a token of -1 does not matter.
        host = tokens.numpy()
        if not np.isnan(logits.numpy()[np.arange(len(host)), host]).any():
            return tokens
    chosen = logits.gather(1, tokens.clamp_min(0)[:, None]).squeeze(1)
    return torch.add(tokens, chosen.isnan(), alpha=-NAN_MARK)


def unmark_nan(tokens: Int32Array) -> tuple[Int32Array, Int64Array]:
    """Return the tokens without marks, and the places in them of those that were chosen from NaN."""
    marked = tokens < -1
    if not marked.any():
        return tokens, np.empty(0, np.int64)
    tokens = np.where(marked, tokens + NAN_MARK, tokens)
    # A token of -1 means none.
    return tokens, np.flatnonzero(marked & (tokens >= 0))


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what is less likely than `min_p` times the likeliest token (Nguyen et al. 2024, arXiv 2407.01082)."""
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return logits.masked_fill(logits < threshold, float("-inf"))


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, max_k: int) -> torch.Tensor:
    """Set to -inf what is not among the `top_k` likeliest tokens or not in their nucleus of mass `top_p`.

    top_k: int64[n], the vocabulary's size for "all". top_p: float32[n]; the nucleus is taken of what top_k left,
    renormalised, and always holds the likeliest token (Holtzman et al. 2019, arXiv 1904.09751). Tokens as likely as
    the last one that stays in stay in too. max_k: the host's copy of top_k.max().
    """
    vocabulary = logits.shape[-1]
    if max_k < vocabulary:
        ranked = torch.topk(logits, max_k).values
    elif logits.device.type == "cpu" and vocabulary > 2 * NUCLEUS_FRONT:
        ranked = _front_or_all(logits, top_k, top_p)
    else:
        ranked = torch.sort(logits, descending=True).values
    return logits.masked_fill(logits < _threshold(logits, ranked, top_k, top_p), float("-inf"))


def _front_or_all(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the likeliest logits, best first: only as many as surely hold all that stays in, or all of them."""
    ranked = torch.topk(logits, NUCLEUS_FRONT).values
    mass = torch.exp(ranked.logsumexp(-1) - logits.logsumexp(-1))
    # A margin, because the mass is rounded. A row with a top_k needs all of its k tokens to normalise them.
    held = torch.where(top_k < logits.shape[-1], top_k <= NUCLEUS_FRONT, mass > top_p + 1e-4)
    return ranked if bool(held.all()) else torch.sort(logits, descending=True).values


def _threshold(logits: torch.Tensor, ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return float32[n, 1], the smallest logit that stays in."""
    in_k = torch.arange(ranked.shape[-1], device=ranked.device) < top_k[:, None]
    probabilities = torch.exp(ranked - logits.logsumexp(-1, keepdim=True)).double().masked_fill_(~in_k, 0.0)
    cumulative = probabilities.cumsum(-1)
    limited = top_k < logits.shape[-1]
    total = torch.where(limited, cumulative[:, -1], 1.0)
    mass = torch.where(top_p < 1.0, top_p.double() * total, float("inf"))
    kept = (in_k & (cumulative - probabilities < mass[:, None])).sum(-1, keepdim=True)
    return ranked.gather(1, (kept - 1).clamp_min(0))
