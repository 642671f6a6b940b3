"""A front of an engine without an engine: echoes prompt tokens, for tests of the HTTP layer alone."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import WordPiece

from tokenyard.base import (
    ConfigError,
    ContextLengthError,
    Explanation,
    Finish,
    FinishReason,
    Int32Array,
    InvalidRequestError,
    RequestTimings,
    SessionEnded,
    SloTargets,
    TokenLogprobs,
    TurnEnded,
)
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.lora_registry import LoraAdapter
from tokenyard.engine.frontend.streams import Ended, Reader
from tokenyard.engine.text.prompt_tokenizer import PromptTokenizer

WORDS = "hello world the quick brown fox jumps over a lazy dog answer ; é 你好".split()  # noqa: SIM905
PROMISE = SloTargets(ttft_ns=10**15, tpot_ns=1)
"""A first token that is always in time, and a time per token that never is."""

ROW = {"state": "running", "level": 2, "tenant": "acme", "age_ms": 12.5, "prompt": 10, "hit": 4, "computed": 12}
VIEW: dict[str, Any] = {
    "groups": [{"state": "running", "level": 2, "tenant": "acme", "requests": 3, "known": 40, "held": 30}],
    "rows": [{**ROW, "number": 1, "known": 13, "limit": 20, "gates": 0, "paused": False}],
    "kv": {"rows": 30, "shared": 10, "cached": 20, "held": 0, "free": 40, "total": 100},
    "prefixes_cut": False,
    "step_budget_s": 0.05,
    "step_budget_tokens": 2048,
    "bins": [
        {"index": 7, "steps": 2, "prefill": 64, "decode": 6, "busy_ms": 9.0, "longest_ms": 6.0, "predicted_ms": 8.0}
    ],
    "counters": {"waiting": 2, "running": 3, "policy": "fcfs", "counters": {"generated_tokens": 9}},
}
"""One scheduler as a page sees it."""

HOT = {"begin": 0, "tokens": 16, "hits": 5, "in_use": True, "salted": False, "head": [1, 2, 3]}


def word_tokenizer() -> Tokenizer:
    """One token a word, split at spaces; id 0 is for unknown words."""
    vocabulary = {"[UNK]": 0} | {word: place + 1 for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = WordPiece(prefix="##", cleanup=False)
    return tokenizer


class FakeAdapters:
    """One adapter, and no way to load others."""

    def __init__(self) -> None:
        self.loaded = {"tuned": LoraAdapter("tuned", "tuned#0", "/adapters/tuned")}

    async def load(self, name: str, folder: str) -> LoraAdapter:
        self.loaded[name] = LoraAdapter(name, f"{name}#0", folder)
        return self.loaded[name]

    async def unload(self, name: str) -> None:
        if name not in self.loaded:
            raise InvalidRequestError(f"no adapter {name!r} is loaded", code="model_not_found")
        del self.loaded[name]


class FakeGenerator:
    """Answers with the words of WORDS in turn, one a delta, or with the pieces of `answer`."""

    context_length = 64
    max_prompt_bytes = 64 * 32
    ranks = 1
    records = None

    def __init__(self) -> None:
        self.tokenizer: Any = word_tokenizer()
        self.template_sources: dict[str, str] = {}
        self.response_template: Any = None
        self.answer: list[str] | None = None
        self.specs: list[GenerateReqInput] = []
        self.closed: list[str] = []
        self.calls: list[Any] = []
        self.ends: list[TurnEnded | SessionEnded] = []
        self.delay_s = 0.0
        self.adapters = FakeAdapters()
        self.reject: Finish | None = None
        self.fail_after: int | None = None
        self.failure: Exception = RuntimeError("a fault")

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.calls.append(("render", messages, options))
        texts = [message.get("content") or "" for message in messages]
        return " ".join(text if isinstance(text, str) else "".join(part["text"] for part in text) for text in texts)

    async def tokenize(self, text: str, add_special_tokens: bool, *, allow_too_long: bool = False) -> Int32Array:
        prompts = PromptTokenizer(self.tokenizer, self.context_length)
        return await prompts.ids(text, add_special_tokens, allow_too_long=allow_too_long)

    async def feed(self, spec: GenerateReqInput, reader: Reader, ended: Ended) -> None:
        async def give(piece: OutputDelta) -> None:
            reader.write(piece)
            while reader.slow:
                await reader.drain()

        await self._feed(spec, give)

    async def _feed(self, spec: GenerateReqInput, reader: Callable[[OutputDelta], Awaitable[None]]) -> None:
        if spec.rank is not None and spec.rank >= self.ranks:
            raise InvalidRequestError(f"there is no rank {spec.rank}", param="data_parallel_rank", code="unknown_rank")
        self.specs.append(spec)
        if spec.pooling:
            return await self._pool(spec, reader)
        given = spec.input_ids if spec.input_ids is not None else await self.tokenize(spec.text or "", True)
        prompt = [int(token) for token in given]
        count = check_length(spec, len(prompt), self.answer, self.context_length)
        if self.reject is not None:
            return await reader(OutputDelta(0, "", [], len(prompt), 0, 0, self.reject))
        try:
            begun = len(spec.output_ids or [])
            if begun >= count:
                whole = [delta(spec, prompt, 0, i, count, self.answer) for i in range(count)]
                end, text = whole[-1], "".join(piece.text for piece in whole)
                return await reader(OutputDelta(0, "", [], len(prompt), count, 2, end.finish, said=text))
            for place in range(begun, count):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if place == self.fail_after:
                    raise self.failure
                for index in range(spec.sampling.n):
                    piece = delta(spec, prompt, index, place, count, self.answer)
                    if place == begun:
                        texts = [delta(spec, prompt, index, i, count, self.answer).text for i in range(begun)]
                        piece.said = "".join(texts)
                    await reader(piece)
        except BaseException:
            self.closed.append(spec.rid)
            raise

    async def _pool(self, spec: GenerateReqInput, reader: Callable[[OutputDelta], Awaitable[None]]) -> None:
        """The vector of a prompt: how often it has the words number 1, 2, 3 and 4."""
        given = spec.input_ids if spec.input_ids is not None else await self.tokenize(spec.text or "", True)
        counts = np.array([sum(int(token) == word for token in given) for word in range(1, 5)], np.float32)
        end = finish("length", prompt=len(given), vector=counts.tobytes())
        await reader(OutputDelta(0, "", [], len(given), 0, 0, end))


def check_length(spec: GenerateReqInput, prompt: int, answer: list[str] | None, most: int) -> int:
    """The tokens of the answer, or what the engine raises for a prompt that does not fit."""
    count = spec.sampling.max_new_tokens if answer is None else len(answer)
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if prompt + count > most and not spec.clamp_max_new_tokens:
        raise ContextLengthError(f"{prompt} + {count} tokens do not fit", param="max_tokens")
    return min(count, most - prompt)


def delta(
    spec: GenerateReqInput, prompt: list[int], index: int, place: int, count: int, answer: list[str] | None
) -> OutputDelta:
    """One token of an answer."""
    token = place % len(WORDS) + 1
    text = ("" if place == 0 else " ") + WORDS[token - 1] if answer is None else answer[place]
    reason: FinishReason = "length" if answer is None else "stop"
    end = finish(reason, prompt=len(prompt), output=count, slo_targets=PROMISE) if place + 1 == count else None
    return OutputDelta(index, text, [token], len(prompt), place + 1, 2, end, logprobs(spec, prompt, place, token))


def logprobs(spec: GenerateReqInput, prompt: list[int], place: int, token: int) -> list[TokenLogprobs]:
    """Those that a request wants of one token, and with the first one those of its prompt."""
    if spec.logprobs is None:
        return []
    entries = []
    if place == 0 and spec.logprobs.prompt_from >= 0:
        entries = [(position, prompt[position]) for position in range(1, len(prompt))]
    entries.append((len(prompt) + place, token))
    top, named = spec.logprobs.top, spec.logprobs.token_ids
    more = [-2.0] * len(named)
    return [
        TokenLogprobs(0, position, token, -0.5, [token, token + 1][:top] + named, [-0.5, -1.5][:top] + more)
        for position, token in entries
    ]


class FakeControl:
    """Remembers in `calls` what it was asked to do: (verb, arguments), and named ones in a dict."""

    ranks = 1
    paused = False
    weight_version = ""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.age_s = 0.1
        self.flushable = True
        self.profiled = False
        self.watched: list[tuple[bool, int]] = []
        self.down: set[int] = set()
        self.lost = 0
        self.explanations: dict[str, list[Explanation]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in ("abort", "update", "pause_request", "resume_request", "pause", "continue_", "set_policy"):
            raise AttributeError(name)

        async def verb(*arguments: Any, **named: Any) -> bool:
            if arguments == ("fastest", {}):
                raise ConfigError("there is no schedule policy 'fastest'; did you mean fcfs?")
            self.calls.append((name, *arguments, named) if named else (name, *arguments))
            return True

        return verb

    async def explain(self, rid: str) -> list[Explanation]:
        return self.explanations.get(rid, [])

    def recent_rids(self) -> list[str]:
        return list(self.explanations)

    def turn_of(self, rid: str) -> tuple[str, int] | None:
        spec = next((spec for spec in reversed(self.specs) if spec.rid == rid and spec.session), None)
        return None if spec is None else (spec.session, spec.turn)

    def rid_of(self, number: int) -> str | None:
        return {1: "first", 3: "third"}.get(number)

    def end_turn(self, rid: str, event: TurnEnded) -> None:
        self.ends.append(event)

    async def end_session(self, event: SessionEnded) -> None:
        self.ends.append(event)

    async def flush_cache(self) -> bool:
        return self.flushable

    async def snapshot(self, timeout_s: float = 2.0) -> dict[str, Any]:
        counters = {"retracted": 4, "steps": 9, "aborted": 2, "prompt_tokens": 40, "hit_tokens": 10}
        policy = {"policy": "priority+lpm", "policy_options": {}, "overtaking": "a bound", "policy_note": "a note"}
        load = {"running": 3, "waiting": 2, "used_tokens": 25, "total_tokens": 100}
        return {**load, **policy, "priority_function": "mod:f", "counters": counters}

    async def watch(self, *, prefixes: bool, bins: int) -> list[dict[str, Any]]:
        self.watched.append((prefixes, bins))
        return [dict(VIEW, prefixes=[HOT] if prefixes else None)]

    async def rank_snapshots(self, timeout_s: float = 2.0) -> dict[int, dict[str, Any]]:
        return {rank: await self.snapshot() for rank in range(self.ranks) if rank not in self.down}

    def lost_schedulers(self) -> int:
        return self.lost

    def rank_ages_s(self) -> dict[int, float]:
        return {rank: math.inf if rank in self.down else self.age_s for rank in range(self.ranks)}

    async def start_profile(self) -> bool:
        started, self.profiled = not self.profiled, True
        return started

    async def stop_profile(self) -> bytes | None:
        stopped, self.profiled = self.profiled, False
        return b'[{"name": "plan", "ph": "X"}]' if stopped else None

    def health(self) -> float:
        return self.age_s


class FakeManager(FakeControl, FakeGenerator):
    """Both halves of an engine, with one list of calls."""

    def __init__(self) -> None:
        FakeControl.__init__(self)
        FakeGenerator.__init__(self)


def finish(reason: FinishReason, *, prompt: int = 0, output: int = 0, **more: Any) -> Finish:
    """A finish with plausible times."""
    now = time.monotonic_ns()
    return Finish(
        number=1,
        reason=reason,
        prompt_tokens=prompt,
        completion_tokens=output,
        cached_tokens=2,
        arrival_ns=now - 3_000_000,
        admitted_ns=now - 2_000_000,
        first_token_ns=now - 1_000_000,
        finished_ns=now,
        timings=RequestTimings(queue_ns=1_000_000, prefill_ns=1_000_000, decode_ns=1_000_000),
        **more,
    )
