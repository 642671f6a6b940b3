"""Failover: when a process of the engine ends, its open requests continue elsewhere, or end with an error."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tokenyard.base import (
    Cancel,
    EngineDeadError,
    Finish,
    OverloadedError,
    Pause,
    Request,
    Resume,
    Submit,
    Update,
)
from tokenyard.base.request import NO_TOKENS
from tokenyard.engine.detokenizer.assembler import TextAssembler, ends_batch
from tokenyard.engine.frontend.outputs import OutputHandler
from tokenyard.engine.frontend.request_submitter import RequestSubmitter
from tokenyard.engine.frontend.scheduler_client import ProcessLink, SchedulerClient
from tokenyard.engine.processes.messages import Fence, Fenced, RpcRequest, ToScheduler

logger = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 10.0
"""How long the detokenizer may take to answer a `Fence`."""

CLIENT_GONE = Finish(0, "abort", message="the client went away", cause="client_gone")
"""The finish of a detached answer whose scheduler has ended."""

MAX_RESUBMITS = 3
"""A request whose scheduler ends once more is failed, as it may be the cause."""


class Failover:
    """Is notified when processes start and end. Used from one event loop.

    Other schedulers continue the requests of one that ends (see `rank_lost`).

    assembler: set if token ids become text in this process.
    on_engine_dead: called with the reason if the engine ends unexpectedly, after all open requests have ended.
    on_detokenizer_silent: called with the reason if the detokenizer does not answer and must be killed.
    """

    def __init__(
        self,
        submitter: RequestSubmitter,
        outputs: OutputHandler,
        link: ProcessLink,
        assembler: TextAssembler | None,
        on_engine_dead: Callable[[str], None],
        on_detokenizer_silent: Callable[[str], None],
    ) -> None:
        self.death: str | None = None
        """Why the engine has ended; None while it runs."""

        self._submitter = submitter
        self._ranks = submitter.ranks
        self._streams = submitter.streams
        self._outputs = outputs
        self._link = link
        self._assembler = assembler
        self._on_engine_dead = on_engine_dead
        self._on_detokenizer_silent = on_detokenizer_silent
        self._lost: dict[int, tuple[SchedulerClient, asyncio.TimerHandle]] = {}
        outputs.on_fenced = self._resubmit

    def rank_ready(self, rank: int, source: int) -> None:
        """A scheduler process runs; requests may go there, and those that have waited for one do."""
        client = SchedulerClient(self._link.connect(source), rank, source)
        self._ranks.join(client)
        for absent in (self._ranks.absent, self._ranks.absent_rank(rank)):
            for stream in self._streams.of(absent):
                place = self._ranks.balancer.choose(stream.request, [rank], time.monotonic())
                self._submitter.move(stream, client, place)

    def rank_lost(self, source: int, reason: str, *, suspect_user_code: bool) -> None:
        """A scheduler process has ended. Its requests continue elsewhere, each after its last received token.

        First the text side reports how far they are (`Fence`), so that no token is repeated or missed. With
        `suspect_user_code`, a user-defined policy that was set while it ran may be the cause, and is not set again.
        """
        error = OverloadedError(f"the scheduler ended ({reason}) and is started again; retry later")
        client = self._ranks.leave(source, error, time.monotonic_ns())
        if client is None or self.death is not None:
            return
        self._link.disconnect(source)
        if suspect_user_code:
            self._ranks.drop_user_policy()
        fence = Fence(source, self._resumable_numbers(client, reason))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(FENCE_TIMEOUT_S, self._on_detokenizer_silent, "the detokenizer does not answer")
        self._lost[source] = client, timer
        if self._ranks.all_restarting:
            self._resubmit_from_streams(source)
        elif self._assembler is None:
            self._link.fence(fence)
        else:
            self._outputs.receive(self._assembler.fence(fence), source)

    def _resumable_numbers(self, client: SchedulerClient, reason: str) -> list[int]:
        """The open answers of a scheduler that has ended, without those of requests that are given up, which end."""
        numbers: list[int] = []
        for stream in self._streams.of(client):
            stream.resubmits += 1
            if stream.resubmits <= MAX_RESUBMITS or self._ranks.all_restarting:
                numbers += stream.open_numbers
                continue
            message = f"the scheduler ended {stream.resubmits} times while this request was there: {reason}"
            ends = [Finish(number, "abort", message=message, cause="failed") for number in stream.open_numbers]
            self._outputs.add(ends_batch(ends))
        return numbers

    def _resubmit(self, fenced: Fenced) -> None:
        """Resubmit the requests of a scheduler that has ended."""
        if fenced.source not in self._lost:
            return
        lost, timer = self._lost.pop(fenced.source)
        timer.cancel()
        # All output before the fence is delivered, so answers that are still open get no finish from this scheduler.
        self._streams.end_detached(lost, CLIENT_GONE)
        streams = self._streams.of(lost)
        tokens_by_number = {
            number: tokens for stream in streams for number, tokens in stream.delivered_tokens.items()
        } | answers_so_far(fenced)
        for stream in streams:
            client, place = self._ranks.choose(stream.request)
            self._submitter.move(stream, client, place)
            for request in continuation_requests(stream.request, stream.open_answers, tokens_by_number):
                client.send(Submit(request, accepted=True))
            if stream.paused:
                client.send(Pause(numbers=stream.numbers))
        if streams:
            logger.warning("%d requests continue after their scheduler ended", len(streams))

    def rank_abandoned(self, rank: int) -> None:
        """A rank is abandoned. Requests that wait for it go to others, in the same order."""
        absent, events = self._ranks.remove_rank(rank)
        for event in events:
            stream = self._streams.of_number(first_number(event))
            if stream is None or isinstance(event, RpcRequest):
                continue
            if stream.client is absent:
                self._submitter.move(stream, *self._ranks.choose(stream.request))
            stream.client.send(event)
        self._streams.end_detached(absent, CLIENT_GONE)

    def detokenizer_lost(self) -> None:
        """The detokenizer has ended; the state of all texts and some output of the schedulers are lost. The
        schedulers restart too; requests continue from the tokens that this process has received.
        """
        self._ranks.all_restarting = True
        self._outputs.detokenizer_lost()
        self._link.reset_detokenizer()
        for source in self._lost:
            self._resubmit_from_streams(source)

    def detokenizer_ready(self) -> None:
        """A detokenizer runs again."""
        self._ranks.all_restarting = False

    def _resubmit_from_streams(self, source: int) -> None:
        """Resubmit after the loss of the detokenizer: the tokens that arrived here count."""
        self._outputs.ignore(source)
        self._outputs.receive(unknown_progress(source), source)

    def check_alive(self) -> None:
        """Raise EngineDeadError once the engine has ended."""
        if self.death is not None:
            raise EngineDeadError(f"the engine stopped: {self.death}")

    def engine_dead(self, reason: str) -> None:
        """End everything that is open with EngineDeadError, and refuse everything from now on."""
        if self.death is None:
            logger.critical("the engine stopped: %s", reason)
            self.end_all(reason)
            self._on_engine_dead(reason)

    def end_all(self, reason: str) -> None:
        """Do the same for a shutdown, without a callback."""
        self.death = self.death or reason
        error = EngineDeadError(f"the engine stopped: {self.death}")
        self._streams.fail_all(error)
        self._ranks.close(error)
        for _, timer in self._lost.values():
            timer.cancel()


def answers_so_far(fenced: Fenced) -> dict[int, list[int]]:
    """The output tokens of each answer that has begun, by number."""
    tokens, tokens_by_number, start = fenced.tokens.tolist(), {}, 0
    for number, count in zip(fenced.numbers.tolist(), fenced.token_counts.tolist(), strict=True):
        tokens_by_number[number] = tokens[start : start + count]
        start += count
    return tokens_by_number


def unknown_progress(source: int) -> Fenced:
    """The `Fenced` of a detokenizer that has ended: no answer is known."""
    return Fenced(source, np.empty(0, np.int64), NO_TOKENS, NO_TOKENS)


def first_number(event: ToScheduler) -> int:
    """The number of the answer that an event for a scheduler is about, or of the first one; 0 for none."""
    match event:
        case Submit():
            return event.request.number
        case Update():
            return event.number
        case Cancel() | Pause() | Resume():
            return event.numbers[0] if event.numbers else 0
    return 0


def continuation_requests(
    request: Request, open_answers: Collection[int], tokens_by_number: Mapping[int, Sequence[int]]
) -> list[Request]:
    """The requests that bring the answers with these indices to their end, with the same tokens as without the break.

    It is the request itself while none of its answers has begun or ended: they share what they compute. Otherwise each
    open answer becomes a separate request with its own number and seed.
    """
    numbers = {index: request.number + index for index in sorted(open_answers)}
    if len(numbers) == request.sampling.n and not any(tokens_by_number.get(number) for number in numbers.values()):
        return [request]
    return [_answer(request, index, tokens_by_number.get(number, ())) for index, number in numbers.items()]


def _answer(request: Request, index: int, tokens: Sequence[int]) -> Request:
    return replace(
        request,
        number=request.number + index,
        sampling=replace(request.sampling, n=1, seed=request.sampling.seed + index),
        output_ids=np.array(tokens, dtype=np.int32) if tokens else request.output_ids,
        text=replace(request.text, shown=-1) if tokens else request.text,
    )
