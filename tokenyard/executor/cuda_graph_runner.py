"""CUDA graphs: steps are captured at startup and replayed, decodes by batch size, steps of rows of all kinds by tokens.

A step of a small model is hundreds of short kernels, and the host takes longer to launch them than the device to run
them. A captured step is one launch. It reads and writes the memory that it was captured with: inputs are copied there,
and a batch between two captured sizes is padded with rows, or tokens, that write to page 0, which no request owns.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tokenyard.base import ConfigError, StepPlan
from tokenyard.executor.attention.backend import PlansCapturedSteps, PlansTokenBuckets
from tokenyard.executor.forward_batch import Bucket, ForwardBatch
from tokenyard.executor.layers.grouped_experts import why_not as why_not_grouped
from tokenyard.executor.lora_manager import TorchLoraPool
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.plan_inputs import PlanInputs
from tokenyard.executor.sampling.top_k_top_p import mark_nan
from tokenyard.executor.state_pool import StateBatch, StatePool

logger = logging.getLogger(__name__)

DEFAULT_MAX_CAPTURE_BS = 256
"""The largest batch size that is captured by default."""

DEFAULT_MAX_CAPTURE_TOKENS = 512
"""The most tokens of a captured step of rows of all kinds by default; the device should take longer for more."""
BUCKET_ROWS = (16, 64)
"""Rows that a captured step of more tokens has room for, besides as many as tokens: attention launches programs for
rows that may come, so that few rows of many tokens should not pay for many rows."""

GraphCapturer = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures work on tensors at fixed addresses, and returns a function that replays it."""


def capture_batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to capture, rising: 1, 2, 4, then steps of 8, 16 and 32, and `largest` itself.

    So less than half of a batch is padding, and less than a fifth from 40 rows on.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


def capture_buckets(largest: int) -> list[Bucket]:
    """Return the captured steps of rows of all kinds of up to `largest` tokens, rising; none for `largest` below 8.

    From 16 tokens on less than half of a step is padding, and less than a third from 64 on.
    """
    sizes = [*range(8, 64, 8), *range(64, 256, 32), *range(256, largest, 64)]
    tokens = [*(size for size in sizes if size < largest), largest] if largest >= sizes[0] else []
    return [
        Bucket(size, rows)
        for size in tokens
        for rows in (*(few for few in BUCKET_ROWS if size > BUCKET_ROWS[-1]), size)
    ]


