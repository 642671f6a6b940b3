"""Plans, which say what the executor does in one step, and its results.

A `StepPlan` crosses the process or rank boundary as numpy columns; the executor turns it into tensors.
"""

from dataclasses import dataclass, field

import numpy as np

from tokenyard.base.request import (
    NO_TOKENS,
    BoolArray,
    Int32Array,
    Int64Array,
    LogprobOptions,
    Pooling,
    SamplingParams,
)

LAST_SAMPLED = -1
"""In `StepPlan.tokens`: the token this pool row sampled last, which may be only on the device yet."""

DRAFT = -2
"""In `StepPlan.tokens`: the next draft of this pool row (speculative decoding), which only the executor knows."""


NO_STATE_COPIES: Int32Array = np.empty((0, 2), np.int32)


@dataclass(slots=True)
class RowStart:
    """A request takes (or takes again, after it was retracted) a pool row; sent with the first plan that uses it.

    `known_ids` is int32[prompt + output so far]; the executor needs it for penalties and min_new_tokens. grammar: the
    grammar that the answer must follow, which `Executor.compile_grammar` has compiled; "" for none. pooling: how the
    vector of the prompt is made, which the step that completes the prompt gives; "" for none. prediction: int32[n],
    what the client expects of the answer, for drafts. lora, slot: the row's adapter (`Request.lora`) and the slot in
    which it is while the row has its place, from 1 on; "" and 0 for none. The executor brings the adapter there before
    the step if another one is in it.
    """

    pool_row: int
    sampling: SamplingParams
    known_ids: Int32Array
    prompt_tokens: int
    logprobs: LogprobOptions | None = None
    grammar: str = ""
    pooling: Pooling = ""
    prediction: Int32Array = field(default_factory=lambda: NO_TOKENS)
    lora: str = ""
    slot: int = 0


@dataclass(slots=True)
class StepPlan:
    """One step of the model over some rows. All columns have one entry per row and keep the same order.

    pool_rows: int32[n], row of ReqToTokenPool, which is also the executor's row. epochs: int32[n], the row's epoch when
    planned; a result with another epoch is dropped. starts: int32[n], position of the first token computed. counts:
    int32[n], tokens computed, at least 1. samples: int32[n], at how many of its last positions a row samples: 0 for a
    chunk that is not the last, 1 for one token, 1 + k for k drafts to verify. tokens: int32[sum(counts)], input token
    ids row after row; LAST_SAMPLED or DRAFT where only the device knows. page_rows, page_columns, page_ids: int32[m],
    writes page_table[row, column] = page, done before the step. row_starts: rows that change owner with this plan, done
    before anything else. decode_rows: how many rows at the front compute one sampled token each (FutureMap rows).
    verify_rows: how many rows after those compute their last sampled token and drafts; the rest are chunks.
    delay_sampling: launch runs the model only and `Executor.sample` follows (a grammar must see the last token).
    num_steps: steps of a multi-step plan, which only decodes; each is one position further, with the token that the one
    before sampled. The page writes are those of all steps, and the result's tokens come step after step.
    adapter_loads: how many adapters the rows that start bring to slots where they are not yet. window_ids: int32[m],
    what the same writes put into the page table of the layers with a window (`ExecutorInfo.windows`), 0 for nothing;
    int32[0] without such a group. state_copies: int32[k, 2], from which slot to which the recurrent states are copied
    before the step; int32[0, 2] for a model without such layers.
    """

    step: int
    pool_rows: Int32Array
    epochs: Int32Array
    starts: Int32Array
    counts: Int32Array
    samples: Int32Array
    tokens: Int32Array
    page_rows: Int32Array
    page_columns: Int32Array
    page_ids: Int32Array
    row_starts: list[RowStart] = field(default_factory=list)
    decode_rows: int = 0
    verify_rows: int = 0
    delay_sampling: bool = False
    num_steps: int = 1
    adapter_loads: int = 0
    window_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)
    state_copies: Int32Array = field(default_factory=lambda: NO_STATE_COPIES)

    @property
    def sampled(self) -> BoolArray:
        """bool[n], whether a row samples at all."""
        return self.samples > 0

    @property
    def positions(self) -> Int64Array:
        """int64[sum(counts)], the position of each input token: consecutive from the row's start."""
        counts = self.counts.astype(np.int64)
        # Index among all tokens plus a constant per row.
        return np.arange(len(self.tokens)) + np.repeat(self.starts - np.cumsum(counts) + counts, counts)

    @property
    def sampled_positions(self) -> Int64Array:
        """int64[sum(samples)], the positions of the tokens that the step samples, row after row."""
        samples = self.samples.astype(np.int64)
        ends = (self.starts + self.counts).astype(np.int64)
        # A row's samples run up to its end: index among all samples plus a constant per row.
        return np.arange(1, int(samples.sum()) + 1) + np.repeat(ends - np.cumsum(samples), samples)

    @property
    def chunks_from(self) -> int:
        """Where the chunks begin: rows before it decode or verify."""
        return self.decode_rows + self.verify_rows

    @property
    def last_step(self) -> int:
        """The number of the last of its steps."""
        return self.step + self.num_steps - 1

    @property
    def forward_mode(self) -> str:
        """SGLang's ForwardMode of the plan: IDLE, DECODE, EXTEND or MIXED."""
        if not len(self.pool_rows):
            return "IDLE"
        if self.chunks_from == len(self.pool_rows):
            return "DECODE"
        return "MIXED" if self.chunks_from else "EXTEND"


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
    """The result of one plan. `seconds` is the time the device worked on it.

    tokens: int32[n], -1 where the plan row sampled nothing (int32[num_steps * n] of a multi-step plan). accepted:
    int32[n], how many tokens each row yields, from 0 for a chunk that is not the last to its `samples`; then `tokens`
    is int32[sum(accepted)], row after row. None: one for each row with a token in `tokens`. A row that verifies drafts
    yields those that its own samples confirm, and the sample after them. drafted: int32[n], how many drafts the
    executor has ready for each row's next step; None: it drafts for no row. chances: int32[n], in thousandths, how
    likely a row's next draft is right if those before it are; None: unknown. ended: bool[n], whether a row's grammar
    is complete after its last token; None: no row's. failures: rows (by place in the plan) that cannot continue, with
    the reason. vectors: those of prompts that were wanted and are complete, by place in the plan, as raw float32.
    nan_rows: places in the plan of rows whose logits were NaN, so that their tokens mean nothing.
    """

    step: int
    tokens: Int32Array
    seconds: float
    logprobs: list[RowLogprobs] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    accepted: Int32Array | None = None
    drafted: Int32Array | None = None
    chances: Int32Array | None = None
    ended: BoolArray | None = None
    vectors: dict[int, bytes] = field(default_factory=dict)
    nan_rows: tuple[int, ...] = ()


