"""Schedulers as clients: events, calls and heartbeats of one, and how requests are shared out among several."""

import asyncio
import math
import time

import numpy as np
import pytest

from tokenyard.base import (
    Cancel,
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    Pause,
    RanksRemaining,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    TenantSettings,
)
from tokenyard.engine.frontend.data_parallel_controller import DataParallelController, merge_counters
from tokenyard.engine.frontend.failover import answers_so_far, continuation_requests
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.processes.messages import Fenced, Heartbeat, RpcReply
from tokenyard.routing.balance import RankBalancer


def beat(*, doing="idle", doing_ns=0, counters=None):
    return Heartbeat(time.monotonic_ns(), doing, doing_ns, 3, counters or {})


def client(rank=0, source=0):
    """A client, and the messages that go to its scheduler."""
    sent = []
    return SchedulerClient(sent.append, rank, source), sent


def test_a_call_gets_its_own_reply():
    async def main():
        one, sent = client()
        calls = [asyncio.create_task(one.call("explain", int | None, number=number)) for number in (5, 6)]
        await asyncio.sleep(0)
        assert [(call.verb, call.arguments) for call in sent] == [
            ("explain", {"number": 5}),
            ("explain", {"number": 6}),
        ]
        one.handle_message(RpcReply(sent[1].call_id, 60))
        one.handle_message(RpcReply(sent[0].call_id))
        one.handle_message(RpcReply(99, "not asked for"))
        assert await asyncio.gather(*calls) == [None, 60]

    asyncio.run(main())


def test_a_call_can_be_refused_or_lost():
    async def main():
        one, sent = client()
        refused = asyncio.create_task(one.call("set_policy", None, name="x", options={}))
        await asyncio.sleep(0)
        one.handle_message(RpcReply(sent[0].call_id, refusal="there is no x"))
        with pytest.raises(ConfigError, match="there is no x"):
            await refused
        with pytest.raises(OverloadedError, match=r"within 0\.01 s"):
            await one.call("snapshot", dict, timeout_s=0.01)
        open_call = asyncio.create_task(one.call("snapshot", dict))
        await asyncio.sleep(0)
        one.close(OverloadedError("gone"))
        with pytest.raises(OverloadedError, match="gone"):
            await open_call
        with pytest.raises(OverloadedError, match="gone"):
            await one.call("snapshot", dict)
        count = len(sent)
        one.send(Cancel([1]))
        assert len(sent) == count, "nothing goes to a scheduler that is gone"

    asyncio.run(main())


def test_heartbeats_carry_the_state_of_a_scheduler():
    one, _ = client()
    assert one.age_s(time.monotonic_ns()) == math.inf
    assert (one.counters, one.describe_heartbeat) == ({}, "nothing")
    one.handle_message(beat(counters={"running": 2}))
    assert one.age_s(time.monotonic_ns()) < 1.0
    assert one.counters == {"running": 2}
    for doing in ("host", "policy", "priority function"):
        one.handle_message(beat(doing=doing, doing_ns=5 * 10**9))
        assert one.age_s(time.monotonic_ns()) >= 5.0


def asked(number=1, *, prompt=(5, 6, 7), **options):
    return Request(number, f"r{number}", np.array(prompt, np.int32), SamplingParams(), **options)


def joined(size, method="shortest_queue", sources=None, **settings):
    """Ranks of which each has sent a heartbeat, and their clients by rank."""
    ranks = DataParallelController(RankBalancer(method, size, 4096, SchedulerSettings(**settings)))
    clients = [client(rank, 10 + rank)[0] for rank in range(size)]
    for one in reversed(clients):
        one.handle_message(beat())
        ranks.join(one)
    return ranks, clients


def test_a_request_goes_to_the_rank_with_the_fewest():
    ranks, clients = joined(3)
    assert ranks.clients == clients
    places = [ranks.choose(asked(number))[1] for number in range(9)]
    assert [place.rank for place in places] == [0, 1, 2] * 3
    places[1].end()
    places[1].end()
    assert ranks.choose(asked())[0] is clients[1]
    ranks.leave(11, OverloadedError("gone"), 0)
    assert ranks.choose(asked())[0] is not clients[1]
    assert ranks.leave(11, OverloadedError("gone"), 0) is None
    assert ranks.find(11) is None


