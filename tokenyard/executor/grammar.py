"""Grammar-constrained output: compiled grammars, a matcher for each pool row, and masks over logits.

llguidance does the work (github guidance-ai/llguidance). Its limits are counts of work, not of time, so that the same
grammar and tokens always give the same verdict. A matcher never raises: callers check its error state after each call.
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import BoolArray, Int32Array, Int64Array, InvalidRequestError, StepPlan
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.grammar_errors import explain_refusal

MAX_COMPILED = 256
MAX_COMPILED_CHARS = 16_000_000
MAX_LARK_ITEMS = 5000
"""The most open alternatives of a grammar at one position. An object takes four for each optional property, and the
server accepts a thousand of these; a mask then costs tens of milliseconds.
"""


ROWS_FOR_THREADS = 16
MAX_MASK_THREADS = 8
"""Threads that make masks where a step has many rows with grammars; fewer where the machine has fewer cores."""

BYTE_MASKS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
BYTE_MASKS = BYTE_MASKS.astype(np.float32)
"""float32[256, 8]: for each byte of a mask, 0 where a bit is set and -inf where it is not."""

MAX_SPARE_MATCHERS = 256
"""Matchers of each grammar that are kept for its next requests."""


@dataclass(slots=True)
class GrammarMatcher:
    """Follows one row's answer.

    A result belongs to this answer if it has the row's `epoch` and its step is not before `since`: the epochs of two
    owners of a pool row may be equal by chance.

    epoch: the epoch of the row's request.
    since: the step that started the row.
    state: llguidance's matcher.
    grammar: the text of the grammar.
    used: whether the matcher followed another answer before.
    taken: the tokens that the matcher has consumed.
    """

    epoch: int
    since: int
    state: Any
    grammar: str
    used: bool
    taken: list[int]


@dataclass(slots=True)
class VocabMasks:
    """Masks of the sampled positions that have a grammar.

    places: int64[k] on the host, the sampled positions.
    values: float32[k, vocabulary] on the device, 0 for allowed tokens and -inf for all others.
    withdrawn: int64[m], inputs of the plan that are drafts without a mask behind them; samples there do not count.
    """

    places: Int64Array
    values: torch.Tensor
    withdrawn: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def among(self, chosen: Int64Array) -> "VocabMasks":
        """Return the masks of the chosen sampled positions (int64[n], rising) that have one."""
        held = np.flatnonzero(np.isin(self.places, chosen))
        places = np.searchsorted(chosen, self.places[held])
        return VocabMasks(places, self.values[to_device(held, self.values.device)])

    def apply(self, logits: torch.Tensor) -> None:
        """Mask logits in place. If a row would have no token left, only its mask applies: a grammar wins over a bias
        and over the minimum number of tokens.
        """
        places = to_device(self.places, logits.device)
        masked = logits[places] + self.values
        empty = masked.amax(dim=-1, keepdim=True) == float("-inf")
        # A bool index would make the host wait for the device.
        logits[places] = torch.where(empty, self.values, masked)


@dataclass(slots=True)
class _Run:
    """A row that has a grammar and verifies drafts.

    matcher: the row's matcher.
    drafts: the ids of the drafts.
    first_draft: the place of the first draft among the plan's inputs.
    place: the place of the row's first sample among all samples.
    """

    matcher: GrammarMatcher
    drafts: list[int]
    first_draft: int
    place: int


class GrammarCache:
    """An LRU cache of compiled grammars by text. Thread-safe."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._used: dict[str, list[Any]] = {}

    def __contains__(self, text: str) -> bool:
        return text in self._compiled

    def compile(self, text: str, tokenizer: Callable[[], str]) -> None:
        """Make a grammar (Lark, as llguidance reads it) ready. `tokenizer` gives the text of tokenizer.json.

        Raises InvalidRequestError, with what is wrong, for a grammar or a tokenizer that cannot be used.
        """
        import llguidance

        with self._lock:
            if text in self._compiled:
                return
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer(llguidance, tokenizer())
        matcher, reason = self._try(text)
        if reason:
            reason = explain_refusal(text, reason, lambda part: self._try(part)[1])
            raise InvalidRequestError(f"the grammar cannot be used: {reason}")
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > MAX_COMPILED or sum(map(len, self._compiled)) > MAX_COMPILED_CHARS:
                dropped, _ = self._compiled.popitem(last=False)
                self._used.pop(dropped, None)

    def _try(self, text: str) -> tuple[Any, str]:
        """(a fresh matcher of a grammar, what is wrong with it or "")."""
        matcher = self._fresh(text)
        if matcher.is_error():
            return matcher, _reason(matcher.get_error())
        # Only the first mask shows that some grammars are too large or allow no answer.
        first = matcher.deep_copy()
        first.compute_bitmask()
        return matcher, _reason(first.get_error()) if first.is_error() else ""

    def matcher(self, text: str) -> tuple[Any, bool]:
        """Return a matcher of a grammar, and whether it was used before.

        A used matcher caches the masks that it has made.
        """
        with self._lock:
            if used := self._used.get(text):
                self._compiled.move_to_end(text)
                return used.pop(), True
        return self.fresh(text), False

    def give_back(self, text: str, state: Any) -> None:
        """Return a matcher to the cache, for the next answer with the same grammar."""
        with self._lock:
            used = self._used.setdefault(text, []) if text in self._compiled else None
            if used is not None and len(used) < MAX_SPARE_MATCHERS and state.reset() and not state.is_error():
                used.append(state)

    def fresh(self, text: str) -> Any:
        """A matcher of a grammar that was never used."""
        with self._lock:
            pristine = self._compiled.get(text)
            if pristine is not None:
                self._compiled.move_to_end(text)
                return pristine.deep_copy()
        return self._fresh(text)

    def _fresh(self, text: str) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(max_items_in_row=MAX_LARK_ITEMS)
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)

    def _read_tokenizer(self, llguidance: Any, text: str) -> Any:
        try:
            known = _with_known_decoder(text)
            return llguidance.LLTokenizer(known, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
        except Exception as error:  # the library raises whatever its parts raise
            raise InvalidRequestError(f"this model's tokenizer cannot be used with grammars: {error}") from error


class GrammarRows:
    """Matchers by pool row. Rows start, are masked before sampling, and consume the sampled tokens."""

    def __init__(self, store: GrammarCache, vocab_size: int, device: torch.device) -> None:
        self._store = store
        self._vocab_size = vocab_size
        self._device = device
        self.matchers: dict[int, GrammarMatcher] = {}
        self._table: torch.Tensor | None = None
        self._executor: Any = None

    def take(self, plan: StepPlan) -> None:
        """Register rows that start. A row that resumes continues after the answer that it has."""
        for start in plan.row_starts:
            if (before := self.matchers.pop(start.pool_row, None)) is not None:
                self._store.give_back(before.grammar, before.state)
            if start.grammar:
                state, used = self._store.matcher(start.grammar)
                known = start.known_ids[start.prompt_tokens :].tolist()
                # A token that the grammar does not allow is reported by the next `consume`.
                state.consume_tokens(known)
                place = int(np.flatnonzero(plan.pool_rows == start.pool_row)[0])
                epoch = int(plan.epochs[place])
                self.matchers[start.pool_row] = GrammarMatcher(epoch, plan.step, state, start.grammar, used, known)

    def masks(self, plan: StepPlan) -> VocabMasks | None:
        """Return the masks of a plan's samples, None if no row has a grammar. Where a row verifies drafts (the plan has
        their ids by now), each of its samples has the mask that follows the drafts before it.
        """
        if not self.matchers:
            return None
        verify = slice(plan.decode_rows, plan.chunks_from)
        once = plan.sampled.copy()
        once[verify] = False
        ends = np.cumsum(plan.samples)[once] - 1
        found = [
            (place, matcher)
            for place, row in zip(ends.tolist(), plan.pool_rows[once].tolist(), strict=True)
            if (matcher := self.matchers.get(row)) is not None
        ]
        runs = self._runs(plan) if plan.verify_rows else []
        if not (found or runs):
            return None
        rows = len(found) + sum(len(run.drafts) + 1 for run in runs)
        words = np.zeros((rows, -(-self._vocab_size // 32)), dtype=np.uint32)
        self._fill(words[: len(found)], [matcher for _, matcher in found])
        places, withdrawn, kept = [place for place, _ in found], [], len(found)
        for run in runs:
            known = self._fill_run(words[kept : kept + len(run.drafts) + 1], run)
            places += range(run.place, run.place + known)
            withdrawn += [run.first_draft + known - 1] if known <= len(run.drafts) else []
            kept += known
        masks = self._values(words[:kept])
        return VocabMasks(np.array(places, np.int64), masks, np.array(withdrawn, np.int64))

    def _runs(self, plan: StepPlan) -> list[_Run]:
        """The rows of a plan that have a grammar and verify drafts."""
        inputs, samples = np.cumsum(plan.counts), np.cumsum(plan.samples)
        found = []
        for place in range(plan.decode_rows, plan.chunks_from):
            matcher = self.matchers.get(int(plan.pool_rows[place]))
            if matcher is not None:
                count, end = int(plan.counts[place]), int(inputs[place])
                drafts = plan.tokens[end - count + 1 : end].tolist()
                found.append(_Run(matcher, drafts, end - count + 1, int(samples[place]) - count))
        return found

    def _fill_run(self, words: npt.NDArray[np.uint32], run: _Run) -> int:
        """Write the masks of a row after none, one, ... all of its drafts: uint32[drafts + 1, words].

        Returns how many masks are written, at least one. The run ends at a draft that the grammar does not allow, at
        one that completes the grammar, and at a limit of the library.
        """
        matcher, size, known, taken = run.matcher, words.shape[1] * 4, 0, 0
        for place in range(len(words)):
            matcher.state.unsafe_compute_mask_ptr(words[place].ctypes.data, size)
            if matcher.state.is_error():
                break
            known += 1
            if place == len(run.drafts) or not matcher.state.try_consume_tokens([run.drafts[place]]):
                break
            taken += 1
            if matcher.state.is_stopped():
                break
        if matcher.state.is_error() or (taken and not matcher.state.rollback(taken)):
            # A limit that drafts exceed must not fail the answer.
            self._renew(matcher)
        if not known:
            matcher.state.unsafe_compute_mask_ptr(words[0].ctypes.data, size)
        return max(known, 1)

    def drafts(self, pool_row: int, proposed: Int32Array, max_drafts: int) -> tuple[Int32Array, bool]:
        """Return drafts for a row (int32[n]), and whether its grammar forces any of them.

        They are the `proposed` tokens that the grammar allows, or up to `max_drafts` tokens that it forces if these are
        more (SGLang's jump-forward decoding, verified as drafts). Without a grammar they are the proposed ones.
        """
        matcher = self.matchers.get(pool_row)
        if matcher is None:
            return proposed, False
        if matcher.state.is_error() or matcher.state.is_stopped():
            return proposed[:0], False
        forced = matcher.state.compute_ff_tokens()[:max_drafts]
        allowed = matcher.state.validate_tokens(proposed.tolist()) if len(proposed) else 0
        if matcher.state.is_error():
            self._renew(matcher)
            return proposed[:0], False
        drafts = proposed[:allowed] if allowed >= len(forced) else np.array(forced, np.int32)
        return drafts, bool(forced)

    def _fill(self, words: npt.NDArray[np.uint32], matchers: list[GrammarMatcher]) -> None:
        """Write what each matcher allows as bits, uint32[matchers, words]; many of them in several threads."""
        size = words.shape[1] * 4
        if len(matchers) >= ROWS_FOR_THREADS:
            places = [(matcher.state, place) for place, matcher in enumerate(matchers)]
            self._threads().unsafe_compute_mask_ptr(places, words.ctypes.data, size, len(matchers))
        else:
            for place, matcher in enumerate(matchers):
                matcher.state.unsafe_compute_mask_ptr(words[place].ctypes.data, size)
        for place, matcher in enumerate(matchers):
            if matcher.used and matcher.state.is_error():
                self._renew(matcher)
                matcher.state.unsafe_compute_mask_ptr(words[place].ctypes.data, size)

    def _threads(self) -> Any:
        import llguidance

        if self._executor is None:
            self._executor = llguidance.LLExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1))
        return self._executor

    def consume(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array | None = None
    ) -> tuple[BoolArray | None, dict[int, str]]:
        """Consume what a step sampled: int32[rows], -1 for none; or runs of `accepted` tokens, int32[sum(accepted)].

        Returns which grammars are complete, bool[rows] (None if no row has one), and errors by place in the plan.
        """
        failures: dict[int, str] = {}
        if not self.matchers:
            return None, failures
        counts = (tokens >= 0).astype(np.int32) if accepted is None else accepted
        ends = np.arange(len(tokens)) + 1 if accepted is None else np.cumsum(accepted)
        ended = np.zeros(len(plan.pool_rows), np.bool_)
        for place, (row, epoch, count, end) in enumerate(
            zip(plan.pool_rows.tolist(), plan.epochs.tolist(), counts.tolist(), ends.tolist(), strict=True)
        ):
            matcher = self.matchers.get(row)
            if not count or matcher is None or matcher.epoch != epoch or plan.step < matcher.since:
                continue
            run = tokens[end - count : end].tolist()
            if not self._take_in(matcher, run):
                failures[place] = f"the grammar failed: {_reason(matcher.state.get_error())}"
                del self.matchers[row]
                continue
            ended[place] = matcher.state.is_stopped()
        return ended, failures

    def _take_in(self, matcher: GrammarMatcher, run: list[int]) -> bool:
        """Consume the tokens of a row; False if the grammar does not allow them."""
        # A matcher in its error state allows only the end, which would look like a complete answer.
        done = not matcher.state.is_error() and all(self._consume_one(matcher.state, token) for token in run)
        if not done and matcher.used:
            self._renew(matcher)
            done = not matcher.state.is_error() and all(self._consume_one(matcher.state, token) for token in run)
        matcher.taken += run
        return done

    def _renew(self, matcher: GrammarMatcher) -> None:
        """Replace a used matcher that failed by a fresh one: the work of earlier answers counts towards the library's
        limits, and must not fail this answer.
        """
        matcher.state, matcher.used = self._store.fresh(matcher.grammar), False
        matcher.state.consume_tokens(matcher.taken)

    def _consume_one(self, state: Any, token: int) -> bool:
        """Consume one token; False if the grammar does not allow it. Tokens after its end are ignored."""
        return bool(state.is_stopped() or (state.consume_token(token) and not state.is_error()))

    def _values(self, words: npt.NDArray[np.uint32]) -> torch.Tensor:
        """0 for bits that are set and -inf for others: float32[k, vocabulary], by a table of all bytes."""
        if self._device.type == "cpu":
            # numpy takes half of torch's time, and a third for few rows.
            found = BYTE_MASKS.take(words.view(np.uint8), axis=0).reshape(len(words), -1)
            return torch.from_numpy(found[:, : self._vocab_size])
        if self._table is None:
            self._table = to_device(BYTE_MASKS, self._device)
        masks = to_device(words.view(np.uint8).astype(np.int32), self._device)
        return torch.nn.functional.embedding(masks, self._table).flatten(1)[:, : self._vocab_size]


def _with_known_decoder(text: str) -> str:
    """Replace a Metaspace decoder in a tokenizer.json by the equivalent sequence of steps, which llguidance reads.

    A tokenizer with byte tokens is not changed: Metaspace alone writes them out, as `<0x0A>`, and the steps do not.
    """
    tokenizer = json.loads(text)
    decoder = tokenizer.get("decoder") or {}
    if decoder.get("type") != "Metaspace" or re.search(r'"<0x[0-9A-F]{2}>"', text):
        return text
    space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return json.dumps(tokenizer)


def _reason(error: str) -> str:
    """Return the start of an error of the library, without its state and the lines of the grammar."""
    text = error.split("<state>")[0].split("\n   1 |")[0].strip()
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    text = text.replace("NoExtensionBias", "there is no answer that it allows")
    return text[:500] or "the grammar allows nothing more"
