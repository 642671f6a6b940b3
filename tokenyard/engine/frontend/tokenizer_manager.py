"""The engine's front end in the API process: text to token ids for requests, deltas of text for answers."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from tokenyard.base import (
    AbortCause,
    Cancel,
    ExecutorInfo,
    Explanation,
    Int32Array,
    InvalidRequestError,
    Pause,
    PauseMode,
    Resume,
    SessionEnded,
    TokenyardError,
    TurnEnded,
    Update,
)
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.data_parallel_controller import DataParallelController
from tokenyard.engine.frontend.failover import Failover
from tokenyard.engine.frontend.input_processor import InputProcessor, check_priority, ns_from_ms
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.lora_registry import LoraRegistry
from tokenyard.engine.frontend.outputs import OutputHandler
from tokenyard.engine.frontend.paused_requests import PausedRequests
from tokenyard.engine.frontend.request_submitter import RequestSubmitter
from tokenyard.engine.frontend.scheduler_client import ProcessLink
from tokenyard.engine.frontend.streams import Ended, Reader, Stream
from tokenyard.engine.frontend.weight_updates import WeightUpdate, WeightUpdates
from tokenyard.engine.text.chat_messages import Message
from tokenyard.engine.text.chat_template import ChatTemplate, render_with_timeout
from tokenyard.routing.balance import RankBalancer

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 2.0
FLUSH_WAITS_S = (0.0, 0.02, 0.1, 0.5)
"""Before each try to flush a cache that no open request uses, as the step behind the last answer may be in flight."""


class TokenizerManager:
    """Submits requests, delivers their answers, and controls the engine. Used from one event loop.

    SGLang's `TokenizerManager`, vLLM's `AsyncLLM`. `RequestSubmitter` sends requests, `outputs` handles the messages of
    the engine's processes, and `failover` is notified when they start and end.

    tokenizer: None if the engine accepts and returns token ids only.
    assembler: set if token ids become text in this process.
    records: set if paused requests outlive the engine.
    joint_steps: see `WeightUpdates`.
    on_engine_dead, on_detokenizer_silent: see `Failover`.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        tokenizer: Tokenizer | None,
        template: ChatTemplate,
        link: ProcessLink,
        *,
        assembler: TextAssembler | None = None,
        on_engine_dead: Callable[[str], None] = lambda reason: None,
        on_detokenizer_silent: Callable[[str], None] = lambda reason: None,
        balancer: RankBalancer | None = None,
        records: PausedRequests | None = None,
        joint_steps: bool = False,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.records = records
        self.ranks = DataParallelController(balancer)
        self.adapters = LoraRegistry(self.ranks)
        self.weights = WeightUpdates(self.ranks, joint_steps=joint_steps)
        self._template = template
        self._requests = InputProcessor(info, tokenizer, template.special_tokens.get("eos_token"), self.adapters.key_of)
        self._submitter = RequestSubmitter(self.ranks)
        self._streams = self._submitter.streams
        self._recent = self._submitter.recent
        self.outputs = OutputHandler(self._submitter, assembler)
        self.failover = Failover(self._submitter, self.outputs, link, assembler, on_engine_dead, on_detokenizer_silent)
        self._link = link
        self._next_number = 1
        self._draining = False

    # ---- generation --------------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._requests.longest

    @property
    def template_sources(self) -> dict[str, str]:
        """The Jinja sources of the chat templates by name, which tell how the model writes."""
        return self._template.sources

    @property
    def response_template(self) -> Any:
        """The checkpoint's own description of the model's output format; None without one."""
        return self._template.response_template

    @property
    def open_requests(self) -> int:
        """Requests whose answers have not all ended."""
        return len(self._streams)

    async def generate(self, spec: GenerateReqInput) -> AsyncGenerator[OutputDelta, None]:
        """Answer one request. Closing the iterator before its end cancels the request.

        Yields deltas until each of the n answers has had one with `finish`; a request that the scheduler refuses ends
        with a finish of reason "abort" and a cause. Raises InvalidRequestError or ContextLengthError
        for a wrong spec, OverloadedError for a reader that is too slow and EngineDeadError if the engine goes.
        """
        stream = await self._submit(spec)
        try:
            while True:
                if (delta := stream.take()) is not None:
                    yield delta
                elif stream.open_answers:
                    await stream.arrival()
                else:
                    break
        finally:
            self._close_stream(stream)

    async def feed(self, spec: GenerateReqInput, reader: Reader, ended: Ended) -> None:
        """Answer one request as `generate` does, and write each delta to `reader`.

        If the reader leaves or is too slow, `ended` is called with the end of each answer that it has not seen.
        """
        stream = await self._submit(spec)
        try:
            await stream.feed(reader)
        finally:
            self._close_stream(stream, ended)

    async def render_chat(self, messages: list[Message], **options: Any) -> str:
        """Return the prompt of a conversation; `options` are those of `ChatTemplate.render`.

        Raises InvalidRequestError if the template refuses, takes too long, or is not there.
        """
        return await render_with_timeout(self._template, messages, max_chars=self.max_prompt_bytes, **options)

    @property
    def max_prompt_bytes(self) -> int:
        """Most bytes of text that a prompt can have."""
        return self._requests.prompts.max_bytes

    async def tokenize(self, text: str, add_special_tokens: bool, *, allow_too_long: bool = False) -> Int32Array:
        """Return the token ids of a text, int32[n]; with `allow_too_long` also of one that is too long for a prompt.

        Raises InvalidRequestError without a tokenizer and ContextLengthError beyond what is taken.
        """
        return await self._requests.prompts.ids(text, add_special_tokens, allow_too_long=allow_too_long)

    async def _submit(self, spec: GenerateReqInput) -> Stream:
        self.failover.check_alive()
        self.ranks.check_rank(spec.rank)
        arrival_ns = time.monotonic_ns() - spec.age_ns
        rid = spec.rid or uuid.uuid4().hex
        token_ids = await self._requests.token_ids(spec)
        self.failover.check_alive()
        request = self._requests.make(spec, *token_ids, number=self._next_number, rid=rid, arrival_ns=arrival_ns)
        self._next_number += request.sampling.n
        return self._submitter.submit(request, spec.rank)

    def _close_stream(self, stream: Stream, ended: Ended | None = None) -> None:
        """Forget a stream; if its request may still run, cancel it."""
        self._streams.remove(stream)
        stream.detach()
        if self.records is not None and stream.paused and not stream.open_answers and not self._draining:
            self.records.forget(stream.rid)
        if self.failover.death is not None:
            return
        if ended is not None:
            self._streams.detach(stream, ended)
        if stream.open_answers or stream.error is not None:
            stream.client.send(Cancel(stream.numbers, "the client went away", "client_gone"))

    # ---- control -----------------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None, cause: AbortCause = "cancelled") -> None:
        """End the requests with this id, or all for None; each ends with a finish of reason "abort" and this cause."""
        self._draining = self._draining or cause == "draining"
        for stream in self._streams.with_rid(rid):
            stream.client.send(Cancel(stream.numbers, cause=cause))
        if rid is not None and self.records is not None:
            self.records.forget(rid)

    async def update(self, rid: str, *, priority: int | None = None, deadline_ms: float | None = None) -> bool:
        """Change how urgent a request is; `deadline_ms` counts from its arrival. False if there is none with this id.

        Raises InvalidRequestError for values out of range.
        """
        check_priority(priority)
        deadline_ns = ns_from_ms(deadline_ms, "deadline_ms")
        streams = self._streams.with_rid(rid)
        changes = {"priority": priority, "deadline_ns": deadline_ns}
        for stream in streams:
            given = {name: value for name, value in changes.items() if value is not None}
            stream.request = replace(stream.request, **given)  # type: ignore[arg-type]
            for number in stream.numbers:
                stream.client.send(Update(number, priority, deadline_ns))
        return bool(streams)

    async def pause_request(self, rid: str) -> bool:
        """Pause a request until `resume_request`; False if there is none with this id.

        With a KV store on disk, it has a record when this returns (see `records`), unless that failed.
        """
        found = self._set_paused(rid, paused=True)
        if self.records is not None:
            for stream in self._streams.with_rid(rid):
                await self._write_record(stream, self.records)
        return found

    async def _write_record(self, stream: Stream, records: PausedRequests) -> None:
        """Write the record of a paused request, once all its output has been delivered."""
        try:
            outputs = await stream.client.call("outputs", dict[int, list[int]], numbers=stream.open_numbers)
            await self.outputs.delivered()
        except TokenyardError as error:
            records.counters.failed += 1
            logger.warning("the paused request %s has no record: %s", stream.rid, error)
            return
        await records.keep(stream, outputs)

    async def resume_request(self, rid: str) -> bool:
        """Let a paused request go on; False if there is none with this id."""
        return self._set_paused(rid, paused=False)

    def hold(self, rids: Sequence[str], *, held: bool) -> None:
        """Keep requests from running, or let them go on; one that has ended or that a client has paused stays so.

        Those that run give their places up.
        """
        streams = [stream for rid in rids for stream in self._streams.with_rid(rid) if not stream.paused]
        for client in dict.fromkeys(stream.client for stream in streams):
            numbers = [number for stream in streams if stream.client is client for number in stream.open_numbers]
            if numbers:
                client.send(Pause(numbers=numbers) if held else Resume(numbers))

    def _set_paused(self, rid: str, *, paused: bool) -> bool:
        streams = self._streams.with_rid(rid)
        for stream in streams:
            stream.paused = paused
            stream.client.send(Pause(numbers=stream.numbers) if paused else Resume(stream.numbers))
            if not paused and self.records is not None:
                self.records.forget(rid)
        return bool(streams)

    def end_turn(self, rid: str, event: TurnEnded) -> None:
        """Tell the scheduler that had the request `rid`, a turn of a session, how its answer ended."""
        client = self.ranks.find(self._recent.source(rid))
        if client is not None:
            client.send(event)

    async def end_session(self, event: SessionEnded) -> None:
        """Tell all schedulers that a session has no further turns."""
        for client in self.ranks.clients:
            client.send(event)

    async def explain(self, rid: str) -> list[Explanation]:
        """Where the time of each answer to a request went; empty for one that is not known, or not any more."""
        client = self.ranks.find(self._recent.source(rid))
        if client is None:
            return []
        explanations = [await client.call("explain", Explanation | None, number=n) for n in self._recent.numbers(rid)]
        return [explanation for explanation in explanations if explanation is not None]

    async def start_profile(self) -> bool:
        """Begin a timeline of the steps of all schedulers; False if one runs already."""
        return all(await self.ranks.call("start_profile", bool))

    async def stop_profile(self) -> bytes | None:
        """End the timeline and return its events as a JSON list (Trace Event Format); None if none runs."""
        timelines = [events for events in await self.ranks.call("stop_profile", bytes | None) if events]
        return b"[" + b",".join(events[1:-1] for events in timelines) + b"]" if timelines else None

    def recent_rids(self) -> list[str]:
        """The ids of requests that are open or ended not long ago."""
        return self._recent.rids()

    def turn_of(self, rid: str) -> tuple[str, int] | None:
        """The session and the index of the turn that a recent request is; None if it is none or not known."""
        return self._recent.turn(rid)

    def rid_of(self, number: int) -> str | None:
        """The id of the request with this number, None if it is not known."""
        return self._recent.rid(number)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop all work until `continue_`; new requests wait."""
        async with self.weights.lock:
            self.ranks.pause(Pause(mode))

    async def continue_(self) -> None:
        """Go on after `pause`, with tensors that were staged. Raises what `WeightUpdates.use_staged` raises."""
        if self.weights.released:
            what = " and ".join(sorted(self.weights.released))
            raise InvalidRequestError(f"the memory of {what} is released; call /resume_memory_occupation first")
        await self.weights.use_staged()
        async with self.weights.lock:
            self.ranks.pause(Resume())

    @property
    def paused(self) -> bool:
        """Whether `pause` has stopped all work."""
        return self.ranks.paused

    @property
    def weight_version(self) -> str:
        """The version of the weights in use, "" for those that the engine started with."""
        return self.weights.version

    async def update_weights(self, update: WeightUpdate) -> str:
        """Change the weights, in all schedulers or in none; returns their version. See WeightUpdates.update."""
        return await self.weights.update(update)

    async def weight(self, name: str, rows: int) -> Any:
        """The first `rows` rows of a tensor as nested lists. Raises ConfigError if there is none of this name."""
        found = await self.ranks.call("weight", Any, tensor=name, rows=rows)
        return found[0]

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order the queue by another policy. Raises ConfigError, and nothing changes, if that cannot be."""
        await self.ranks.set_policy(name, options)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run or wait, and with one rank nothing is done then."""
        for wait_s in FLUSH_WAITS_S:
            await asyncio.sleep(wait_s)
            if all(await self.ranks.call("flush", bool)):
                self.ranks.balancer.flushed()
                return True
            if self.open_requests:
                break
        return False

    async def clear_store(self) -> int:
        """Clear the KV store; returns how many blocks it had."""
        return sum(await self.ranks.call("clear_store", int))

    async def snapshot(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> dict[str, Any]:
        """Return the schedulers' counters; those of the last heartbeats if one is in a step for longer than that."""
        counters = await self.ranks.snapshot(timeout_s)
        return counters if self.records is None else counters | {"paused_requests": self.records.describe()}

    async def watch(self, *, prefixes: bool, bins: int) -> list[dict[str, Any]]:
        """The state of each scheduler for a live page (`LiveView` as plain data), with the latest `bins` bins of steps
        (`StepBin`). Raises OverloadedError if one does not answer in time.
        """
        return await self.ranks.call("watch", dict[str, Any], SNAPSHOT_TIMEOUT_S, prefixes=prefixes, bins=bins)

    async def rank_snapshots(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> dict[int, dict[str, Any]]:
        """Return the counters of each rank that runs, as `snapshot` does of all together."""
        return await self.ranks.snapshots(timeout_s)

    def lost_schedulers(self) -> int:
        """Return how many schedulers have ended so far."""
        return self.ranks.lost_schedulers

    def rank_ages_s(self) -> dict[int, float]:
        """Return for each rank the seconds since it was known to be well; infinite for one that does not run."""
        return self.ranks.ages_s(time.monotonic_ns())

    def health(self) -> float:
        """Return the seconds since the engine was known to be well; infinite if it never was or is dead.

        A scheduler that waits for a long step of the device counts as well.
        """
        return math.inf if self.failover.death is not None else self.ranks.age_s(time.monotonic_ns())

    async def close(self, reason: str = "the server is shutting down") -> None:
        """End what is open with EngineDeadError for this reason, and close the link."""
        self.failover.end_all(reason)
        self.weights.close()
        await self.outputs.close()
        self._link.close()
