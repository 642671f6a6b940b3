"""The tokenizer manager over several ranks without their processes: where it sends requests, and what answers cause."""

import asyncio

import numpy as np
import pytest

from tests.engine.engines import watched_mock
from tokenyard.base import (
    Finish,
    Pause,
    SamplingParams,
    SchedulerSettings,
    Started,
    Submit,
    TenantSettings,
    TenantUsage,
    TextOptions,
    TokenBatch,
)
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.messages import Heartbeat
from tokenyard.engine.text.chat_template import ChatTemplate
from tokenyard.routing.balance import RankBalancer


class Wires:
    """The way to each rank: what was sent there."""

    def __init__(self):
        self.sent = {}

    def connect(self, source):
        return self.sent.setdefault(source, []).append

    def disconnect(self, source):
        pass

    def fence(self, fence):
        pass

    def reset_detokenizer(self):
        pass

    def close(self):
        pass


def with_ranks(work, size=2, **settings):
    """Run `work(manager, sent)`; the process of rank r has number r."""

    async def main():
        wires = Wires()
        info = watched_mock(step_ms=0.0, max_total_tokens=1024).info
        balancer = RankBalancer("shortest_queue", size, 1024, SchedulerSettings(**settings))
        manager = TokenizerManager(
            info, None, ChatTemplate({}, {}), wires, assembler=TextAssembler(None), balancer=balancer
        )
        for rank in range(size):
            manager.failover.rank_ready(rank, rank)
            manager.outputs.receive(Heartbeat(2**62, "idle", 0, 0, {"counters": {"submitted": 1, "aborted": 1}}), rank)
        try:
            return await asyncio.wait_for(work(manager, wires.sent), 20)
        finally:
            await manager.close()

    return asyncio.run(main())


def spec(tokens=3, **options):
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateReqInput(input_ids=[5, 6, 7], sampling=sampling, text_options=TextOptions(stream=True), **options)


def asked(manager, **options):
    async def read():
        return [delta async for delta in manager.generate(spec(**options))]

    return asyncio.create_task(read())


def batch(number, tokens=(), *, started=False, finish=None, hit=0):
    count = len(tokens)
    begun = [Started(number, np.array([5, 6, 7], np.int32), TextOptions(stream=True), [], [])] if started else []
    columns = np.full(count, number, np.int64), np.array(tokens, np.int32), np.full(count, hit, np.int32)
    return TokenBatch(*columns, begun, [finish] if finish else [])


def submits(messages):
    return [message.request for message in messages if isinstance(message, Submit)]


def refusal(number, cause="queue_full"):
    return batch(number, finish=Finish(number, "abort", cause=cause, message="no room"))


@pytest.mark.parametrize("cause", ["queue_full", "tenant_limit", "displaced"])
def test_a_request_without_room_at_one_rank_goes_to_another(cause):
    async def work(manager, sent):
        reading = asked(manager)
        await asyncio.sleep(0.01)
        (request,) = submits(sent[0])
        manager.outputs.receive(refusal(request.number, cause), 0)
        assert submits(sent[1]) == [request]
        manager.outputs.receive(refusal(request.number, cause), 0)
        assert not reading.done(), "what the first rank says of it counts no more"
        manager.outputs.receive(batch(request.number, [9], started=True), 1)
        manager.outputs.receive(batch(request.number, finish=Finish(request.number, "length", completion_tokens=1)), 1)
        deltas = await reading
        assert (deltas[-1].finish.reason, deltas[0].token_ids) == ("length", [9])
        totals = (await manager.ranks.snapshot(0.001))["counters"]
        assert totals["submitted"] == totals["aborted"] == 2 - 1, "of all ranks' totals it counts once"

    with_ranks(work)


def test_a_request_that_no_rank_has_room_for_is_refused():
    async def work(manager, sent):
        reading = asked(manager)
        await asyncio.sleep(0.01)
        (request,) = submits(sent[0])
        for rank in (0, 1):
            manager.outputs.receive(refusal(request.number), rank)
        (end,) = await reading
        assert (end.finish.reason, end.finish.cause) == ("abort", "queue_full")
        assert [load.requests for load in manager.ranks.balancer.loads] == [0, 0]

    with_ranks(work)


def test_other_ends_are_passed_on_at_once():
    async def work(manager, sent):
        reading = asked(manager)
        await asyncio.sleep(0.01)
        (request,) = submits(sent[0])
        manager.outputs.receive(refusal(request.number, "invalid"), 0)
        assert (await reading)[-1].finish.cause == "invalid"
        assert not submits(sent[1])

    with_ranks(work)


def test_what_a_tenant_uses_is_sent_to_all_other_ranks():
    async def work(manager, sent):
        use = TenantUsage(["a"], [7], [9.0])
        manager.outputs.receive(use, 1)
        assert [sent[rank] for rank in range(3)] == [[use], [], [use]]

    with_ranks(work, 3)


def test_what_waits_for_a_rank_goes_elsewhere_when_it_is_given_up():
    async def work(manager, sent):
        readings = [asked(manager, tenant="small"), asked(manager, tenant="small", rid="held")]
        await asyncio.sleep(0.01)
        (home,) = (rank for rank in sent if submits(sent[rank]))
        first, held = submits(sent[home])
        manager.outputs.receive(batch(first.number, [8], started=True), home)
        await asyncio.sleep(0.01)
        manager.failover.rank_lost(home, "killed", suspect_user_code=False)
        await manager.pause_request("held")
        await asyncio.sleep(0.01)
        other = 1 - home
        assert not submits(sent[other])
        manager.failover.rank_abandoned(home)
        moved, waiting = submits(sent[other])
        assert (moved.number, moved.output_ids.tolist(), waiting.number) == (first.number, [8], held.number)
        assert Pause(numbers=[held.number]) in sent[other]
        for request in (moved, waiting):
            manager.outputs.receive(batch(request.number, [9], started=True), other)
            manager.outputs.receive(batch(request.number, finish=Finish(request.number, "length")), other)
        ends = [(await reading)[-1].finish.reason for reading in readings]
        assert ends == ["length", "length"]

    with_ranks(work, tenants={"small": TenantSettings(max_running=1)})


def test_first_token_and_hits_are_those_of_the_rank_that_began():
    async def work(manager, sent):
        reading = asked(manager)
        await asyncio.sleep(0.01)
        (request,) = submits(sent[0])
        manager.outputs.receive(batch(request.number, [8], started=True, hit=2), 0)
        await asyncio.sleep(0.01)
        manager.failover.rank_lost(0, "killed", suspect_user_code=False)
        await asyncio.sleep(0.01)
        (again,) = submits(sent[1])
        assert again.output_ids.tolist() == [8]
        manager.outputs.receive(batch(request.number, [9], started=True, hit=0), 1)
        end = Finish(request.number, "length", completion_tokens=2, first_token_ns=2**62, admitted_ns=2**62)
        manager.outputs.receive(batch(request.number, finish=end), 1)
        deltas = await reading
        assert [token for delta in deltas for token in delta.token_ids] == [8, 9]
        assert {delta.cached_tokens for delta in deltas} == {2}
        finish = deltas[-1].finish
        assert finish.cached_tokens == 2
        assert request.arrival_ns < finish.first_token_ns < 2**62
        assert finish.admitted_ns <= finish.first_token_ns

    with_ranks(work)
