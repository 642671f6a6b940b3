"""The engine's front in the API process: text to token ids on the way in, deltas of text on the way out."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from tokenyard.base import (
    NS_PER_S,
    AbortCause,
    Cancel,
    EngineDeadError,
    ExecutorInfo,
    Explanation,
    Finish,
    Int32Array,
    OverloadedError,
    Pause,
    PauseMode,
    Resume,
    Submit,
    TenantUse,
    TokenBatch,
    TokenyardError,
    Update,
)
from tokenyard.engine.adapters import AdapterRegistry
from tokenyard.engine.client import Link, SchedulerClient
from tokenyard.engine.continuation import begun_answers, continued, first_number, untold
from tokenyard.engine.paused import PausedRequests
from tokenyard.engine.processes.messages import Call, Fence, Fenced, Heartbeat, Reply, TextBatch, ToApi
from tokenyard.engine.ranks import Ranks
from tokenyard.engine.recent import RecentRequests
from tokenyard.engine.requests import RequestMaker, check_priority, ns_from_ms
from tokenyard.engine.spec import GenerateSpec, OutputDelta
from tokenyard.engine.streams import Ended, Reader, Stream, StreamTable
from tokenyard.engine.text.chat_messages import Message
from tokenyard.engine.text.chat_template import ChatTemplate, render_within
from tokenyard.engine.text.text_assembler import TextAssembler, ends_batch
from tokenyard.router.balance import Balancer, Place

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 2.0
FENCE_TIMEOUT_S = 10.0
"""How long the detokenizer may take to say how far the answers of a scheduler have come that has ended."""

LEFT = Finish(0, "abort", message="the client went away", cause="client_gone")
"""The end of an answer that nobody reads any more, and that no scheduler has."""

NO_ROOM = ("queue_full", "displaced", "tenant_limit")
"""Why a rank refuses a request that another one may take."""

MOST_MOVES = 3
"""A request whose scheduler ends once more is given up: it may be what ends them."""


class TokenizerManager:
    """Sends requests to schedulers and hands out what comes back. One per engine, used from one event loop.

    `tokenizer` is None where the engine takes and gives token ids only. `assembler` is given where token ids become
    text in this process, `records` where paused requests outlive the engine. What arrives goes to `receive`. A
    scheduler that ends leaves its requests to others (see `rank_lost`). `on_death` hears why the engine ended, if by
    itself; all open requests have ended by then. `on_text_silent` hears why the detokenizer is to be ended: it does
    not answer.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        tokenizer: Tokenizer | None,
        template: ChatTemplate,
        link: Link,
        *,
        assembler: TextAssembler | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
        on_text_silent: Callable[[str], None] = lambda reason: None,
        balancer: Balancer | None = None,
        records: PausedRequests | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.ranks = Ranks(balancer)
        self.adapters = AdapterRegistry(self.ranks)
        self._template = template
        self._requests = RequestMaker(info, tokenizer, template.special_tokens.get("eos_token"), self.adapters.key_of)
        self._link = link
        self._assembler = assembler
        self._on_death = on_death
        self._on_text_silent = on_text_silent
        self._text_beat_ns = 0
        self._streams = StreamTable()
        self._recent = RecentRequests()
        self._next_number = 1
        self._death: str | None = None
        self._draining = False
        self.records = records
        self._lost: dict[int, tuple[SchedulerClient, asyncio.TimerHandle]] = {}
        self._loop = asyncio.get_running_loop()
        self._news: list[TextBatch] = []
        self._fenced: list[Fenced] = []
        self._awaiting: list[asyncio.Future[None]] = []
        self._deaf: set[int] = set()
        self._has_news = asyncio.Event()
        self._deliverer = self._loop.create_task(self._deliver())

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
        """What the checkpoint itself says of how the model writes, None where it does not."""
        return self._template.response_template

    @property
    def open_requests(self) -> int:
        """Requests whose answers have not all ended."""
        return len(self._streams)

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[OutputDelta, None]:
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

    async def feed(self, spec: GenerateSpec, reader: Reader, ended: Ended) -> None:
        """Answer one request as `generate` does, and give each delta to `reader`, which must not wait for long.

        Where the reader goes or is too slow, `ended` is told of the end of each answer that the reader has not seen.
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
        return await render_within(self._template, messages, most_chars=self.most_prompt_bytes, **options)

    @property
    def most_prompt_bytes(self) -> int:
        """Most bytes of text that a prompt can have."""
        return self._requests.prompts.most_bytes

    async def tokenize(self, text: str, add_special_tokens: bool, *, any_length: bool = False) -> Int32Array:
        """Return the token ids of a text, int32[n]; with `any_length` also of one that is too long for a prompt.

        Raises InvalidRequestError without a tokenizer and ContextLengthError beyond what is taken.
        """
        return await self._requests.prompts.ids(text, add_special_tokens, any_length=any_length)

    async def _submit(self, spec: GenerateSpec) -> Stream:
        self._check_alive()
        self.ranks.check_rank(spec.rank)
        arrival_ns = time.monotonic_ns()
        rid = spec.rid or uuid.uuid4().hex
        token_ids = await self._requests.token_ids(spec)
        self._check_alive()
        request = self._requests.make(spec, *token_ids, number=self._next_number, rid=rid, arrival_ns=arrival_ns)
        self._next_number += request.sampling.n
        client, place = self.ranks.choose(request, spec.rank)
        stream = Stream(request, client, place)
        self._streams.add(stream)
        self._recent.add(stream)
        if self.ranks.size > 1 and place is not None and not request.text.stream:
            self._loop.call_later(place.expected_s(), place.first_token)
        client.send(Submit(request))
        return stream

    def _close_stream(self, stream: Stream, ended: Ended | None = None) -> None:
        """Forget a stream; if its request may still run, cancel it."""
        self._streams.remove(stream)
        stream.leave()
        if self.records is not None and stream.paused and not stream.open_answers and not self._draining:
            self.records.forget(stream.rid)
        if self._death is not None:
            return
        if ended is not None:
            self._streams.leave(stream, ended)
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
        """Let a request give up its place until `resume_request`; False if there is none with this id.

        With a store below, it has a record on disk when this returns (see `records`), unless that failed.
        """
        found = self._hold(rid, paused=True)
        if self.records is not None:
            for stream in self._streams.with_rid(rid):
                await self._keep(stream, self.records)
        return found

    async def _keep(self, stream: Stream, records: PausedRequests) -> None:
        """Write the record of a paused request, once its scheduler and all news say how far its answers are."""
        try:
            outputs = await stream.client.call("outputs", dict[int, list[int]], numbers=stream.open_numbers)
            told = self._loop.create_future()
            self._awaiting.append(told)
            self._has_news.set()
            await told
        except TokenyardError as error:
            records.counters.failed += 1
            logger.warning("the paused request %s has no record: %s", stream.rid, error)
            return
        await records.keep(stream, outputs)

    async def resume_request(self, rid: str) -> bool:
        """Let a paused request go on; False if there is none with this id."""
        return self._hold(rid, paused=False)

    def _hold(self, rid: str, *, paused: bool) -> bool:
        streams = self._streams.with_rid(rid)
        for stream in streams:
            stream.paused = paused
            stream.client.send(Pause(numbers=stream.numbers) if paused else Resume(stream.numbers))
            if not paused and self.records is not None:
                self.records.forget(rid)
        return bool(streams)

    async def explain(self, rid: str) -> list[Explanation]:
        """Where the time of each answer to a request went; empty for one that is not known, or not any more."""
        client = self.ranks.find(self._recent.source(rid))
        if client is None:
            return []
        told = [await client.call("explain", Explanation | None, number=n) for n in self._recent.numbers(rid)]
        return [explanation for explanation in told if explanation is not None]

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

    def rid_of(self, number: int) -> str | None:
        """The id of the request with this number, None if it is not known."""
        return self._recent.rid(number)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop all work until `continue_`; new requests wait."""
        self.ranks.pause(Pause(mode))

    async def continue_(self) -> None:
        """Go on after `pause`."""
        self.ranks.pause(Resume())

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order the queue by another policy. Raises ConfigError, and nothing changes, if that cannot be."""
        await self.ranks.set_policy(name, options)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run or wait, and with one rank nothing is done then."""
        flushed = all(await self.ranks.call("flush", bool))
        if flushed:
            self.ranks.balancer.flushed()
        return flushed

    async def clear_store(self) -> int:
        """Forget all KV below the device, and return how many blocks that was."""
        return sum(await self.ranks.call("clear_store", int))

    async def snapshot(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> dict[str, Any]:
        """Return the schedulers' counters; those of the last heartbeats if one is in a step for longer than that."""
        counters = await self.ranks.snapshot(timeout_s)
        return counters if self.records is None else counters | {"paused_requests": self.records.describe()}

    async def watch(self, *, prefixes: bool, bins: int) -> list[dict[str, Any]]:
        """What a live page shows of each scheduler now (`scheduler.live_view.LiveView` and `watch.step_watch.StepBin`
        as plain data), with the latest `bins` bins of steps. Raises OverloadedError if one does not answer in time.
        """
        return await self.ranks.call("watch", dict[str, Any], SNAPSHOT_TIMEOUT_S, prefixes=prefixes, bins=bins)

    async def rank_snapshots(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> dict[int, dict[str, Any]]:
        """Return the counters of each rank that runs, as `snapshot` does of all together."""
        return await self.ranks.snapshots(timeout_s)

    def losses(self) -> int:
        """Return how many schedulers have ended so far."""
        return self.ranks.losses

    def rank_ages_s(self) -> dict[int, float]:
        """Return for each rank the seconds since it was known to be well; infinite for one that does not run."""
        return self.ranks.ages_s(time.monotonic_ns())

    def health(self) -> float:
        """Return the seconds since the engine was known to be well; infinite if it never was or is dead.

        A scheduler that waits for a long step of the device counts as well.
        """
        return math.inf if self._death is not None else self.ranks.age_s(time.monotonic_ns())

    def text_age_s(self) -> float:
        """Return the seconds since the detokenizer was known to be well; infinite while none has said a word."""
        return (time.monotonic_ns() - self._text_beat_ns) / NS_PER_S if self._text_beat_ns else math.inf

    # ---- the life of the engine --------------------------------------------------------------------------------

    def rank_ready(self, rank: int, source: int) -> None:
        """A scheduler process runs; requests may go there, and those that have waited for one do."""
        client = SchedulerClient(self._link.connect(source), rank, source)
        self.ranks.join(client)
        for absent in (self.ranks.absent, self.ranks.absent_rank(rank)):
            for stream in self._streams.of(absent):
                self._place(stream, client, self.ranks.balancer.choose(stream.request, [rank], time.monotonic()))

    def rank_lost(self, source: int, reason: str, *, distrust: bool) -> None:
        """A scheduler process has ended. Its requests go on elsewhere, each from the last token that came of it.

        First the text side must say how far they are, so that none comes twice and none is missed (`Fence`). With
        `distrust`, a policy of the user's own that was chosen while it ran may be the reason, and is not chosen again.
        """
        error = OverloadedError(f"the scheduler ended ({reason}) and is started again; try again soon")
        client = self.ranks.leave(source, error, time.monotonic_ns())
        if client is None or self._death is not None:
            return
        self._link.disconnect(source)
        if distrust:
            self.ranks.drop_user_policy()
        numbers: list[int] = []
        for stream in self._streams.of(client):
            stream.moves += 1
            if stream.moves <= MOST_MOVES or self.ranks.all_restart:
                numbers += stream.open_numbers
                continue
            message = f"the scheduler ended {stream.moves} times while this request was there: {reason}"
            ends = [Finish(number, "abort", message=message, cause="failed") for number in stream.open_numbers]
            self._add_news(ends_batch(ends))
        timer = self._loop.call_later(FENCE_TIMEOUT_S, self._on_text_silent, "the detokenizer does not answer")
        self._lost[source] = client, timer
        fence = Fence(source, numbers)
        if self.ranks.all_restart:
            self._go_by_streams(source)
        elif self._assembler is None:
            self._link.fence(fence)
        else:
            self.receive(self._assembler.fence(fence), source)

    def rank_given_up(self, rank: int) -> None:
        """A rank is out for good. What waits for it goes to others, in the same order."""
        absent, events = self.ranks.give_up(rank)
        for event in events:
            stream = self._streams.of_number(first_number(event))
            if stream is None or isinstance(event, Call):
                continue
            if stream.client is absent:
                self._place(stream, *self.ranks.choose(stream.request))
            stream.client.send(event)
        self._streams.end_left(absent, LEFT)

    def text_lost(self) -> None:
        """The detokenizer has ended, and with it the state of all texts and some news of the schedulers. All of them
        are started again; requests go on from the tokens that have come here.
        """
        self.ranks.all_restart = True
        self._text_beat_ns = 0
        self._link.reset_text()
        for source in self._lost:
            self._go_by_streams(source)

    def text_ready(self) -> None:
        """A detokenizer runs again."""
        self.ranks.all_restart = False

    def _go_by_streams(self, source: int) -> None:
        """Nobody can say any more how far the answers of a scheduler are: what has come here counts, and no more."""
        self._deaf.add(source)
        self._fenced.append(untold(source))
        self._has_news.set()

    def engine_died(self, reason: str) -> None:
        """End everything that is open with EngineDeadError, and refuse everything from now on."""
        if self._death is None:
            logger.critical("the engine stopped: %s", reason)
            self._end_all(reason)
            self._on_death(reason)

    def _end_all(self, reason: str) -> None:
        self._death = self._death or reason
        error = EngineDeadError(f"the engine stopped: {self._death}")
        self._streams.fail_all(error)
        self.ranks.close(error)

    async def close(self, reason: str = "the server is shutting down") -> None:
        """End what is open with EngineDeadError for this reason, and close the link."""
        self._end_all(reason)
        self._deliverer.cancel()
        await asyncio.gather(self._deliverer, return_exceptions=True)
        for told in self._awaiting:
            told.cancel()
        for _, timer in self._lost.values():
            timer.cancel()
        self._link.close()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine stopped: {self._death}")

    def _bring_back(self, fenced: Fenced) -> None:
        """Send on what a scheduler that has ended left behind."""
        if fenced.source not in self._lost:
            return
        lost, timer = self._lost.pop(fenced.source)
        timer.cancel()
        # The news before the fence are out, so what has not ended by them does not end any more.
        self._streams.end_left(lost, LEFT)
        streams = self._streams.of(lost)
        begun = {number: tokens for stream in streams for number, tokens in stream.come.items()} | begun_answers(fenced)
        for stream in streams:
            client, place = self.ranks.choose(stream.request)
            self._place(stream, client, place)
            for request in continued(stream.request, stream.open_answers, begun):
                client.send(Submit(request, accepted=True))
            if stream.paused:
                client.send(Pause(numbers=stream.numbers))
        if streams:
            logger.warning("%d requests go on where their scheduler ended", len(streams))

    def _place(self, stream: Stream, client: SchedulerClient, place: Place | None) -> None:
        """A request is at this scheduler from now on."""
        stream.leave()
        stream.client, stream.place = client, place
        self._recent.add(stream)

    # ---- news --------------------------------------------------------------------------------------------------

    def receive(self, message: ToApi, source: int) -> None:
        """Take in a message of the text side or of scheduler process `source`."""
        match message:
            case TextBatch() if source not in self._deaf:
                self._add_news(self._placed_elsewhere(message, source))
            case Heartbeat() | Reply():
                if (client := self.ranks.find(source)) is not None:
                    client.hear(message)
                elif isinstance(message, Heartbeat) and self._assembler is None and not self.ranks.all_restart:
                    self._text_beat_ns = message.sent_ns
            case TokenBatch():
                self._assemble(message, source)
            case TenantUse():
                for client in self.ranks.clients:
                    if client.source != source:
                        client.send(message)
            case Fenced():
                self._fenced.append(message)
                self._has_news.set()

    def _assemble(self, batch: TokenBatch, source: int) -> None:
        """Take in tokens where they become text in this process."""
        client = self.ranks.find(source)
        if client is None or self._assembler is None:
            return
        news, stops = self._assembler.step(batch, source)
        for stop in stops:
            client.send(stop)
        self._add_news(self._placed_elsewhere(news, source))

    def _placed_elsewhere(self, batch: TextBatch, source: int) -> TextBatch:
        """The news of scheduler process `source` without the ends of requests for which it had no room, but another
        rank may have; those are sent there.
        """
        if self.ranks.size == 1 or not batch.finished:
            return batch
        refused: dict[int, list[Finish]] = {}
        for finish in batch.finished:
            stream = self._streams.of_number(finish.number) if finish.cause in NO_ROOM else None
            if stream is not None and stream.client.source == source and not finish.first_token_ns:
                refused.setdefault(stream.number, []).append(finish)
        gone: set[int] = set()
        for number, ends in refused.items():
            stream = self._streams.of_number(number)
            if stream is not None and len(ends) == stream.answers and self._try_elsewhere(stream, ends[0]):
                gone.update(stream.numbers)
        batch.finished = [finish for finish in batch.finished if finish.number not in gone]
        return batch

    def _try_elsewhere(self, stream: Stream, end: Finish) -> bool:
        """Send a refused request to a rank that has not refused it; False if there is none."""
        stream.tried.add(stream.client.rank)
        client, place = self.ranks.choose(stream.request, without=stream.tried)
        if place is not None and client.rank in stream.tried:
            place.end()
            place = None
        if place is None:
            return False
        self.ranks.note_refusal(stream.answers, stream.prompt_tokens, rejected=end.cause != "displaced")
        self._place(stream, client, place)
        client.send(Submit(stream.request))
        if stream.paused:
            client.send(Pause(numbers=stream.numbers))
        return True

    def _add_news(self, batch: TextBatch) -> None:
        self._news.append(batch)
        self._has_news.set()

    async def _deliver(self) -> None:
        """Hand news to their streams until closed; all that came during one round is the next one."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            batches, self._news = self._news, []
            fenced, self._fenced = self._fenced, []
            awaiting, self._awaiting = self._awaiting, []
            try:
                for stream in await self._streams.deliver(batches):
                    stream.client.send(Cancel(stream.numbers, "the client reads too slowly", "slow_reader"))
                for one in fenced:
                    self._bring_back(one)
            except Exception:
                logger.exception("news from the engine could not be handed on")
            for told in awaiting:
                if not told.done():
                    told.set_result(None)