@dataclass(slots=True)
class StepWork:
    """The work of one step as the few sums that its time depends on (see `cost.linear`).

    tokens: all tokens computed. rows: all rows. decode_rows: rows that decode, with drafts to verify or without.
    decode_context: KV tokens read by those rows. verify_tokens: tokens of rows that verify drafts. prefill_tokens:
    tokens of chunks. chunk_area: sum over chunks of x * (prefix + x / 2). adapter_loads: LoRA adapters that are brought
    to slots of the device.
    """

    tokens: int = 0
    rows: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    chunk_area: float = 0.0
    verify_tokens: int = 0
    adapter_loads: int = 0

    def add_chunk(self, prefix: int, tokens: int) -> None:
        """Add a prefill chunk of `tokens` after `prefix` tokens already in the cache."""
        self.tokens += tokens
        self.rows += 1
        self.prefill_tokens += tokens
        self.chunk_area += tokens * (prefix + tokens / 2)


def step_work(plan: StepPlan) -> StepWork:
    """Sum up a plan's work for a cost model; a decode at position p reads p + 1 tokens of KV, its drafts no more."""
    decodes, chunks = plan.decode_rows, plan.chunks_from
    context, verified = int(plan.starts[:chunks].sum(dtype=np.int64)) + decodes, 0
    if plan.verify_rows:
        verified = int(plan.counts[decodes:chunks].sum())
    work = StepWork(
        tokens=decodes + verified,
        rows=len(plan.pool_rows),
        decode_rows=chunks,
        decode_context=context + verified,
        verify_tokens=verified,
        adapter_loads=plan.adapter_loads,
    )
    if chunks < len(plan.pool_rows):
        starts = plan.starts[chunks:].astype(np.float64)
        counts = plan.counts[chunks:].astype(np.float64)
        work.prefill_tokens = int(counts.sum())
        work.tokens += work.prefill_tokens
        work.chunk_area = float((counts * (starts + counts / 2)).sum())
    return work
