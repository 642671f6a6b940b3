"""The streams that carry answers back: nothing lost, in order, merged where a reader is behind, bounded."""

import asyncio

import numpy as np
import pytest

from tests.engine.readers import TakingReader
from tokenyard.base import EngineDeadError, Finish, OverloadedError, Request, SamplingParams, TokenLogprobs
from tokenyard.engine.frontend import streams
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.frontend.streams import Stream, StreamTable
from tokenyard.engine.processes.messages import TextBatch


def batch(numbers, *, text="x", token=7, done=1, finished=(), logprobs=()):
    """A message with one token for each answer; `done` is how many each has then."""
    count = len(numbers)
    ones = np.ones(count, np.int32)
    return TextBatch(
        np.array(numbers, np.int64),
        [text] * count,
        ones,
        token * ones,
        done * ones,
        ones,
        list(finished),
        list(logprobs),
    )


def letters(number, text):
    """One message for each letter, with tokens 0, 1, 2...; the last one ends the answer."""
    end = [Finish(number, "length", completion_tokens=len(text))]
    return [
        batch([number], text=letter, token=place, done=place + 1, finished=end if place + 1 == len(text) else ())
        for place, letter in enumerate(text)
    ]


def opened(*answers):
    """A table with a stream for each count of answers."""
    table, found, number = StreamTable(), [], 1
    for count in answers:
        request = Request(number, f"r{number}", np.zeros(5, np.int32), SamplingParams(n=count))
        found.append(Stream(request, SchedulerClient(lambda message: None)))
        table.add(found[-1])
        number += count
    return table, found


def test_the_text_before_a_continued_answer_comes_with_its_first_delta_alone():
    async def main():
        table, (stream,) = opened(1)
        first, second = batch([1], text="a"), batch([1], text="b", done=2)
        first.said, second.said = [(1, "before")], [(1, "before a")]
        await table.deliver([first])
        assert (delta := stream.take()) is not None
        assert (delta.said, delta.text) == ("before", "a")
        await table.deliver([second])
        assert (delta := stream.take()) is not None
        assert (delta.said, delta.text) == ("", "b"), "a detokenizer that was started again repeats it"

    asyncio.run(main())


def test_batches_reach_their_own_stream_and_end_it():
    async def main():
        table, (one, two) = opened(2, 1)
        assert len(table) == 2
        ends = [Finish(3, "length"), Finish(1, "abort", cause="queue_full"), Finish(98, "stop")]
        await table.deliver([batch([3, 2, 99], finished=ends)])
        last = two.take()
        assert (last.text, last.index, last.prompt_tokens, last.finish.reason) == ("x", 0, 5, "length")
        assert two.take() is None
        assert not two.open_answers
        deltas = [one.take(), one.take()]
        causes = [(delta.index, delta.finish and delta.finish.cause) for delta in deltas]
        assert causes == [(1, None), (0, "queue_full")]
        assert one.open_answers == {1}
        table.remove(two)
        assert [stream.rid for stream in table.with_rid(None)] == ["r1"]
        assert table.with_rid("r3") == []

    asyncio.run(main())


def test_messages_that_come_together_make_one_delta_of_each_answer():
    async def main():
        table, (both, other) = opened(2, 1)
        scored = [[TokenLogprobs(1, place, place, -0.5, [], [])] for place in range(3)]
        end = [Finish(1, "length", completion_tokens=3)]
        await table.deliver(
            [
                batch([1, 2], text="a", token=0, done=1, logprobs=scored[0]),
                batch([1, 3], text="b", token=1, done=2, logprobs=scored[1]),
                batch([1], text="c", token=2, done=3, logprobs=scored[2], finished=end),
            ]
        )
        merged, second = both.take(), both.take()
        assert (merged.index, merged.text, merged.token_ids, merged.completion_tokens) == (0, "abc", [0, 1, 2], 3)
        assert [entry.position for entry in merged.logprobs] == [0, 1, 2]
        assert merged.finish is end[0]
        assert (second.index, second.text, second.token_ids, second.finish) == (1, "a", [0], None)
        assert (both.take(), both.open_answers) == (None, {1})
        assert other.take().text == "b"

    asyncio.run(main())


def test_a_detached_reader_gets_the_ends_it_has_not_read_and_is_then_removed():
    async def main():
        table, (stream,) = opened(3)
        await table.deliver([batch([3], finished=[Finish(3, "stop")])])
        assert stream.take().finish.reason == "stop"
        await table.deliver([batch([1], finished=[Finish(1, "length")])])
        reported = []
        table.detach(stream, reported.append)
        await table.deliver([batch([2], finished=[Finish(2, "abort", completion_tokens=4)])])
        assert [(delta.index, delta.finish.reason, delta.completion_tokens) for delta in reported] == [
            (0, "length", 1),
            (1, "abort", 4),
        ]
        await table.deliver([batch([2], finished=[Finish(2, "abort", completion_tokens=4)])])
        assert len(reported) == 2

    asyncio.run(main())


def test_the_end_of_an_answer_counts_even_if_its_stream_fails_before_it_is_read():
    async def main():
        table, (stream,) = opened(2)
        await table.deliver([batch([1], finished=[Finish(1, "length")])])
        stream.fail(OverloadedError("too slow"))
        reported = []
        table.detach(stream, reported.append)
        await table.deliver([batch([2], finished=[Finish(2, "stop")])])
        assert [(delta.index, delta.finish.reason) for delta in reported] == [(0, "length"), (1, "stop")]

    asyncio.run(main())