class CudaGraphRunner:
    """A ModelBackend that replays captured steps, and runs larger ones eagerly. SGLang's CudaGraphRunner.

    When all rows decode, attention must do nothing on the host that depends on lengths (TritonAttention does not), or
    does it in `plan_captured`. Steps with chunks or drafts to verify are captured up to hidden states, of which those
    that are sampled become logits afterwards; attention says in `plan_bucket` which tokens are whose. With adapters
    each size is captured twice, so that steps without them pay nothing.
    """

    def __init__(
        self,
        model: TorchModel,
        config: ModelConfig,
        largest: int,
        device: torch.device,
        record: GraphCapturer,
        adapters: TorchLoraPool | None = None,
        plans: PlanInputs | None = None,
        max_tokens: int = 0,
        states: StatePool | None = None,
        *,
        divided: bool = False,
    ) -> None:
        """Capture decodes of up to `largest` rows, and other steps of up to `max_tokens` tokens, for which attention
        must be PlansTokenBuckets.

        adapters: the slots of the model's products.
        plans: given for steps that begin with a plan and end with the likeliest tokens (`decode`).
        states: of a model with recurrent states, of which decodes alone are captured.
        divided: whether the ranks of a model capture the same steps at the same time; they gather logits, which only
            rank 0 has, outside of captured steps.

        Raises ConfigError if memory runs out.
        """
        self._model, self._adapters, self.plans, self._states = model, adapters, plans, states
        self._divided = divided
        self._planner = model.attention if isinstance(model.attention, PlansCapturedSteps) else None
        self._bucket_planner = model.attention if isinstance(model.attention, PlansTokenBuckets) else None
        assert not max_tokens or self._bucket_planner is not None
        if adapters is not None and adapters.slots_of_tokens is not None:
            max_tokens = min(max_tokens, len(adapters.slots_of_tokens))
        self._sizes, self._buckets = capture_batch_sizes(largest), capture_buckets(max_tokens)
        widest = max(largest, max_tokens)
        # Token ids, positions, slots, pool rows, and the rows of the FutureMap that tokens are stored to.
        self._columns = torch.zeros(5, widest, dtype=torch.int64, device=device)
        if plans is not None:
            self._columns[4] = plans.future.padding_row
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self._numbers = torch.arange(widest, device=device)
        self._logits = torch.zeros(0 if divided else largest, config.vocab_size, device=device)
        self._hidden = torch.empty(0)
        self._aux: torch.Tensor | None = None
        self._plays: dict[tuple[int | Bucket, bool], Callable[[], None]] = {}
        begin_s = time.perf_counter()
        # From large to small, so that smaller graphs reuse the memory of the largest.
        for done, bucket in enumerate(reversed(self._buckets)):
            logger.info("recording steps: %d tokens, %d rows, %d of %d", *bucket, done + 1, len(self._buckets))
            self._capture(bucket, self._bucket_work(bucket), record, "lower cuda_graph_max_tokens")
        for done, size in enumerate(reversed(self._sizes)):
            logger.info("recording decode steps: batch size %d, %d of %d", size, done + 1, len(self._sizes))
            self._capture(size, self._work(size), record, "lower --cuda-graph-max-bs")
        if adapters is not None:
            adapters.capture(adapted=False)
        logger.info("recorded %d steps in %.1f s", len(self._plays), time.perf_counter() - begin_s)

    def _capture(self, size: int | Bucket, work: Callable[[], None], record: GraphCapturer, instead: str) -> None:
        """Capture a step without adapters, and one with. Raises ConfigError if memory runs out."""
        try:
            for adapted in (False,) if self._adapters is None else (False, True):
                if self._adapters is not None:
                    self._adapters.capture(adapted=adapted)
                self._plays[size, adapted] = record(work)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"there is no memory to record steps of {size} rows or tokens; {instead} or --mem-fraction-static, or"
                " take --disable-cuda-graph"
            ) from error

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; see ModelBackend."""
        size, tokens = self.size_for(batch), len(batch.token_ids)
        bucket = None if size else self.bucket_for(batch)
        if not size and bucket is None:
            return self._model.step(batch)
        inputs = [batch.token_ids, batch.positions, batch.slots, batch.pool_rows, batch.pool_rows]
        torch._foreach_copy_(list(self._columns[:, :tokens].unbind()), inputs)
        # Inputs left over from a larger batch would write to slots that other rows own now.
        self._columns[:4, tokens : size if bucket is None else bucket.tokens].zero_()
        if bucket is not None:
            assert self._bucket_planner is not None
            self._bucket_planner.plan_bucket(batch, bucket)
            self._play(tokens, bucket)
            return self._model.decoder.logits(self._model.states[batch.logit_tokens])
        if self._planner is not None:
            self._planner.plan_captured(batch, size)
        if self.plans is not None:
            self._columns[4, tokens:size].fill_(self.plans.future.padding_row)
        self._play(tokens, size)
        if batch.states is not None:
            batch.states.save_decodes()
        if self._divided:
            return self._model.decoder.logits(self._model.states[batch.logit_tokens])
        return self._logits[:tokens]

    def decode(self, plan: StepPlan, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply a plan's page writes and compute it by the captured step of `size`, which `size_for_plan` returned.

        Returns what `step` does, and int64[rows], the likeliest tokens as `mark_nan` marks them, which are in the
        FutureMap. Both are valid until the next step.
        """
        assert self.plans is not None
        rows, columns = len(plan.pool_rows), self._columns[:, :size]
        self.plans.fill(plan, columns)
        if self._planner is not None:
            batch = self._batch(columns[:, :rows])
            batch.starts = plan.starts.astype(np.int64)
            self._planner.plan_captured(batch, size)
        self._play(rows, size)
        return self._logits[:rows], self._tokens[:rows]

    def _play(self, tokens: int, size: int | Bucket) -> None:
        self._plays[size, self._adapters is not None and self._adapters.active]()
        self._model.states = self._hidden[:tokens]
        self._model.aux_hidden_states = None if self._aux is None else self._aux[:tokens]

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Return logits of tokens of the last step; see ModelBackend."""
        return self._model.logits(first, last)

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return hidden states of tokens of the last step; see ModelBackend."""
        return self._model.hidden(first, last)

    def aux_hidden(self, first: int, last: int) -> torch.Tensor:
        """Return what an EAGLE-3 head reads of tokens of the last step; see TorchModel."""
        return self._model.aux_hidden(first, last)

    def size_for(self, batch: ForwardBatch) -> int:
        """Return the captured size that a batch is padded to; 0 if the batch runs eagerly."""
        rows = len(batch.counts)
        if batch.decode_rows != rows or len(batch.logit_tokens) != rows or not 0 < rows <= self._sizes[-1]:
            return 0
        return next(size for size in self._sizes if size >= rows)

    def bucket_for(self, batch: ForwardBatch) -> Bucket | None:
        """Return the captured step that rows of any kind are padded to; None if the batch runs eagerly."""
        tokens, single = len(batch.token_ids), int(np.count_nonzero(batch.counts == 1))
        rows = max(single, len(batch.counts) - single)
        if not tokens or batch.states is not None:
            return None
        return next((own for own in self._buckets if own.tokens >= tokens and own.rows >= rows), None)

    @contextmanager
    def eager_buckets(self) -> Iterator[None]:
        """Within, only decodes are replayed, so that kernels of larger steps are compiled."""
        buckets, self._buckets = self._buckets, []
        try:
            yield
        finally:
            self._buckets = buckets

    def size_for_plan(self, plan: StepPlan) -> int:
        """Return the captured size for `decode`; 0 if the plan does not decode in all rows, or too many."""
        rows = len(plan.pool_rows)
        alike = self.plans is not None and plan.decode_rows == rows and plan.samples.sum() == rows
        if not alike or not 0 < rows <= self._sizes[-1]:
            return 0
        return next(size for size in self._sizes if size >= rows)

    def _batch(self, columns: torch.Tensor) -> ForwardBatch:
        """A batch of decodes with these columns."""
        size = columns.shape[1]
        return ForwardBatch(
            *(columns[0], columns[1], columns[2], columns[3], self._numbers[:size]),
            starts=np.zeros(size, dtype=np.int64),
            counts=np.ones(size, dtype=np.int64),
            decode_rows=size,
        )

    def _work(self, size: int) -> Callable[[], None]:
        columns, logits = self._columns[:, :size], self._logits[:size]
        batch = self._batch(columns)
        batch.captured = size
        if self._planner is not None:
            self._planner.plan_captured(batch, size)

        def work() -> None:
            if self._states is not None:
                # Rows that fill up the step write to page 0, and the states of no row.
                own = columns[3].masked_fill(columns[2] == 0, self._states.padding_slot)
                batch.states = StateBatch(self._states, own, None, [])
            states = self._model.layers(batch)
            # All sizes write their results to the same memory, so that no graph keeps its own copy.
            self._keep_hidden(batch, states)
            if not self._divided:
                self._model.decoder.logits(states, logits)
            if self.plans is not None:
                tokens = self.plans.likeliest(logits)
                self.plans.future.store(columns[4], tokens)
                self._tokens[:size].copy_(mark_nan(logits, tokens))

        return work

    def _bucket_work(self, bucket: Bucket) -> Callable[[], None]:
        columns = self._columns[:, : bucket.tokens]
        batch = ForwardBatch(
            *(columns[0], columns[1], columns[2], columns[3], self._numbers[:0]),
            starts=np.zeros(1, dtype=np.int64),
            counts=np.full(1, bucket.tokens, dtype=np.int64),
            decode_rows=0,
            bucket=bucket,
        )
        assert self._bucket_planner is not None
        self._bucket_planner.plan_bucket(batch, bucket)

        def work() -> None:
            self._keep_hidden(batch, self._model.layers(batch))

        return work

    def _keep_hidden(self, batch: ForwardBatch, states: torch.Tensor) -> None:
        """Copy [tokens, hidden], and what a draft head reads, to where all captured steps leave it."""
        if not len(self._hidden):
            self._hidden = states.new_zeros(len(self._numbers), states.shape[1])
        self._hidden[: len(states)].copy_(states)
        if batch.aux_hidden_states is not None:
            if self._aux is None:
                self._aux = states.new_zeros(len(self._numbers), batch.aux_hidden_states.shape[1])
            self._aux[: len(states)].copy_(batch.aux_hidden_states)


class CudaGraphCapturer:
    """A GraphCapturer by CUDA graphs. They share one memory pool, because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work; see GraphCapturer."""
        # Run eagerly first: kernels compile and libraries allocate at the first call, which a graph must not capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because weights may be updated while another thread runs steps.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._memory = graph.pool()
        return graph.replay


def why_not(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, capturable: bool, divided: bool, adapters: bool
) -> str:
    """Return why steps of a model cannot be captured, "" if they can.

    capturable: whether attention does nothing on the host in a captured step: Triton's and flashinfer's.
    divided: whether the model is divided over ranks that do not capture together.
    adapters: whether LoRA adapters are enabled that Triton's kernels do not multiply.
    """
    loop = "" if config.experts is None else why_not_grouped(config, device, dtype)
    reasons = {
        "the device is no CUDA device": device.type != "cuda",
        "attention works on the host for every step (--attention-backend triton and flashinfer do not)": not capturable,
        f"experts are counted on the host ({loop})": bool(loop),
        "ranks of a divided model record steps with enable_tp_cuda_graph alone, and stages not at all": divided,
        "adapters are counted on the host without Triton's kernels": adapters,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
