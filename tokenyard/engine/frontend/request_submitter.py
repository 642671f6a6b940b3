"""Submits requests to schedulers, and again to another one if the first is full."""

import asyncio

from tokenyard.base import Finish, Pause, Request, Submit
from tokenyard.engine.frontend.data_parallel_controller import DataParallelController
from tokenyard.engine.frontend.recent_requests import RecentRequests
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.frontend.streams import Stream, StreamTable
from tokenyard.engine.processes.messages import TextBatch
from tokenyard.routing.balance import Assignment

RETRIABLE_CAUSES = ("queue_full", "displaced", "tenant_limit")
"""Causes for which another rank may accept a refused request."""


class RequestSubmitter:
    """Sends requests to schedulers, and records where each is, in its stream and in the recent requests."""

    def __init__(self, ranks: DataParallelController) -> None:
        self.ranks = ranks
        self.streams = StreamTable()
        self.recent = RecentRequests()

    def submit(self, request: Request, rank: int | None) -> Stream:
        """Open a stream for a request and send it to a scheduler, that of `rank` if it can."""
        client, place = self.ranks.choose(request, rank)
        stream = Stream(request, client, place)
        self.streams.add(stream)
        self.recent.add(stream)
        if self.ranks.size > 1 and place is not None and not request.text.stream:
            asyncio.get_running_loop().call_later(place.expected_s(), place.first_token)
        client.send(Submit(request))
        return stream

    def move(self, stream: Stream, client: SchedulerClient, place: Assignment | None) -> None:
        """Record that a request is at this scheduler."""
        stream.detach()
        stream.client, stream.place = client, place
        self.recent.add(stream)

    def retry_refused(self, batch: TextBatch, source: int) -> TextBatch:
        """The output of scheduler process `source` without refused requests that another rank may accept; these
        are sent there.
        """
        if self.ranks.size == 1 or not batch.finished:
            return batch
        refused: dict[int, list[Finish]] = {}
        for finish in batch.finished:
            stream = self.streams.of_number(finish.number) if finish.cause in RETRIABLE_CAUSES else None
            if stream is not None and stream.client.source == source and not finish.first_token_ns:
                refused.setdefault(stream.number, []).append(finish)
        gone: set[int] = set()
        for number, ends in refused.items():
            stream = self.streams.of_number(number)
            if stream is not None and len(ends) == stream.answers and self._retry_elsewhere(stream, ends[0]):
                gone.update(stream.numbers)
        batch.finished = [finish for finish in batch.finished if finish.number not in gone]
        return batch

    def _retry_elsewhere(self, stream: Stream, end: Finish) -> bool:
        """Send a refused request to a rank that has not refused it; False if there is none."""
        stream.tried.add(stream.client.rank)
        client, place = self.ranks.choose(stream.request, without=stream.tried)
        if place is not None and client.rank in stream.tried:
            place.end()
            place = None
        if place is None:
            return False
        self.ranks.note_refusal(stream.answers, stream.prompt_tokens, rejected=end.cause != "displaced")
        self.move(stream, client, place)
        client.send(Submit(stream.request))
        if stream.paused:
            client.send(Pause(numbers=stream.numbers))
        return True