def test_the_ends_of_a_lost_scheduler_reach_those_who_wait_for_them_after_their_reader_left():
    async def main():
        table, (stream, other) = opened(2, 1)
        reported = []
        table.detach(stream, reported.append)
        other.client = SchedulerClient(lambda message: None)
        table.detach(other, reported.append)
        table.end_detached(stream.client, Finish(0, "abort", cause="failed"))
        ends = [(delta.index, delta.finish.number, delta.finish.cause, delta.prompt_tokens) for delta in reported]
        assert ends == [(0, 1, "failed", 5), (1, 2, "failed", 5)]
        await table.deliver([batch([1, 2, 3], finished=[Finish(number, "stop") for number in (1, 2, 3)])])
        assert [delta.finish.number for delta in reported[2:]] == [3]

    asyncio.run(main())


def test_a_reader_that_keeps_up_gets_every_message_by_itself():
    async def main():
        table, (stream,) = opened(1)
        read = []

        def take(delta):
            read.append((delta.text, delta.token_ids, delta.completion_tokens))

        feeding = asyncio.create_task(stream.feed(TakingReader(take)))
        await asyncio.sleep(0)
        for message in letters(1, "abc"):
            await table.deliver([message])
        await feeding
        assert read == [("a", [0], 1), ("b", [1], 2), ("c", [2], 3)]

    asyncio.run(main())


@pytest.mark.parametrize("stuck_at", ["a", "c", "f"])
def test_a_reader_that_has_to_wait_gets_the_rest_in_order_and_in_one_piece(stuck_at):
    async def main():
        table, (stream,) = opened(1)
        read = []

        def take(delta):
            read.append((delta.text, delta.token_ids))
            if delta.text == stuck_at:
                reader.free.clear()

        reader = TakingReader(take)
        feeding = asyncio.create_task(stream.feed(reader))
        await asyncio.sleep(0)
        for message in letters(1, "abcdef"):
            await table.deliver([message])
            await asyncio.sleep(0)
        place = "abcdef".index(stuck_at)
        assert [text for text, _ in read] == list("abcdef"[: place + 1])
        reader.free.set()
        await feeding
        rest = "abcdef"[place + 1 :]
        assert [text for text, _ in read[place:]] == [stuck_at, *filter(None, [rest])]
        assert [token for _, tokens in read for token in tokens] == [0, 1, 2, 3, 4, 5]

    asyncio.run(main())


def test_the_fault_of_a_reader_is_its_own():
    async def main():
        table, (bad, good) = opened(1, 1)
        read = []

        def fail(delta):
            raise ValueError(delta.text)

        readers = [TakingReader(fail), TakingReader(lambda delta: read.append(delta.text))]
        feeding = [asyncio.create_task(bad.feed(readers[0])), asyncio.create_task(good.feed(readers[1]))]
        await asyncio.sleep(0)
        assert await table.deliver([batch([1, 2], finished=[Finish(2, "length")])]) == []
        with pytest.raises(ValueError, match="x"):
            await feeding[0]
        await feeding[1]
        assert read == ["x"]

    asyncio.run(main())


def test_a_reader_that_is_cancelled_where_it_waits_reads_no_more():
    async def main():
        table, (stream,) = opened(1)
        reported = []

        def take(delta):
            reported.append(delta.text)
            reader.free.clear()

        reader = TakingReader(take)
        feeding = asyncio.create_task(stream.feed(reader))
        await asyncio.sleep(0)
        await table.deliver([batch([1], text="a")])
        await asyncio.sleep(0)
        feeding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding
        await table.deliver([batch([1], text="b")])
        assert reported == ["a"]

    asyncio.run(main())


def test_other_tasks_run_while_deltas_of_many_streams_arrive():
    async def main():
        table, many = opened(*[1] * 200)
        order = []

        async def deliver():
            assert await table.deliver([batch(range(1, 201)), batch(range(1, 201))]) == []
            order.append("delivered")

        async def probe():
            order.append("probed")

        await asyncio.gather(deliver(), probe())
        assert order == ["probed", "delivered"]
        assert [stream.take().text for stream in many] == ["xx"] * 200

    asyncio.run(main())


def test_a_reader_that_is_too_slow_loses_its_stream(monkeypatch):
    monkeypatch.setattr(streams, "MAX_PENDING_TOKENS", 3)

    async def main():
        table, (slow, other) = opened(1, 1)
        for _ in range(3):
            assert await table.deliver([batch([1])]) == []
        assert await table.deliver([batch([1, 2])]) == [slow]
        assert await table.deliver([batch([1, 2])]) == []
        with pytest.raises(OverloadedError, match="too slowly"):
            slow.take()
        assert other.take().text == "xx"

    asyncio.run(main())


def test_a_waiting_reader_gets_the_end_of_the_engine():
    async def main():
        table, (stream,) = opened(1)

        waiting = asyncio.create_task(stream.feed(TakingReader(pytest.fail)))
        await asyncio.sleep(0)
        table.fail_all(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await waiting

    asyncio.run(main())
