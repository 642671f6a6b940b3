"""Runs plans on a model: the executor that computes."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenyard.base import (
    DRAFT,
    ConfigError,
    ExecutorInfo,
    Int32Array,
    KvPieces,
    StepPlan,
    StepResult,
    TokenyardError,
    WeightGroup,
    WeightSource,
)
from tokenyard.executor.cuda_devices import use_device
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.cuda_streams import HostCopies, StepTimer
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.drafter import Choose, Drafter, accepted_runs, drafts_to_verify
from tokenyard.executor.forward_batch import ForwardBatch, PageTable, build_batch, samples_of, upload
from tokenyard.executor.future_map import DelayedSamplingRows, FutureMap
from tokenyard.executor.grammar import GrammarCache, GrammarRows
from tokenyard.executor.kv_copies import DeviceBlocks, DeviceStates
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.lora_manager import LoraManager
from tokenyard.executor.models.model_backend import ModelBackend, ReleasedModel
from tokenyard.executor.pooling import PooledRows
from tokenyard.executor.sampling.logprobs import (
    LogprobPiece,
    join_pieces,
    keep_output,
    output_piece,
    prompt_pieces,
)
from tokenyard.executor.sampling.sampler import Sampler
from tokenyard.executor.sampling.top_k_top_p import SamplingBackend, mark_nan, unmark_nan
from tokenyard.executor.state_pool import StateBatch, StatePool
from tokenyard.executor.weight_updates import WeightUpdates


@dataclass(slots=True)
class Ticket:
    """A step in flight.

    plan: the plan, with the ids of its drafts.
    clock: times the step and waits for its results.
    logits: the logits until they are sampled.
    likeliest: int64[samples], the likeliest tokens, where a captured step chose and stored them; else None.
    tokens: int64[samples], copied to the host; None until the step is sampled.
    pieces: log-probabilities.
    vectors: pooled vectors of prompts, by place in the plan.
    states: recurrent states, of which drafts may yet be taken out.
    """

    plan: StepPlan
    clock: StepTimer
    logits: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    pieces: list[LogprobPiece] = field(default_factory=list)
    vectors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    states: StateBatch | None = None


class ModelExecutor:
    """Executor over a model, on a CPU or a CUDA device, by the same code; `model` computes its steps.

    On CUDA `launch` only queues work on the current stream, results are copied to the host on a separate stream, and
    `collect` waits for them, so that several steps can be in flight; on a CPU `launch` does the work.
    """

    def __init__(
        self,
        model: ModelBackend,
        pool: KvPool,
        pages: PageTable,
        info: ExecutorInfo,
        device: torch.device,
        drafter: Callable[[Choose], Drafter] | None = None,
        sampling_backend: SamplingBackend | None = None,
        adapters: LoraManager | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Start with free rows. drafter: makes the drafter, given the sampler's `guess`; None for no drafts.
        sampling_backend: None to sample by torch. states: None for a model without recurrent states.
        """
        self.info = info
        self.kv_pool = pool
        self.model = model
        self._device = device
        self._copies = HostCopies(device)
        self.adapters = adapters
        self.states = states
        self.pages = pages
        plans = model.plans if isinstance(model, CudaGraphRunner) else None
        self.future = FutureMap(info.max_pool_rows, device) if plans is None else plans.future
        self._unsampled = DelayedSamplingRows(info.max_pool_rows)
        self._grammars = GrammarCache(info.vocab_size, info.eos_token_ids)
        self.grammar_rows = GrammarRows(self._grammars, info.vocab_size, device)
        self._pooled = PooledRows()
        self.sampler = Sampler(info.max_pool_rows, info.vocab_size, info.eos_token_ids, device, sampling_backend)
        self.weight_updates: WeightUpdates | None = None
        """Set by the loader of a model that can change its weights."""
        self.capture: Callable[[], None] = lambda: None
        """Captures the steps of a divided model once its ranks are connected; set by its loader."""
        self.drafter = drafter(self.sampler.guess) if drafter is not None else None

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step; see Executor. Raises TokenyardError if it reads what a step before it has yet to sample, and if
        the device's memory does not suffice: what torch's allocator keeps is then free when the step is tried again.
        """
        try:
            return self._launch(plan)
        except torch.OutOfMemoryError as error:
            tokens, message = len(plan.tokens), str(error).split(". ")[0]
        # Outside, as the error's frames hold the step's tensors.
        gc.collect()
        torch.cuda.empty_cache()
        raise TokenyardError(
            f"no memory for a step of {tokens} tokens ({message}); lower --mem-fraction-static or"
            " --chunked-prefill-size"
        )

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Ticket:
        self._unsampled.launch(plan)
        ticket = Ticket(plan, StepTimer(self._device))
        ticket.clock.start()
        self.sampler.take(plan.row_starts)
        self.grammar_rows.take(plan)
        self._pooled.take(plan.row_starts)
        if self.adapters is not None:
            self.adapters.take(plan.row_starts)
        if not (size := self._captured_size(plan)):
            self.pages.write(plan)
        if self.drafter is not None:
            self.drafter.take(plan)
            if plan.verify_rows:
                plan = ticket.plan = replace(plan, tokens=self.drafter.fill_in(plan))
        if size:
            self._decode(ticket, size)
        else:
            self._run(ticket)
        ticket.clock.stop()
        if not plan.delay_sampling:
            self.sample(ticket)
        return ticket

    @torch.inference_mode()
    def sample(self, ticket: Ticket) -> None:
        """Sample a launched step; see Executor."""
        plan, logits = ticket.plan, ticket.logits
        self._unsampled.sample(plan)
        if self._device.type == "cpu":
            ticket.clock.start()
        tokens = torch.empty(0, dtype=torch.int64, device=self._device)
        if logits is not None:
            kept = keep_output(plan, self.sampler.rows, logits)
            if ticket.likeliest is not None and kept is None and self._takes_likeliest(plan):
                # A copy, as the next step writes to the same memory before these are on the host.
                tokens = ticket.likeliest.clone()
            else:
                tokens = self._choose(ticket, logits)
                if kept is not None:
                    ticket.pieces.append(output_piece(kept, tokens))
                tokens = mark_nan(logits, tokens)
        ticket.logits = ticket.likeliest = None
        ticket.clock.stop()
        with self._copies.after_step():
            self._send(ticket, tokens)
            ticket.clock.sent()

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and return what it sampled; see Executor. Raises TokenyardError if it was never sampled."""
        plan = ticket.plan
        if ticket.tokens is None:
            raise TokenyardError(f"step {plan.step} is collected before it was sampled")
        seconds = ticket.clock.wait()
        sampled, nan_samples = unmark_nan(ticket.tokens.numpy().astype(np.int32, copy=False))
        accepted: Int32Array | None = None
        if self.drafter is None:
            tokens = np.full(len(plan.pool_rows), -1, dtype=np.int32)
            tokens[plan.sampled] = sampled
        else:
            tokens, accepted = accepted_runs(plan, plan.tokens, sampled)
        ended, failures = self.grammar_rows.consume(plan, tokens, accepted)
        vectors = {place: vector.numpy().tobytes() for place, vector in ticket.vectors}
        pieces = join_pieces(ticket.pieces)
        result = StepResult(plan.step, tokens, seconds, pieces, failures, accepted, ended=ended, vectors=vectors)
        if len(nan_samples):
            rows = np.repeat(np.arange(len(plan.pool_rows)), samples_of(plan))[nan_samples]
            result.nan_rows = tuple(np.unique(rows).tolist())
        if self.drafter is not None and accepted is not None:
            self._confirm(ticket, tokens, accepted)
            drafts = self.drafter.draft(plan, tokens, accepted, self.grammar_rows.drafts, seconds)
            result.drafted, result.chances = drafts
        return result

    def compile_grammar(self, text: str, tokenizer: Callable[[], str]) -> None:
        """Make a grammar ready; see Executor."""
        self._grammars.compile(text, tokenizer)

    def load_adapter(self, adapter: str, folder: str) -> None:
        """Read an adapter into memory; see Executor."""
        if self.adapters is None:
            raise ConfigError("adapters are off here; start with --enable-lora")
        self.adapters.load(adapter, Path(folder))

    def unload_adapter(self, adapter: str) -> None:
        """Free the memory of an adapter; see Executor."""
        if self.adapters is not None:
            self.adapters.drop(adapter)

    def prepare_weights(self, source: WeightSource) -> str:
        """Read other weights next to those in use; see Executor."""
        use_device(self._device)
        with torch.inference_mode():
            return self._updates.prepare(source)

    @property
    def _updates(self) -> WeightUpdates:
        if self.weight_updates is None:
            raise ConfigError(
                "the weights of a model with a draft head (--speculative-algorithm NEXTN, EAGLE, EAGLE3) cannot be"
                " changed or read yet; restart the engine with the new checkpoint"
            )
        return self.weight_updates

    def release_memory(self, *, weights: bool, kv_cache: bool) -> None:
        """Give memory back; see Executor."""
        if weights and self.adapters is not None:
            raise ConfigError("the weights cannot be released with --enable-lora; release kv_cache alone")
        if kv_cache and self._device.type != "cpu":
            raise ConfigError("KV of a CUDA device cannot be released yet; release weights alone")
        if weights:
            self._updates.drop()
            self.model = ReleasedModel()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        if kv_cache:
            self.kv_pool.give_back()

    def join_weight_group(self, group: WeightGroup) -> None:
        """Join a trainer's group; see Executor."""
        use_device(self._device)
        self._updates.join(group)

    def receive_weights(self, group: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Receive tensors for the next update; see Executor."""
        use_device(self._device)
        self._updates.receive(group, tensors, self._device)

    def leave_weight_group(self, group: str) -> None:
        """Leave a trainer's group; see Executor."""
        self._updates.groups.leave(group)

    def swap_weights(self) -> None:
        """Use the weights that were prepared; see Executor."""
        loaded = self._updates.take()
        if loaded.adapters is not None and self.adapters is not None:
            loaded.adapters.take_over(self.adapters)
        self.model, self.adapters = loaded.model, loaded.adapters
        if loaded.draft_model is not None:
            assert isinstance(self.drafter, ModelDrafter)
            self.drafter.use_model(loaded.draft_model)

    def drop_weights(self) -> None:
        """Free weights that were prepared; see Executor."""
        if self.weight_updates is not None:
            self.weight_updates.drop()

    def weight(self, name: str, rows: int) -> Any:
        """Return rows of a tensor of the checkpoint in use; see Executor."""
        return self._updates.rows(name, rows)

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Say where the KV of pages lies; see Executor."""
        return self.kv_pool.pieces(pages)

    def state_pieces(self, slots: Int32Array) -> KvPieces:
        """Say where the recurrent states in slots lie; see Executor."""
        if self.states is None:
            return KvPieces(np.zeros((len(slots), 0), np.int64), 0, str(self._device))
        return self.states.pieces(slots)

    def device_blocks(self) -> DeviceBlocks:
        """Copies of KV between the device and host memory."""
        return DeviceBlocks(self.kv_pool)

    def device_states(self) -> DeviceStates:
        """Copies of recurrent states between the device and host memory."""
        assert self.states is not None
        return DeviceStates(self.states)

    def close(self) -> None:
        """Give back the device's memory; the executor cannot be used any more. Closing again does nothing."""
        parts = ("kv_pool", "model", "pages", "future", "sampler", "adapters", "drafter", "states", "weight_updates")
        for name in parts:
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, ticket: Ticket) -> None:
        """Run the model over a plan whose pages are written; logits are computed for the sampled positions only."""
        plan = ticket.plan
        if not len(plan.pool_rows):
            return
        batch = build_batch(plan, self.pages)
        batch.token_ids = self._inputs(plan, batch)
        if self.states is not None:
            batch.states = ticket.states = self.states.prepare(plan)
        if self.adapters is not None:
            self.adapters.begin(plan)
        logits = self.model.step(batch)
        if self.states is not None:
            self.states.keep(plan)
        if self.drafter is not None:
            self.drafter.computed(plan, self.model.hidden)
        if len(logits):
            # Logits that are sampled later must survive the steps in between.
            ticket.logits = logits.clone() if plan.delay_sampling else logits
        ticket.pieces = prompt_pieces(plan, self.sampler.rows, self.model.logits)
        ticket.vectors = self._pooled.vectors(plan, self.model.hidden)

    def _captured_size(self, plan: StepPlan) -> int:
        """The size of the captured step that computes a plan from its upload to its tokens; 0 if none does."""
        if self.drafter is not None or not isinstance(self.model, CudaGraphRunner):
            return 0
        return self.model.size_for_plan(plan)

    def _decode(self, ticket: Ticket, size: int) -> None:
        """Compute a plan whose rows all decode by a captured step."""
        plan = ticket.plan
        assert isinstance(self.model, CudaGraphRunner)
        if self.adapters is not None:
            self.adapters.begin(plan)
        states = None if self.states is None else self.states.prepare(plan)
        ticket.logits, ticket.likeliest = self.model.decode(plan, size)
        if self.states is not None and states is not None:
            states.save_decodes()
            self.states.keep(plan)
        if plan.delay_sampling:
            # Logits that are sampled later must survive the steps in between.
            ticket.logits, ticket.likeliest = ticket.logits.clone(), None

    def _takes_likeliest(self, plan: StepPlan) -> bool:
        """Whether all rows take their likeliest token, without bias, penalty or grammar."""
        grammars = self.grammar_rows.matchers
        return self.sampler.is_greedy(plan.pool_rows) and not (
            grammars and any(map(grammars.__contains__, plan.pool_rows.tolist()))
        )

    def _inputs(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        """The input tokens of a plan's batch, int64[tokens], those that only the device knows among them."""
        return self.future.resolve(batch.token_ids, batch.pool_rows)

    def _choose(self, ticket: Ticket, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token for each row of logits: int64[m]. A row's last one is what its next step may read."""
        plan = ticket.plan
        masks, positions = self.grammar_rows.masks(plan), plan.sampled_positions
        if masks is not None and len(masks.withdrawn):
            inputs = plan.tokens.copy()
            inputs[masks.withdrawn] = DRAFT
            plan = ticket.plan = replace(plan, tokens=inputs)
        samples = samples_of(plan)
        pool_rows = np.repeat(plan.pool_rows, samples)
        if plan.verify_rows:
            drafts = drafts_to_verify(plan, plan.tokens)
            tokens = self.sampler.sample_runs(logits, pool_rows, positions, drafts, masks)
        else:
            tokens = self.sampler.sample(logits, pool_rows, positions, masks)
        if plan.decode_rows == len(samples):
            self.future.store(upload((plan.pool_rows,), self._device)[0], tokens)
            return tokens
        last = np.cumsum(samples)[samples > 0] - 1
        rows = upload((plan.pool_rows[samples > 0], last), self._device)
        self.future.store(rows[0], tokens[rows[1]])
        return tokens

    @torch.inference_mode()
    def _confirm(self, ticket: Ticket, tokens: Int32Array, accepted: Int32Array) -> None:
        """Keep what a row's next step reads: its last sample is not its last token if a draft before it was refused."""
        plan = ticket.plan
        if plan.verify_rows:
            if self.states is not None and ticket.states is not None:
                self.states.confirm(ticket.states, plan, accepted)
            rows = slice(plan.decode_rows, plan.chunks_from)
            last = np.cumsum(accepted)[rows] - 1
            columns = upload((plan.pool_rows[rows], tokens[last]), self._device)
            self.future.store(columns[0], columns[1])

    def _send(self, ticket: Ticket, tokens: torch.Tensor) -> None:
        """Start the copies of tokens, vectors and log-probabilities to the host."""
        ticket.tokens = self._copies.to_host(tokens)
        ticket.vectors = [(place, self._copies.to_host(vector)) for place, vector in ticket.vectors]
        for piece in ticket.pieces:
            piece.tokens, piece.logprobs, piece.top_tokens, piece.top_logprobs = map(
                self._copies.to_host, piece.tensors()
            )
