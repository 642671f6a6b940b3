"""Runs the generations of one HTTP request and collects their results."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import Finish, TokenLogprobs
from tokenyard.engine.frontend.input_processor import level_name
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.streams import Reader
from tokenyard.server.http.errors import failure
from tokenyard.server.http.prompt_history import CacheReport
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.http.turns import read_turn
from tokenyard.server.native.explain import stages_ms, wall_s
from tokenyard.server.parse.output_style import OutputReader

FIRST_VERSION = "default"
"""SGLang's name for the weights that the server started with."""

_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'

OnDelta = Callable[[int, OutputDelta], None]
"""Called with (index of the spec, delta)."""


AddDetails = Callable[[dict[str, Any], "CompletionOutput"], None]
"""Adds to a usage object what is known of an answer."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer so far.

    said: text that precedes it, if it was begun elsewhere.
    reader: parses text that may contain reasoning or tool calls.
    """

    text: str = ""
    said: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    reader: OutputReader | None = None

    def add(self, delta: OutputDelta, *, keep: bool) -> None:
        """Add a delta. `keep`: collect text and tokens as well, not only the counts."""
        self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens = delta.completion_tokens
        self.cached_tokens = delta.cached_tokens
        self.finish = delta.finish
        self.said = self.said or delta.said
        if keep:
            self.text += delta.text
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs


def usage_of(answers: Sequence[CompletionOutput], n: int) -> dict[str, Any]:
    """The usage object; the n answers to one prompt share its tokens."""
    prompts = answers[::n]
    prompt_tokens = sum(answer.prompt_tokens for answer in prompts)
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in prompts)},
    }


def add_cached_tokens_details(call: RequestContext, usage: dict[str, Any], answer: CompletionOutput) -> None:
    """Add to a usage object, if the request asks for it, why its first prompt was cached as far as it was."""
    if call.turn is None or not call.turn.wants_details or answer.finish is None:
        return
    report = call.state.prompts.report(call.first_rid)
    if report is None:
        report = CacheReport("first", prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens)
    usage["cached_tokens_details"] = report.with_evicted(answer.finish.timings).describe()


def usage_so_far(delta: OutputDelta) -> bytes:
    """`usage_of` an answer up to this delta, as JSON. It is made for every chunk, so without a dict."""
    prompt, completion = delta.prompt_tokens, delta.completion_tokens
    return _USAGE % (prompt, completion, prompt + completion, delta.cached_tokens)


def weights_of_answer(finish: Finish) -> dict[str, Any]:
    """The version of the weights that computed an answer, and if they changed meanwhile that of each run of tokens."""
    found: dict[str, Any] = {"weight_version": finish.weight_version or FIRST_VERSION}
    if finish.weight_runs:
        found["weight_runs"] = [
            {"weight_version": version or FIRST_VERSION, "tokens": tokens} for version, tokens in finish.weight_runs
        ]
    return found


def stage_times(finish: Finish, spec: GenerateReqInput) -> dict[str, Any]:
    """The `x_sched` block: milliseconds per stage, cached tokens, retractions, and when it ended (Unix time)."""
    return {
        "class": level_name(spec.service_class),
        **{f"{stage}_ms": time_ms for stage, time_ms in stages_ms(finish.timings).items()},
        "cached_tokens": finish.cached_tokens,
        "preemptions": finish.retractions,
        **(weights_of_answer(finish) if finish.weight_version or finish.weight_runs else {}),
        "finished_at": wall_s(finish.finished_ns),
    }


class AnswerReader(Reader):
    """Takes the deltas of one spec: shows them to metrics, log and traces, and passes them on to what writes them.

    It is slow while the client of the response is.
    """

    def __init__(self, call: RequestContext, spec: GenerateReqInput, place: int, take: OnDelta) -> None:
        self._reply, self._place, self._take = call.reply, place, take
        self._spec, self._ended, self._prompts = spec, call.ended, call.state.prompts
        self._watchers = call.state.watchers(spec, call.headers)

    def write(self, delta: OutputDelta) -> None:
        """Take a delta. Raises the error of a request that was refused or failed."""
        if delta.finish is not None and self._spec.session:
            cached = delta.prompt_tokens, delta.cached_tokens
            self._prompts.answered(self._spec.tenant, self._spec.session, self._spec.rid, *cached)
        for watcher in self._watchers:
            watcher.delta(delta)
        if delta.finish is not None:
            error = failure(delta.finish)
            if error is not None:
                raise error
            if delta.finish.complete:
                self._ended[self._spec.rid] = self._spec.tenant
        self._take(self._place, delta)

    def see(self, delta: OutputDelta) -> None:
        """Take a delta whose client is gone."""
        for watcher in self._watchers:
            watcher.delta(delta)

    @property
    def slow(self) -> bool:
        """Whether the response waits for its client."""
        return self._reply.slow

    async def drain(self) -> None:
        """Wait for the client."""
        await self._reply.drain()


async def run(call: RequestContext, specs: Sequence[GenerateReqInput], take: OnDelta) -> None:
    """Run `specs` concurrently; `take` is called with (index of the spec, delta). The first error ends all specs.

    Raises what the engine and `take` raise, and the error of a request that was refused or failed.
    """
    call.turn = await read_turn(call)
    for spec in specs:
        if not spec.pooling:
            spec.session, spec.turn = call.turn.session, call.turn.index
    if len(specs) == 1:
        await _run_one(call, specs[0], 0, take)
        return
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, spec in enumerate(specs):
            tasks.append(asyncio.ensure_future(_run_one(call, spec, place, take)))
            # Starting a request may tokenize a short text; let the event loop serve others in between.
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(call: RequestContext, spec: GenerateReqInput, place: int, take: OnDelta) -> None:
    spec.rid = spec.rid or uuid.uuid4().hex
    spec.age_ns = call.age_ns
    if place == 0:
        call.first_rid = spec.rid
    with call.state.open_request(spec.rid):
        if spec.session and call.messages:
            call.state.prompts.began(
                spec.tenant,
                spec.session,
                spec.rid,
                call.messages,
                call.tools,
                text=spec.text or "",
                turn=spec.turn,
                salt=spec.cache_salt,
                adapter=spec.lora,
            )
        reader = AnswerReader(call, spec, place, take)
        await call.manager.feed(spec, reader, reader.see)


async def collect(call: RequestContext, specs: Sequence[GenerateReqInput], n: int) -> list[CompletionOutput]:
    """All answers in full: the n of the first spec, then the n of the second, and so on."""
    answers = [CompletionOutput() for _ in range(len(specs) * n)]

    def take(place: int, delta: OutputDelta) -> None:
        answers[place * n + delta.index].add(delta, keep=True)

    await run(call, specs, take)
    return answers
