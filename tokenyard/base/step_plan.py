"""Step plans, which state what the executor does in one step, and their results.

A `StepPlan` crosses rank boundaries as numpy columns; the executor turns it into tensors.
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
"""In `StepPlan.tokens`: the token that this pool row sampled last, which may still be on the device only."""

DRAFT = -2
"""In `StepPlan.tokens`: the next draft of this pool row (speculative decoding), which the executor fills in."""


NO_STATE_COPIES: Int32Array = np.empty((0, 2), np.int32)
NO_STATE_SAVES: Int32Array = np.empty((0, 3), np.int32)
NO_STATE_PAGES: Int32Array = np.empty((0, 0), np.int32)


@dataclass(slots=True)
class RowStart:
    """A request is admitted, for the first time or after a retraction. Sent with the first plan that uses its pool row.

    known_ids: int32[prompt + output so far]; the executor needs it for penalties and min_new_tokens.
    grammar: the grammar that the answer must follow, compiled by `Executor.compile_grammar`; "" for none.
    pooling: how the prompt's vector is made, which the step that completes the prompt returns; "" for none.
    prediction: int32[n], what the client expects of the answer, for drafts.
    lora: the row's adapter (`Request.lora`); "" for none.
    slot: the adapter's slot while the row is admitted, from 1 on; 0 for none. If another adapter is in it, the executor
        loads this one before the step.
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
    """One step of the model over n rows: first decoding rows, then verifying rows, then prefill chunks.

    pool_rows: int32[n], rows of ReqToTokenPool, which are also the executor's rows.
    epochs: int32[n], each row's epoch when planned. The result of a row whose epoch has changed is dropped.
    starts: int32[n], position of the first token computed.
    counts: int32[n], tokens computed, at least 1.
    samples: int32[n], at how many of its last positions a row samples: 0 for a chunk that is not the last, 1 for one
        token, 1 + k for k drafts to verify.
    tokens: int32[sum(counts)], input token ids row after row; LAST_SAMPLED or DRAFT for tokens on the device.
    page_rows, page_columns, page_ids: int32[m], writes page_table[row, column] = page, done before the step.
    row_starts: rows that change owner with this plan, done before the page writes.
    decode_rows: how many rows at the front compute one sampled token each (FutureMap rows).
    verify_rows: how many rows after those compute their last sampled token and drafts.
    delay_sampling: `launch` runs the model without sampling and `Executor.sample` follows, because a grammar needs the
        last token.
    num_steps: steps of a multi-step plan, in which all rows decode. Each step is one position further and takes the
        token that the step before sampled. The page writes are those of all steps; the result's tokens are in order of
        steps.
    adapter_loads: how many adapters the executor loads into slots for the rows that start.
    window_ids: int32[m], the same writes for the page table of the layers with a window (`ExecutorInfo.windows`), 0 for
        no page; int32[0] without such a group.
    state_copies: int32[k, 2], source and target slot of each copy of recurrent states before the step; int32[0, 2] for
        a model without such layers.
    state_saves: int32[k, 3], pool row, position and target slot: the recurrent state of the row after its tokens before
        this position, which this step computes, is copied to the slot. Copies of `state_copies` come first.
    state_pages: int32[copies + saves, StateGroup.slot_pages], the pages that hold the checkpoint of each copy and each
        save; int32[0, 0] where checkpoints have memory of their own.
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
    state_saves: Int32Array = field(default_factory=lambda: NO_STATE_SAVES)
    state_pages: Int32Array = field(default_factory=lambda: NO_STATE_PAGES)

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
    """The log-probabilities that the request in one plan row asks for.

    index: the row's index in the plan.
    position: the first reported position.
    tokens, logprobs: one entry per reported position; the last one is the sampled token's if the row sampled.
    top_tokens, top_logprobs: for each position the likeliest tokens, best first.
    """

    index: int
    position: int
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """The result of one plan over n rows.

    tokens: int32[n], -1 for a row that sampled nothing; int32[num_steps * n] for a multi-step plan;
        int32[sum(accepted)] row after row if `accepted` is given.
    seconds: the time that the device worked on the step.
    failures: rows (by index in the plan) that cannot continue, with the reason.
    accepted: int32[n], how many tokens each row yields: 0 for a chunk that is not the last, at most its `samples`. A
        row that verifies drafts yields those that its own samples confirm, and the sample after them. None: one for
        each row with a token in `tokens`.
    drafted: int32[n], how many drafts the executor has for each row's next step; None if it drafts for no row.
    chances: int32[n], in thousandths, the probability that a row's next draft is right if those before it are; None for
        unknown.
    ended: bool[n], whether a row's grammar is complete after its last token; None for no row.
    vectors: the requested vectors of completed prompts as raw float32, by index in the plan.
    nan_rows: indices in the plan of rows whose logits were NaN; their tokens are meaningless.
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

    tokens: all tokens computed.
    rows: all rows.
    decode_rows: rows that decode, with or without drafts to verify.
    decode_context: KV tokens read by those rows.
    prefill_tokens: tokens of chunks.
    chunk_area: sum over chunks of x tokens of x * (prefix + x / 2).
    verify_tokens: tokens of rows that verify drafts.
    adapter_loads: LoRA adapters loaded into slots of the device.
    chunks: number of prefill chunks.
    """

    tokens: int = 0
    rows: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    chunk_area: float = 0.0
    verify_tokens: int = 0
    adapter_loads: int = 0
    chunks: int = 0

    def add_chunk(self, prefix: int, tokens: int) -> None:
        """Add a prefill chunk of `tokens` after `prefix` tokens that have KV already."""
        self.tokens += tokens
        self.rows += 1
        self.chunks += 1
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
        work.chunks = len(counts)
        work.prefill_tokens = int(counts.sum())
        work.tokens += work.prefill_tokens
        work.chunk_area = float((counts * (starts + counts / 2)).sum())
    return work
