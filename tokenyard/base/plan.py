"""What the executor is told to do in one step, and what it answers.

A `StepPlan` crosses the process or rank boundary as numpy columns; the executor turns it into tensors.
"""

from dataclasses import dataclass, field

import numpy as np

from tokenyard.base.request import BoolArray, Int32Array, LogprobOptions, SamplingParams

LAST_SAMPLED = -1
"""In `StepPlan.tokens`: the token this pool row sampled last, which only the device is sure to have."""


@dataclass(slots=True)
class RowStart:
    """A request takes (or takes again, after it was retracted) a pool row; sent with the first plan that uses it.

    `known_ids` is int32[prompt + output so far]; the executor needs it for penalties and min_new_tokens.
    grammar: what the answer must keep to, a text that `Executor.compile_grammar` has taken; "" for nothing.
    """

    pool_row: int
    sampling: SamplingParams
    known_ids: Int32Array
    prompt_tokens: int
    logprobs: LogprobOptions | None = None
    grammar: str = ""


@dataclass(slots=True)
class StepPlan:
    """One step of the model over some rows. All columns have one entry per row and keep the same order.

    pool_rows: int32[n], row of ReqToTokenPool, which is also the executor's row.
    epochs:    int32[n], the row's epoch when planned; a result with another epoch is dropped.
    starts:    int32[n], position of the first token computed.
    counts:    int32[n], tokens computed, at least 1.
    sampled:   bool[n], whether a token is sampled after the row's last position.
    tokens:    int32[sum(counts)], input token ids row after row; LAST_SAMPLED where only the device knows.
    page_rows, page_columns, page_ids: int32[m], writes page_table[row, column] = page, done before the step.
    row_starts: rows that change owner with this plan, done before anything else.
    decode_rows: how many rows at the front compute one sampled token each (FutureMap rows); the rest are chunks.
    delay_sampling: launch runs the model only and `Executor.sample` follows (a grammar must see the last token).
    num_steps: of a plan that only decodes: so many steps, each one position further with what the one before sampled.
        The page writes are those of all of them, the result's tokens come step after step.
    """

    step: int
    pool_rows: Int32Array
    epochs: Int32Array
    starts: Int32Array
    counts: Int32Array
    sampled: BoolArray
    tokens: Int32Array
    page_rows: Int32Array
    page_columns: Int32Array
    page_ids: Int32Array
    row_starts: list[RowStart] = field(default_factory=list)
    decode_rows: int = 0
    delay_sampling: bool = False
    num_steps: int = 1

    @property
    def last_step(self) -> int:
        """The number of the last of its steps."""
        return self.step + self.num_steps - 1

    @property
    def forward_mode(self) -> str:
        """The seeds' ForwardMode, read off the finished plan: IDLE, DECODE, EXTEND or MIXED."""
        if not len(self.pool_rows):
            return "IDLE"
        if self.decode_rows == len(self.pool_rows):
            return "DECODE"
        return "MIXED" if self.decode_rows else "EXTEND"


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities that one plan row asked for.

    tokens, logprobs: one entry per reported position, from `position` upwards; the last one is the sampled token's if
    the row sampled. top_tokens and top_logprobs hold `top` entries per position, best first.
    """

    index: int
    position: int
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """What the executor answers. `tokens` is int32[n], -1 where the plan row sampled nothing (int32[num_steps * n] of a
    multi-step plan); `seconds` is the time the device worked on it. failures: rows (by place in the plan) that cannot
    go on, with the reason.
    """

    step: int
    tokens: Int32Array
    seconds: float
    logprobs: list[RowLogprobs] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class StepWork:
    """The work of one step as the few sums that its time depends on (`reference` formula of the cost models).

    tokens: all tokens computed. decode_rows: rows computing a single sampled token. decode_context: KV tokens read by
    those rows. prefill_tokens: tokens of chunks. chunk_area: sum over chunks of x * (prefix + x / 2). rows: all rows.
    """

    tokens: int = 0
    rows: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    chunk_area: float = 0.0

    def add_chunk(self, prefix: int, tokens: int) -> None:
        """Add a prefill chunk of `tokens` after `prefix` tokens already in the cache."""
        self.tokens += tokens
        self.rows += 1
        self.prefill_tokens += tokens
        self.chunk_area += tokens * (prefix + tokens / 2)


def step_work(plan: StepPlan) -> StepWork:
    """Sum up a plan's work for a cost model; a decode at position p reads p + 1 tokens of KV."""
    decodes = plan.decode_rows
    context = int(plan.starts[:decodes].sum(dtype=np.int64)) + decodes
    if decodes == len(plan.pool_rows):
        return StepWork(tokens=decodes, rows=decodes, decode_rows=decodes, decode_context=context)
    starts = plan.starts[decodes:].astype(np.float64)
    counts = plan.counts[decodes:].astype(np.float64)
    prefill_tokens = int(counts.sum())
    return StepWork(
        tokens=decodes + prefill_tokens,
        rows=len(plan.pool_rows),
        decode_rows=decodes,
        decode_context=context,
        prefill_tokens=prefill_tokens,
        chunk_area=float((counts * (starts + counts / 2)).sum()),
    )