def test_the_rank_that_is_asked_for_is_taken_and_an_unknown_one_is_refused():
    ranks, clients = joined(2)
    assert [ranks.choose(asked(), 1)[0] for _ in range(3)] == [clients[1]] * 3
    for wrong in (2, -1):
        with pytest.raises(InvalidRequestError, match=f"there is no rank {wrong}; .* 0 to 1"):
            ranks.check_rank(wrong)
    ranks.leave(11, OverloadedError("gone"), 0)
    assert ranks.choose(asked(), 1)[0] is clients[0], "better another one than none"
    with pytest.raises(InvalidRequestError, match="one rank, 0"):
        DataParallelController().check_rank(1)


def test_a_silent_rank_gets_no_new_requests_while_another_is_well():
    ranks, (silent, well) = joined(2)
    silent.heartbeat.sent_ns -= 10**10
    assert [ranks.choose(asked())[0] for _ in range(3)] == [well] * 3
    well.heartbeat.sent_ns -= 10**10
    assert ranks.choose(asked())[0] is silent
    assert ranks.ages_s(time.monotonic_ns())[0] > 9.0


def test_a_conversation_goes_where_its_prefix_is_until_that_rank_is_lost():
    ranks, _ = joined(4, "cache_aware")
    prompt = tuple(range(640))
    home, place = ranks.choose(asked(prompt=prompt))
    place.end()
    for number in range(2, 6):
        other = ranks.choose(asked(number, prompt=(number,) * 640))[1]
        other.end()
    assert ranks.choose(asked(9, prompt=(*prompt, 1, 2, 3)))[0] is home
    ranks.leave(home.source, OverloadedError("gone"), 0)
    ranks.join(home)
    assert ranks.choose(asked(9, prompt=(*prompt, 1, 2, 3)))[0] is not home, "its cache went with its process"


def test_an_urgent_request_sees_only_the_load_that_it_does_not_overtake():
    ranks, _ = joined(2, enable_priority_scheduling=True)
    for _ in range(3):
        ranks.choose(asked(priority=0), 0)
    urgent = [ranks.choose(asked(priority=9), 1)[1] for _ in range(2)]
    assert ranks.choose(asked(priority=9))[1].rank == 0
    assert ranks.choose(asked(priority=0))[1].rank == 1
    for place in urgent:
        place.end()
    assert ranks.choose(asked(priority=9))[1].rank == 1


def test_urgent_requests_share_out_evenly_whatever_else_is_there():
    """The bound: at most k // n of the k open requests that it does not overtake are at a request's rank."""
    ranks, _ = joined(3, enable_priority_scheduling=True)
    rng, places = np.random.default_rng(5), []
    for number in range(600):
        level = int(rng.choice([0, 0, 0, 5, 9]))
        at_least = [place.rank for other, place in places if other >= level]
        place = ranks.choose(asked(number, priority=level))[1]
        assert at_least.count(place.rank) <= len(at_least) // 3
        places.append((level, place))
        while len(places) > 40 or (places and rng.random() < 0.3):
            places.pop(int(rng.integers(len(places))))[1].end()


def test_limits_that_do_not_reach_all_ranks_keep_a_tenant_on_those_that_they_reach():
    ranks, clients = joined(4, tenants={"small": TenantSettings(max_running=2)})
    parts = ranks.balancer.may_serve(asked(tenant="small"))
    assert len(parts) == 2
    assert {ranks.choose(asked(tenant="small"))[0].rank for _ in range(8)} == set(parts)
    assert {ranks.choose(asked(tenant="other"))[0].rank for _ in range(16)} == {0, 1, 2, 3}
    for rank in parts:
        ranks.leave(clients[rank].source, OverloadedError("gone"), 0)
    waiting, place = ranks.choose(asked(tenant="small"))
    assert place is None
    waiting.send(Cancel([4]))
    other, sent = client(next(rank for rank in range(4) if rank not in parts), 31)
    ranks.join(other)
    assert sent == []
    again, sent = client(waiting.rank, 32)
    ranks.join(again)
    assert sent == [Cancel([4])]


