"""An executor without a model: it takes the time that a cost model predicts and samples made-up, repeatable tokens.

Useful to try schedules, servers and clients on any machine, and held to the same contract as the real one.
"""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.base import (
    DRAFT,
    MAX_ACCEPTANCE_RATE,
    NS_PER_S,
    ConfigError,
    CostModel,
    ExecutorInfo,
    Int32Array,
    KvPieces,
    RowLogprobs,
    RowStart,
    StateGroup,
    StepPlan,
    StepResult,
    StepWork,
    TokenyardError,
    WeightGroup,
    WeightSource,
    step_work,
)
from tokenyard.cost import find_profile
from tokenyard.executor.drafter import accepted_runs
from tokenyard.executor.kv_ownership_check import AdapterCheck, KvCheck, UInt64Array, history_marks, mix

NEVER_EOS = int(np.iinfo(np.int64).max)
DEFAULT_POOL_TOKENS = 65536
VECTOR_SIZE = 16
DIGEST_BYTES = 16
MARK_BYTES = 8


class FixedStepCost:
    """A cost model for which every step takes the same time."""

    learns = False

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def step(self, work: StepWork) -> float:
        """Return the seconds of any step."""
        return self.step_s

    def copy(self, num_bytes: int, link: str) -> float:
        """Return 0: copies are free here."""
        return 0.0

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn nothing."""


@dataclass(slots=True)
class MockTicket:
    """A step in flight; `done_ns` is when the pretend device will have ended it, on the monotonic clock."""

    plan: StepPlan
    seconds: float
    done_ns: int
    tokens: Int32Array | None = None
    accepted: Int32Array | None = None
    logprobs: list[RowLogprobs] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)


class MockExecutor:
    """Simulates a device: steps run one after another, each for the time that `cost` predicts.

    A token is a function of the row's prompt, its seed (unless greedy) and the token's position, so that no schedule
    can change an answer. With `answer_tokens` (low, high) the answer's token number `low .. high`, picked by the same
    hash, is the first eos token; None never says eos. `check_kv` verifies on every step that each row reads its own
    history only (see KvCheck). Without `sleep` nothing waits, but the reported seconds stay the same.

    With `drafts` it drafts that many tokens for each row that sampled; the share `draft_right` of them, picked
    by a hash, is what the row samples, any other is wrong. It reports that share as their chance.

    weights: a name of those in use, on which tokens depend; "" for those that it started with.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        cost: CostModel,
        sleep: bool = True,
        *,
        answer_tokens: tuple[int, int] | None = None,
        check_kv: bool = True,
        drafts: int = 0,
        draft_right: float = 1.0,
    ) -> None:
        if answer_tokens is not None and not (1 <= answer_tokens[0] <= answer_tokens[1] and info.eos_token_ids):
            raise ConfigError("answer_tokens needs 1 <= low <= high and a model with an eos token")
        self.info = info
        self._cost = cost
        self._sleep = sleep
        self.answer_tokens = answer_tokens
        self._kv = KvCheck(info) if check_kv else None
        self._keys: UInt64Array = np.zeros(info.max_pool_rows, dtype=np.uint64)
        self._eos_positions = np.full(info.max_pool_rows, NEVER_EOS, dtype=np.int64)
        self._starts: dict[int, RowStart] = {}
        self._pooled: dict[int, RowStart] = {}
        self._slots = AdapterCheck()
        self._free_at_ns = 0
        self._drafts = drafts
        self._draft_right = draft_right
        self.weights = self._prepared = ""

    def launch(self, plan: StepPlan) -> MockTicket:
        """Start a step. Raises KvMismatchError if the plan reads KV that is not its rows' own."""
        for start in plan.row_starts:
            self._take_row(start)
        self._slots.apply(plan)
        if plan.verify_rows:
            plan = replace(plan, tokens=self._with_drafts(plan))
        if self._kv is not None:
            self._kv.apply(plan, self.weights)
        seconds = self._cost.step(step_work(plan))
        self._free_at_ns = max(self._free_at_ns, time.monotonic_ns()) + round(seconds * NS_PER_S)
        ticket = MockTicket(plan, seconds, self._free_at_ns, vectors=self._vectors(plan) if self._pooled else {})
        if not plan.delay_sampling:
            self.sample(ticket)
        return ticket

    def sample(self, ticket: MockTicket) -> None:
        """Choose the tokens of a step that was launched."""
        plan = ticket.plan
        tokens = np.full(len(plan.pool_rows), -1, dtype=np.int32)
        chosen = plan.sampled
        tokens[chosen] = self._tokens(plan.pool_rows[chosen], (plan.starts + plan.counts)[chosen])
        ticket.logprobs = self._logprobs(plan, tokens)
        if plan.verify_rows:
            rows = np.repeat(plan.pool_rows, plan.samples)
            sampled = self._tokens(rows, plan.sampled_positions.astype(np.int32))
            tokens, ticket.accepted = accepted_runs(plan, plan.tokens, sampled)
        if self._kv is not None:
            accepted = chosen.astype(np.int32) if ticket.accepted is None else ticket.accepted
            self._kv.sampled(plan, tokens if ticket.accepted is not None else tokens[chosen], accepted)
        ticket.tokens = tokens

    def collect(self, ticket: MockTicket) -> StepResult:
        """Wait until the device has ended the step. Raises TokenyardError if it was never sampled."""
        if ticket.tokens is None:
            raise TokenyardError(f"step {ticket.plan.step} is collected before it was sampled")
        if self._sleep:
            time.sleep(max(0, ticket.done_ns - time.monotonic_ns()) / NS_PER_S)
        result = StepResult(ticket.plan.step, ticket.tokens, ticket.seconds, ticket.logprobs, accepted=ticket.accepted)
        if ticket.vectors:
            result.vectors = ticket.vectors
        if self._drafts:
            drafting = [row not in self._starts for row in ticket.plan.pool_rows.tolist()]
            result.drafted = np.where(ticket.plan.sampled & np.array(drafting), self._drafts, 0).astype(np.int32)
            chance = min(MAX_ACCEPTANCE_RATE, round(1000 * self._draft_right))
            result.chances = np.full(len(result.drafted), chance, np.int32)
        return result

    def compile_grammar(self, text: str, tokenizer: Callable[[], str]) -> None:
        """Accept any grammar; the made-up tokens ignore it."""

    def load_adapter(self, adapter: str, folder: str) -> None:
        """Accept any adapter: rows with an adapter get other tokens than rows without."""

    def unload_adapter(self, adapter: str) -> None:
        """Do nothing: there is nothing to free."""

    def prepare_weights(self, source: WeightSource) -> str:
        """Accept any path that exists as other weights, whose rows get other tokens; see Executor."""
        for path in (source.folder, *source.files):
            if path and not Path(path).exists():
                raise ConfigError(f"there is no model folder {path!r}")
        names = "\0".join((source.folder or self.weights, *source.files))
        self._prepared = blake2b(names.encode(), digest_size=DIGEST_BYTES).hexdigest()
        return self._prepared

    def swap_weights(self) -> None:
        """Make up other tokens from now on."""
        self.weights = self._prepared

    def drop_weights(self) -> None:
        """Do nothing: there is nothing to free."""

    def release_memory(self, *, weights: bool, kv_cache: bool) -> None:
        """Do nothing: there is no memory."""

    def join_weight_group(self, group: WeightGroup) -> None:
        """Raises ConfigError: there are no tensors to receive."""
        raise ConfigError("the mock executor receives no tensors")

    def receive_weights(self, group: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Raises ConfigError: there is no group."""
        raise ConfigError(f"there is no group {group!r}; join it with /init_weights_update_group")

    def leave_weight_group(self, group: str) -> None:
        """Raises ConfigError: there is no group."""
        raise ConfigError(f"there is no group {group!r}")

    def weight(self, name: str, rows: int) -> Any:
        """Raises ConfigError: there are no tensors."""
        raise ConfigError(f"the model has no tensor {name!r}")

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Return where the marks of pages lie; without `check_kv` there are none, and pages have no pieces."""
        if self._kv is None:
            return KvPieces(np.zeros((len(pages), 0), dtype=np.int64), 0, "cpu")
        return self._kv.pieces(pages)

    def state_pieces(self, slots: Int32Array) -> KvPieces:
        """Return where the marks of states lie; there are none without `check_kv`."""
        if self._kv is None:
            return KvPieces(np.zeros((len(slots), 0), dtype=np.int64), 0, "cpu")
        return self._kv.state_pieces(slots)

    def close(self) -> None:
        """Forget all rows."""
        self._starts.clear()

    def _with_drafts(self, plan: StepPlan) -> Int32Array:
        """Return the plan's input tokens with the ids of its drafts."""
        tokens = plan.tokens.copy()
        at = np.flatnonzero(tokens == DRAFT)
        positions = plan.positions[at].astype(np.int32)
        rows = np.repeat(plan.pool_rows, plan.counts)[at]
        right = self._tokens(rows, positions)
        chances = mix(positions.astype(np.uint64) + self._keys[rows]) % np.uint64(1000)
        wrong = chances >= np.uint64(round(1000 * self._draft_right))
        tokens[at] = np.where(wrong, (right + 1) % self.info.vocab_size, right)
        return tokens

    def _take_row(self, start: RowStart) -> None:
        prompt = start.known_ids[: start.prompt_tokens]
        key = mix(history_marks(prompt, adapter=start.lora)[-1:])
        if not start.sampling.greedy:
            key = mix(key ^ np.uint64(start.sampling.seed % 2**64))
        self._keys[start.pool_row] = key[0]
        self._eos_positions[start.pool_row] = self._eos_position(int(key[0]), start)
        self._pooled.pop(start.pool_row, None)
        if start.pooling:
            self._pooled[start.pool_row] = start
        if start.logprobs is None:
            self._starts.pop(start.pool_row, None)
        else:
            self._starts[start.pool_row] = start

    def _vectors(self, plan: StepPlan) -> dict[int, bytes]:
        """Make up the vectors of prompts that this step completes, of the same tokens always the same."""
        found = {}
        for place, row in enumerate(plan.pool_rows.tolist()):
            start = self._pooled.get(row)
            if start is not None and int(plan.starts[place] + plan.counts[place]) == start.prompt_tokens:
                draws = mix(self._pooled_key(start) + np.arange(VECTOR_SIZE, dtype=np.uint64)) % np.uint64(2001)
                found[place] = (draws.astype(np.float32) / 1000.0 - 1.0).tobytes()
                del self._pooled[row]
        return found

    def _pooled_key(self, start: RowStart) -> np.uint64:
        marks: UInt64Array = history_marks(start.known_ids[: start.prompt_tokens])
        return np.uint64(marks[-1])

    def _eos_position(self, key: int, start: RowStart) -> int:
        if self.answer_tokens is None:
            return NEVER_EOS
        low, high = self.answer_tokens
        length = low + key % (high - low + 1)
        return start.prompt_tokens - 1 + max(length, start.sampling.min_new_tokens + 1)

    def _tokens(self, pool_rows: Int32Array, positions: Int32Array) -> Int32Array:
        """Return int32[n], the token of each row at each position; eos only where the row's answer ends."""
        eos = self.info.eos_token_ids
        weights = np.uint64(zlib.crc32(self.weights.encode()))
        draws = mix(self._keys[pool_rows] + positions.astype(np.uint64) + weights) % np.uint64(self.info.vocab_size)
        tokens = draws.astype(np.int32)
        # Step over eos ids instead of drawing again: they are few and the walk ends.
        for _ in eos:
            tokens += np.logical_or.reduce([tokens == token for token in eos])
            tokens %= self.info.vocab_size
        if eos:
            tokens[self._eos_positions[pool_rows] == positions] = eos[0]
        return tokens

    def _logprobs(self, plan: StepPlan, tokens: Int32Array) -> list[RowLogprobs]:
        if not self._starts:
            return []
        found = []
        for i, pool_row in enumerate(plan.pool_rows.tolist()):
            if pool_row in self._starts:
                entry = self._row_logprobs(plan, i, self._starts[pool_row], int(tokens[i]))
                if entry is not None:
                    found.append(entry)
        return found

    def _row_logprobs(self, plan: StepPlan, i: int, start: RowStart, sampled: int) -> RowLogprobs | None:
        """Make up log-probabilities for the positions that this step predicts and the row asked for."""
        options = start.logprobs
        assert options is not None
        first, end = int(plan.starts[i]) + 1, int(plan.starts[i] + plan.counts[i])
        ids: list[int] = []
        position = end
        if options.prompt_from >= 0 and len(start.known_ids) == start.prompt_tokens:
            position = min(max(first, options.prompt_from), end)
            ids = start.known_ids[position : min(end + 1 if sampled < 0 else end, start.prompt_tokens)].tolist()
        if sampled >= 0 and options.output:
            ids.append(sampled)
        if not ids:
            return None
        entry = RowLogprobs(i, position, ids, [_fake_logprob(token, position + k) for k, token in enumerate(ids)])
        for k, token in enumerate(ids):
            best = [(token + rank) % self.info.vocab_size for rank in range(options.top)]
            entry.top_tokens.append(best + options.token_ids)
            ranked = [_fake_logprob(token, position + k) - rank for rank in range(options.top)]
            entry.top_logprobs.append(ranked + [_fake_logprob(named, position + k) for named in options.token_ids])
        return entry


def _fake_logprob(token: int, position: int) -> float:
    hashed: npt.NDArray[np.uint64] = mix(np.array([token + (position << 32)], dtype=np.uint64))
    return -float(hashed[0] % np.uint64(1000)) / 100.0


def load_executor(
    model_path: str = "mock",
    *,
    profile: str = "",
    step_ms: float | None = None,
    vocab_size: int | None = None,
    eos_token_ids: tuple[int, ...] | None = None,
    context_length: int | None = None,
    page_size: int = 1,
    max_total_tokens: int | None = None,
    max_pool_rows: int = 256,
    sleep: bool = True,
    answer_tokens: tuple[int, int] | None = None,
    check_kv: bool = False,
    drafts: int = 0,
    draft_right: float = 1.0,
    checkpoints: int = 0,
    track_interval: int = 256,
    slot_pages: int = 0,
) -> MockExecutor:
    """Make a mock from plain options.

    Step times come from the cost profile "device/model", or are `step_ms` each (10 by default). What is not given is
    read from config.json in the folder `model_path` if there is one, else 32000 tokens of vocabulary with eos 2 and a
    context of 4096. `check_kv` costs milliseconds a step with many rows: it is for tests.

    checkpoints: how many recurrent states the model keeps; with track_interval and slot_pages see `StateGroup`. With
    slot_pages there is room for as many as the KV pool can hold. A model without states has neither.

    Raises ConfigError for sizes that leave no page or no token.
    """
    config = _model_config(Path(model_path))
    cost, pool_tokens = _cost(profile, step_ms)
    num_pages = (max_total_tokens or pool_tokens) // max(1, page_size)
    checkpoints = num_pages // slot_pages if slot_pages else checkpoints
    info = ExecutorInfo(
        model=model_path,
        device="mock",
        dtype="none",
        vocab_size=vocab_size or config.vocab_size,
        context_length=context_length or config.context_length,
        eos_token_ids=tuple(config.eos_token_ids if eos_token_ids is None else eos_token_ids),
        page_size=page_size,
        num_pages=num_pages,
        max_pool_rows=max_pool_rows,
        states=StateGroup(checkpoints, MARK_BYTES, track_interval, slot_pages) if checkpoints else None,
    )
    if min(info.vocab_size - len(info.eos_token_ids), info.context_length, page_size, max_pool_rows) < 1:
        raise ConfigError("the mock needs a vocabulary, a context, a page size and a row count of at least 1")
    if info.num_pages < 1:
        raise ConfigError(f"max_total_tokens {max_total_tokens} does not hold one page of {page_size} tokens")
    return MockExecutor(
        info, cost, sleep, answer_tokens=answer_tokens, check_kv=check_kv, drafts=drafts, draft_right=draft_right
    )


@dataclass(frozen=True, slots=True)
class _ModelConfig:
    vocab_size: int = 32000
    context_length: int = 4096
    eos_token_ids: tuple[int, ...] = (2,)


def _model_config(folder: Path) -> _ModelConfig:
    """Read what a mock needs of a model's config.json; the defaults where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return _ModelConfig()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        eos = values.get("eos_token_id", [])
        return _ModelConfig(
            int(values["vocab_size"]),
            int(values["max_position_embeddings"]),
            tuple(eos) if isinstance(eos, list) else (int(eos),),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} does not say vocab_size and max_position_embeddings: {error}") from error


def _cost(profile: str, step_ms: float | None) -> tuple[CostModel, int]:
    """Return the cost model and how many tokens the pool holds by default."""
    if step_ms is not None and not step_ms >= 0.0:
        raise ConfigError(f"step_ms is {step_ms}; it must be at least 0")
    if not profile or step_ms is not None:
        return FixedStepCost((10.0 if step_ms is None else step_ms) / 1000), DEFAULT_POOL_TOKENS
    known = find_profile(profile)
    return known.cost(), known.kv_pool_tokens
