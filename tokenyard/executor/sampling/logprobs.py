"""Log-probabilities of tokens, for rows whose request asked for them.

They are of the model's own distribution: log_softmax of the logits before bias, penalties, temperature and filters,
as OpenAI's API and vLLM report them by default.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenyard.base import RowLogprobs, StepPlan
from tokenyard.executor.sampling.rows import LOGPROBS, SamplingRows

PIECE_POSITIONS = 256
"""Prompt positions whose logits are computed at once, to bound memory."""


@dataclass(slots=True)
class LogprobPiece:
    """Log-probabilities of consecutive positions of one plan row; tensors lead with the number of positions.

    tokens, logprobs: [positions]; top_tokens, top_logprobs: [positions, top].
    """

    index: int
    position: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Return the four tensors, in the order of the fields."""
        return [self.tokens, self.logprobs, self.top_tokens, self.top_logprobs]


@dataclass(slots=True)
class OutputLogprobs:
    """What must be kept of the raw logits until the tokens are sampled.

    places: which of the sampled rows report; plan_rows: their indices in the plan. logprobs: float32[m, vocabulary].
    """

    places: list[int] = field(default_factory=list)
    plan_rows: list[int] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    logprobs: torch.Tensor | None = None


def prompt_pieces(
    plan: StepPlan, rows: SamplingRows, logits_of: Callable[[int, int], torch.Tensor]
) -> list[LogprobPiece]:
    """Return the prompt log-probabilities of a step; `logits_of(first, last)` gives logits of tokens of the step.

    A row that takes up an answer again reports no prompt positions: it reported them before its first token.
    """
    pieces: list[LogprobPiece] = []
    if not rows.starts:
        return pieces
    offsets = np.cumsum(plan.counts) - plan.counts
    for i in np.flatnonzero(rows.kinds[plan.pool_rows] & LOGPROBS).tolist():
        start = rows.starts[int(plan.pool_rows[i])]
        options = start.logprobs
        if options is None or options.prompt_from < 0 or len(start.known_ids) > start.prompt_tokens:
            continue
        begin, count = int(plan.starts[i]), int(plan.counts[i])
        first = max(begin + 1, options.prompt_from)
        last = min(begin + count, start.prompt_tokens - 1)
        for position in range(first, last + 1, PIECE_POSITIONS):
            end = min(position + PIECE_POSITIONS, last + 1)
            # The logits at a position are about the token that follows it.
            token = int(offsets[i]) + position - 1 - begin
            logprobs = torch.log_softmax(logits_of(token, token + end - position), dim=-1)
            tokens = torch.from_numpy(start.known_ids[position:end].astype(np.int64)).to(logprobs.device)
            pieces.append(_piece(i, position, logprobs, tokens, options.top))
    return pieces


def keep_output(plan: StepPlan, rows: SamplingRows, logits: torch.Tensor) -> OutputLogprobs:
    """Keep the log-probabilities of sampled rows that report them, before sampling changes the logits."""
    kept = OutputLogprobs()
    if not rows.starts:
        return kept
    sampled = np.flatnonzero(plan.sampled)
    for place in np.flatnonzero(rows.kinds[plan.pool_rows[sampled]] & LOGPROBS).tolist():
        options = rows.starts[int(plan.pool_rows[sampled[place]])].logprobs
        if options is not None and options.output:
            kept.places.append(place)
            kept.plan_rows.append(int(sampled[place]))
            kept.tops.append(options.top)
    if kept.places:
        kept.logprobs = torch.log_softmax(logits[torch.tensor(kept.places, device=logits.device)], dim=-1)
    return kept


def output_pieces(kept: OutputLogprobs, plan: StepPlan, tokens: torch.Tensor) -> list[LogprobPiece]:
    """Return the log-probabilities of the sampled int64[n] tokens, for the rows that were kept."""
    if kept.logprobs is None:
        return []
    pieces = []
    for at, (place, row, top) in enumerate(zip(kept.places, kept.plan_rows, kept.tops, strict=True)):
        position = int(plan.starts[row] + plan.counts[row])
        pieces.append(_piece(row, position, kept.logprobs[at : at + 1], tokens[place : place + 1], top))
    return pieces


def _piece(index: int, position: int, logprobs: torch.Tensor, tokens: torch.Tensor, top: int) -> LogprobPiece:
    best = torch.topk(logprobs, min(top, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return LogprobPiece(index, position, tokens, own, best.indices, best.values)


def join_pieces(pieces: list[LogprobPiece]) -> list[RowLogprobs]:
    """Put the pieces of each plan row together, in order of position; tensors must be on the host by now."""
    joined: dict[int, RowLogprobs] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.index, piece.position)):
        row = joined.setdefault(piece.index, RowLogprobs(piece.index, piece.position, [], []))
        row.tokens += piece.tokens.tolist()
        row.logprobs += piece.logprobs.tolist()
        row.top_tokens += piece.top_tokens.tolist()
        row.top_logprobs += piece.top_logprobs.tolist()
    return list(joined.values())