def test_a_rank_that_is_given_up_leaves_its_share_to_the_others():
    ranks, clients = joined(2, tenants={"small": TenantSettings(max_running=1)}, max_queued_requests=5)
    (home,) = ranks.balancer.may_serve(asked(tenant="small"))
    ranks.leave(clients[home].source, OverloadedError("gone"), 0)
    absent, _ = ranks.choose(asked(tenant="small"))
    absent.send(Cancel([4]))
    assert ranks.remove_rank(home) == (absent, [Cancel([4])])
    client_left, place = ranks.choose(asked(tenant="small"))
    assert (client_left, place.rank) == (clients[1 - home], 1 - home)
    again, sent = client(1 - home, 31)
    ranks.join(again)
    assert sent == [RanksRemaining(1, 5)]


def test_what_comes_while_no_scheduler_runs_waits_for_the_next_one():
    ranks = DataParallelController()
    first, _ = client(0, 1)
    ranks.join(first)
    ranks.pause(Pause())
    ranks.leave(1, OverloadedError("gone"), time.monotonic_ns())
    assert ranks.choose(asked()) == (ranks.absent, None)
    assert ranks.age_s(time.monotonic_ns()) < 1.0
    ranks.absent.send(Cancel([4]))
    second, sent = client(0, 2)
    ranks.join(second)
    assert sent == [Pause(), Cancel([4])]
    ranks.pause(Resume())
    third, sent = client(1, 3)
    ranks.join(third)
    assert sent == []


def test_a_chosen_policy_is_sent_to_later_schedulers_unless_it_is_distrusted():
    async def main():
        ranks = DataParallelController()
        first, sent = client(0, 1)
        ranks.join(first)
        choosing = asyncio.create_task(ranks.set_policy("my:Policy", {"a": 1}))
        await asyncio.sleep(0.01)
        (call,) = sent
        first.handle_message(RpcReply(call.call_id))
        await choosing
        second, sent = client(1, 2)
        ranks.join(second)
        assert sent == [SetPolicy("my:Policy", {"a": 1})]
        ranks.drop_user_policy()
        third, sent = client(2, 3)
        ranks.join(third)
        assert sent == []

    asyncio.run(main())


def test_no_call_waits_for_a_restarting_scheduler():
    async def main():
        ranks = DataParallelController()
        with pytest.raises(OverloadedError, match="started again"):
            await ranks.call("flush", bool)
        assert await ranks.snapshot(1.0) == {}

    asyncio.run(main())


def test_counters_of_several_ranks_are_those_of_one_engine():
    alike = {"policy": "lpm", "paused": False}
    one = {"running": 2, "now": 5, "new_token_ratio": 0.5, "counters": {"steps": 3}} | alike
    other = {"running": 1, "now": 7, "new_token_ratio": 0.75, "counters": {"steps": 4}} | alike
    both = {"running": 3, "now": 7, "new_token_ratio": 0.625, "counters": {"steps": 7}} | alike
    assert merge_counters([one, other]) == both
    assert merge_counters([one]) == one
    assert merge_counters([]) == {}


def request(answers=1, output=()):
    sampling = SamplingParams(n=answers, seed=40, max_new_tokens=9)
    return Request(10, "r", np.array([1, 2], np.int32), sampling, output_ids=np.array(output, np.int32))


def test_a_request_that_has_not_begun_is_resubmitted_unchanged():
    whole = request(3)
    assert continuation_requests(whole, {0, 1, 2}, {}) == [whole]
    assert continuation_requests(whole, {0, 1, 2}, {11: []}) == [whole]


def test_answers_that_have_begun_continue_with_their_number_and_seed():
    parts = continuation_requests(request(3), {0, 2}, {12: [5, 6]})
    assert [(one.number, one.sampling.n, one.sampling.seed, one.output_ids.tolist()) for one in parts] == [
        (10, 1, 40, []),
        (12, 1, 42, [5, 6]),
    ]
    (kept,) = continuation_requests(request(output=[7]), {0}, {})
    assert kept.output_ids.tolist() == [7], "what it brought with it itself is not lost"
    (grown,) = continuation_requests(request(output=[7]), {0}, {10: [7, 8]})
    assert grown.output_ids.tolist() == [7, 8]


def test_tokens_are_distinguished_by_their_counts():
    fenced = Fenced(1, np.array([3, 5, 9]), np.array([2, 0, 1], np.int32), np.array([7, 8, 9], np.int32))
    assert answers_so_far(fenced) == {3: [7, 8], 5: [], 9: [9]}
