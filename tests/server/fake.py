"""A front of an engine without an engine: echoes prompt tokens, for tests of the HTTP layer alone."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import WordPiece

from tokenyard.base import (
    ConfigError,
    ContextLengthError,
    Explanation,
    Finish,
    FinishReason,
    InvalidRequestError,
    RequestTimings,
    SloTargets,
    TokenLogprobs,
)
from tokenyard.engine.spec import GenerateSpec, OutputDelta
from tokenyard.engine.streams import Ended, Reader

WORDS = "hello world the quick brown fox jumps over a lazy dog answer ; é 你好".split()  # noqa: SIM905
PROMISE = SloTargets(ttft_ns=10**15, tpot_ns=1)
"""A first token that is always in time, and a pace that never is."""


def word_tokenizer() -> Tokenizer:
    """One token a word, split at spaces; id 0 is for unknown words."""
    vocabulary = {"[UNK]": 0} | {word: place + 1 for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = WordPiece(prefix="##", cleanup=False)
    return tokenizer


class FakeManager:
    """Answers with the words of WORDS in turn, one a delta, or with the pieces of `answer`.

    Remembers what it was asked and what was closed.
    """

    context_length = 64

    def __init__(self) -> None:
        self.tokenizer: Any = word_tokenizer()
        self.template_sources: dict[str, str] = {}
        self.answer: list[str] | None = None
        self.specs: list[GenerateSpec] = []
        self.closed: list[str] = []
        self.calls: list[Any] = []
        self.delay_s = 0.0
        self.age_s = 0.1
        self.flushable = True
        self.explanations: dict[str, list[Explanation]] = {}
        self.profiled = False
        self.reject: Finish | None = None
        self.fail_after: int | None = None
        self.failure: Exception = RuntimeError("a fault")

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.calls.append(("render", messages, options))
        texts = [message.get("content") or "" for message in messages]
        return " ".join(text if isinstance(text, str) else "".join(part["text"] for part in text) for text in texts)

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[OutputDelta, None]:
        self.specs.append(spec)
        prompt = (
            [int(token) for token in spec.input_ids]
            if spec.input_ids is not None
            else self.tokenizer.encode(spec.text).ids
        )
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        count = spec.sampling.max_new_tokens if self.answer is None else len(self.answer)
        if len(prompt) + count > self.context_length:
            if not spec.clamp_max_new_tokens:
                raise ContextLengthError(f"{len(prompt)} + {count} tokens do not fit", param="max_tokens")
            count = self.context_length - len(prompt)
        if self.reject is not None:
            yield OutputDelta(0, "", [], len(prompt), 0, 0, self.reject)
            return
        ended = 0
        try:
            for place in range(count):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if place == self.fail_after:
                    raise self.failure
                for index in range(spec.sampling.n):
                    yield self._delta(spec, prompt, index, place, count)
                    ended += place + 1 == count
        finally:
            if ended < spec.sampling.n:
                self.closed.append(spec.rid)

    async def feed(self, spec: GenerateSpec, reader: Reader, ended: Ended) -> None:
        async with aclosing(self.generate(spec)) as deltas:
            async for delta in deltas:
                await reader(delta)

    def _delta(self, spec: GenerateSpec, prompt: list[int], index: int, place: int, count: int) -> OutputDelta:
        token = place % len(WORDS) + 1
        text = ("" if place == 0 else " ") + WORDS[token - 1]
        if self.answer is not None:
            text = self.answer[place]
        last = place + 1 == count
        return OutputDelta(
            index=index,
            text=text,
            token_ids=[token],
            prompt_tokens=len(prompt),
            completion_tokens=place + 1,
            cached_tokens=2,
            finish=finish(
                "length" if self.answer is None else "stop", prompt=len(prompt), output=count, slo_targets=PROMISE
            )
            if last
            else None,
            logprobs=self._logprobs(spec, prompt, place, token),
        )

    def _logprobs(self, spec: GenerateSpec, prompt: list[int], place: int, token: int) -> list[TokenLogprobs]:
        if spec.logprobs is None:
            return []
        entries = []
        if place == 0 and spec.logprobs.prompt_from >= 0:
            entries = [(position, prompt[position]) for position in range(1, len(prompt))]
        entries.append((len(prompt) + place, token))
        top = spec.logprobs.top
        return [
            TokenLogprobs(0, position, token, -0.5, [token, token + 1][:top], [-0.5, -1.5][:top])
            for position, token in entries
        ]

    async def abort(self, rid: str | None = None, cause: str = "cancelled") -> None:
        self.calls.append(("abort", rid))

    async def update(self, rid: str, **changes: Any) -> bool:
        self.calls.append(("update", rid, changes))
        return True

    async def pause_request(self, rid: str) -> bool:
        self.calls.append(("pause", rid))
        return True

    async def resume_request(self, rid: str) -> bool:
        self.calls.append(("resume", rid))
        return True

    async def explain(self, rid: str) -> list[Explanation]:
        return self.explanations.get(rid, [])

    def recent_rids(self) -> list[str]:
        return list(self.explanations)

    def rid_of(self, number: int) -> str | None:
        return {1: "first", 3: "third"}.get(number)

    async def pause(self, mode: str) -> None:
        self.calls.append(("pause", mode))

    async def continue_(self) -> None:
        self.calls.append(("continue",))

    async def set_policy(self, name: str, options: dict[str, Any]) -> None:
        if name == "fastest":
            raise ConfigError("there is no schedule policy 'fastest'; did you mean fcfs?")
        self.calls.append(("set_policy", name, options))

    async def flush_cache(self) -> bool:
        return self.flushable

    async def snapshot(self, timeout_s: float = 2.0) -> dict[str, Any]:
        counters = {"retracted": 4, "steps": 9, "aborted": 2, "prompt_tokens": 40, "hit_tokens": 10}
        policy = {"policy": "priority+lpm", "policy_options": {}, "overtaking": "a bound", "policy_note": "a note"}
        load = {"running": 3, "waiting": 2, "used_tokens": 25, "total_tokens": 100}
        return {**load, **policy, "priority_function": "mod:f", "counters": counters}

    async def start_profile(self) -> bool:
        started, self.profiled = not self.profiled, True
        return started

    async def stop_profile(self) -> bytes | None:
        stopped, self.profiled = self.profiled, False
        return b'[{"name": "plan", "ph": "X"}]' if stopped else None

    def health(self) -> float:
        return self.age_s


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
