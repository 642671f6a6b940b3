"""Log-probabilities of tokens, for rows whose request asked for them.

They are of the model's own distribution: log_softmax of the logits before bias, penalties, temperature and filters,
as OpenAI's API and vLLM report them by default.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenyard.base import RowLogprobs, StepPlan
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.forward_batch import samples_of
from tokenyard.executor.sampling.sampling_batch import LOGPROBS, SamplingRows

PIECE_POSITIONS = 256
"""Prompt positions whose logits are computed at once, to bound memory."""


@dataclass(slots=True)
class LogprobRun:
    """`count` consecutive positions of one plan row, from `position` upwards, with `top` alternatives each.

    index: the row's index in the plan.
    token_ids: tokens that are reported at each position whatever their rank.
    """

    index: int
    position: int
    count: int
    top: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LogprobPiece:
    """Log-probabilities of the positions of some runs, one run after the other.

    tokens: [positions], the chosen tokens.
    logprobs: [positions], theirs.
    top_tokens: [positions, the most that a run wants], best first in the first `ranked` columns, then those that
        runs name.
    top_logprobs: the same shape, theirs.
    """

    runs: list[LogprobRun]
    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    ranked: int

    def tensors(self) -> list[torch.Tensor]:
        """Return the four tensors, in the order of the fields."""
        return [self.tokens, self.logprobs, self.top_tokens, self.top_logprobs]


@dataclass(slots=True)
class OutputLogprobs:
    """What must be kept of the raw logits until the tokens are sampled.

    places: int64[m] on the device, which of the sampled positions report. logprobs: float32[m, vocabulary].
    """

    runs: list[LogprobRun]
    places: torch.Tensor
    logprobs: torch.Tensor


def prompt_pieces(
    plan: StepPlan, rows: SamplingRows, logits_of: Callable[[int, int], torch.Tensor]
) -> list[LogprobPiece]:
    """Return the prompt log-probabilities of a step; `logits_of(first, last)` gives logits of tokens of the step.

    A row that takes up an answer again reports no prompt positions: it reported them before its first token.
    """
    pieces: list[LogprobPiece] = []
    for first, end, run in prompt_ranges(plan, rows):
        start = rows.starts[int(plan.pool_rows[run.index])]
        logprobs = torch.log_softmax(logits_of(first, end), dim=-1)
        known = start.known_ids[run.position : run.position + run.count]
        pieces.append(_piece([run], logprobs, to_device(known.astype(np.int64), logprobs.device)))
    return pieces


def prompt_ranges(plan: StepPlan, rows: SamplingRows) -> list[tuple[int, int, LogprobRun]]:
    """Return (first token, end, run) of the prompt positions of a step that report log-probabilities."""
    ranges: list[tuple[int, int, LogprobRun]] = []
    if not rows.starts:
        return ranges
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
            run = LogprobRun(i, position, end - position, options.top, options.token_ids)
            ranges.append((token, token + end - position, run))
    return ranges


def keep_output(plan: StepPlan, rows: SamplingRows, logits: torch.Tensor) -> OutputLogprobs | None:
    """Keep the log-probabilities of sampled rows that report them, before sampling changes the logits."""
    if not rows.starts:
        return None
    samples = samples_of(plan)
    ends = np.cumsum(samples)
    places: list[int] = []
    runs: list[LogprobRun] = []
    for row in np.flatnonzero((rows.kinds[plan.pool_rows] & LOGPROBS != 0) & (samples > 0)).tolist():
        options = rows.starts[int(plan.pool_rows[row])].logprobs
        count, end = int(samples[row]), int(ends[row])
        if options is not None and options.output:
            places += range(end - count, end)
            position = int(plan.starts[row] + plan.counts[row]) - count + 1
            runs.append(LogprobRun(row, position, count, options.top, options.token_ids))
    if not runs:
        return None
    on_device = to_device(np.array(places, dtype=np.int64), logits.device)
    return OutputLogprobs(runs, on_device, torch.log_softmax(logits[on_device], dim=-1))


def output_piece(kept: OutputLogprobs, tokens: torch.Tensor) -> LogprobPiece:
    """Return the log-probabilities of the sampled int64[n] tokens, for the rows that were kept."""
    return _piece(kept.runs, kept.logprobs, tokens[kept.places])


def _piece(runs: list[LogprobRun], logprobs: torch.Tensor, tokens: torch.Tensor) -> LogprobPiece:
    """Read what the runs want off float32[positions, vocabulary], for all of them at once."""
    best = torch.topk(logprobs, min(max(run.top for run in runs), logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1)
    ids, values, ranked = best.indices, best.values, best.indices.shape[-1]
    if any(run.token_ids for run in runs):
        named = _named_tokens(runs, logprobs.device)
        ids, values = torch.cat((ids, named), dim=-1), torch.cat((values, logprobs.gather(1, named)), dim=-1)
    return LogprobPiece(runs, tokens, own, ids, values, ranked)


def _named_tokens(runs: list[LogprobRun], device: torch.device) -> torch.Tensor:
    """The tokens that runs name, int64[positions, the most of a run]; rows with fewer are filled up with token 0."""
    width = max(len(run.token_ids) for run in runs)
    rows = [run.token_ids + [0] * (width - len(run.token_ids)) for run in runs]
    return to_device(np.repeat(np.array(rows, dtype=np.int64), [run.count for run in runs], axis=0), device)


def join_pieces(pieces: list[LogprobPiece]) -> list[RowLogprobs]:
    """Put the positions of each plan row together; tensors must be on the host by now.

    Pieces must come in order of position: those of a prompt first, as they were made, then that of the answers.
    """
    joined: dict[int, RowLogprobs] = {}
    for piece in pieces:
        tokens, logprobs, top_tokens, top_logprobs = (tensor.tolist() for tensor in piece.tensors())
        first = 0
        for run in piece.runs:
            own = slice(first, first + run.count)
            row = joined.setdefault(run.index, RowLogprobs(run.index, run.position, [], []))
            row.tokens += tokens[own]
            row.logprobs += logprobs[own]
            named = slice(piece.ranked, piece.ranked + len(run.token_ids))
            row.top_tokens += [ids[: run.top] + ids[named] for ids in top_tokens[own]]
            row.top_logprobs += [values[: run.top] + values[named] for values in top_logprobs[own]]
            first += run.count
    return [joined[index] for index in sorted(joined)]
