"""Prefill and decode on different workers: SGLang's and vLLM's protocols, the ranks that each side gets, failures."""

import asyncio
import json

import pytest

from tests.router.fakes import DONE, LAST, STREAM_HEAD, FakeWorker, answer, event, routing
from tokenyard.base import ConfigError
from tokenyard.router.disagg_exchange import batch_size
from tokenyard.router.workers import HttpWorkers
from tokenyard.routing.load import TargetLoad
from tokenyard.routing.policies import PolicyOptions, RequestFeatures
from tokenyard.routing.registry import make_policy
from tokenyard.routing.workers import DECODE, PREFILL

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_port": 5600}


class Meeting:
    """Engines of SGLang: the decode engine answers once the prefill engine has been in the same room."""

    def __init__(self):
        self.rooms = {}

    def prefill(self, worker_dies=False):
        async def on_request(asked, writer):
            rooms = asked.json["bootstrap_room"]
            if worker_dies:
                writer.transport.abort()
                return True
            for room in rooms if isinstance(rooms, list) else [rooms]:
                self.rooms.setdefault(room, asyncio.Event()).set()
            writer.write(answer({"choices": []}))
            return True

        return on_request

    async def decode(self, asked, writer):
        rooms = asked.json["bootstrap_room"]
        for room in rooms if isinstance(rooms, list) else [rooms]:
            await self.rooms.setdefault(room, asyncio.Event()).wait()
        if asked.json.get("stream"):
            writer.write(STREAM_HEAD + event({"choices": [{"text": "hi"}]}) + DONE + LAST)
        else:
            writer.write(answer({"usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}))
        return True


def engine(role, ranks=1, **fields):
    info = {"disaggregation_mode": role, "dp_size": ranks, "max_total_num_tokens": 1000}
    return FakeWorker(role, info=info, owner="sglang", **fields)


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_both_halves_are_sent_at_once_with_a_bootstrap_room():
    async def main():
        meeting = Meeting()
        prefill, decode = engine(PREFILL, on_request=meeting.prefill()), engine(DECODE, on_request=meeting.decode)
        prefill.info["disaggregation_bootstrap_port"] = 7001
        async with prefill, decode, routing(prefill, decode) as (_, client):
            assert (await client.complete("once upon")).status == 200
            assert (await client.complete("once upon", stream=True)).body.endswith(b"data: [DONE]\n\n")
            for sent, got in zip(prefill.asked, decode.asked, strict=True):
                assert sent.json == got.json
                assert (sent.json["bootstrap_host"], sent.json["bootstrap_port"]) == ("127.0.0.1", 7001)
                assert 0 <= sent.json["bootstrap_room"] < 1 << 63
            assert (await client.ask("POST", "/v1/completions", {"prompt": ["a", "b"]})).status == 200
            batch = prefill.asked[-1].json
            assert [len(batch[f"bootstrap_{name}"]) for name in ("host", "port", "room")] == [2, 2, 2]
            listed = (await client.ask("GET", "/workers")).json["workers"]
            assert [worker["role"] for worker in listed] == [PREFILL, DECODE]

    run(main())


def test_ranks_are_sent_under_every_name():
    async def main():
        meeting = Meeting()
        prefill = engine(PREFILL, 4, on_request=meeting.prefill())
        decode = engine(DECODE, 3, on_request=meeting.decode)
        async with prefill, decode, routing(prefill, decode) as (_, client):
            for i in range(8):
                assert (await client.complete(f"prompt {i}")).status == 200
            for sent, got in zip(prefill.asked, decode.asked, strict=True):
                first, second = sent.json["data_parallel_rank"], got.json["data_parallel_rank_decode"]
                assert sent.json["routed_dp_rank"] == first == got.json["disagg_prefill_dp_rank"]
                assert (got.json["data_parallel_rank"], got.json["routed_dp_rank"]) == (first, second)
                assert sent.headers["x-data-parallel-rank"] == str(first)
                assert got.headers["x-data-parallel-rank"] == str(second)
                assert sent.json["bootstrap_room"] % 4 == first
                assert sent.json["bootstrap_room"] % 3 == second
            assert len({sent.json["data_parallel_rank"] for sent in prefill.asked}) > 1
            await client.complete("x", data_parallel_rank=2, data_parallel_rank_decode=1)
            assert prefill.asked[-1].json["data_parallel_rank"] == 2
            assert decode.asked[-1].json["data_parallel_rank_decode"] == 1
            assert (await client.complete("x", data_parallel_rank_decode=9)).error == "unknown_rank"
            assert (await client.complete("x", headers=["X-Data-Parallel-Rank: one"])).error == "invalid_rank"
            await client.complete("x", headers=["X-Data-Parallel-Rank: 3"])
            assert prefill.asked[-1].json["data_parallel_rank"] == 3

    run(main())


def test_the_client_cannot_send_the_decode_worker_elsewhere():
    async def main():
        meeting = Meeting()
        prefill, decode = engine(PREFILL, on_request=meeting.prefill()), engine(DECODE, on_request=meeting.decode)
        async with prefill, decode, routing(prefill, decode) as (_, client):
            assert (await client.complete("x", bootstrap_host="evil", bootstrap_room=1)).status == 200
            assert decode.asked[0].body.count(b"bootstrap_host") == 1
            assert decode.asked[0].json["bootstrap_host"] == "127.0.0.1"

    run(main())


def test_another_prefill_worker_takes_over_from_one_that_dies():
    async def main():
        meeting = Meeting()
        dying = engine(PREFILL, on_request=meeting.prefill(worker_dies=True))
        good, decode = engine(PREFILL, on_request=meeting.prefill()), engine(DECODE, on_request=meeting.decode)
        async with dying, good, decode, routing(dying, good, decode) as (router, client):
            for i in range(64):  # which of two free workers comes first is drawn
                assert (await client.complete(f"p {i}", stream=i % 2 == 0)).status == 200
                if dying.asked:
                    break
            assert dying.asked
            assert router.metrics.retries >= 1

    run(main())


def test_engines_of_ours_meet_at_the_port_of_the_rank_and_compute_alone_where_prefill_fails():
    async def main():
        meeting = Meeting()

        gone = False

        async def decode_half(asked, writer):
            if "bootstrap_room" in asked.json and not gone:
                return await meeting.decode(asked, writer)
            return False

        status = 503

        async def busy(asked, writer):
            writer.write(answer({}, status))

        ours = {"continues_output_ids": True, "disaggregation_bootstrap_port": 0}
        prefill = engine(PREFILL, 2, on_request=meeting.prefill())
        prefill.info |= {**ours, "disaggregation_bootstrap_ports": [7001, 7002]}
        decode = engine(DECODE, on_request=decode_half)
        decode.info |= ours
        async with prefill, decode, routing(prefill, decode) as (_, client):
            for _ in range(6):
                assert (await client.complete("x")).status == 200
            met = {(one.json["data_parallel_rank"], one.json["bootstrap_port"]) for one in prefill.asked}
            assert met == {(one.json["disagg_prefill_dp_rank"], one.json["bootstrap_port"]) for one in decode.asked}
            assert met <= {(0, 7001), (1, 7002)}
            prefill.on_request = busy
            for status in (503, 409):  # the second: its room is another request's, or was
                assert (await client.complete(f"y {status}")).json == {"worker": "decode"}
                assert "bootstrap_room" not in decode.asked[-1].json
            prefill.on_request = meeting.prefill(worker_dies=True)
            seen = len(decode.asked)
            dying = asyncio.create_task(client.complete("z"))
            while len(decode.asked) == seen:
                await asyncio.sleep(0.001)
            meeting.rooms[decode.asked[-1].json["bootstrap_room"]].set()
            assert (await dying).status == 200, "the decode engine's own business"
            gone = True
            await prefill.stop()
            assert [(await client.complete("z", stream=stream)).status for stream in (True, False)] == [200, 200]

    run(main())


@pytest.mark.parametrize("status", [400, 409, 503])
def test_a_refusal_that_comes_after_the_answer_began_changes_nothing(status):
    async def main():
        begun = asyncio.Event()

        async def late(asked, writer):
            await begun.wait()
            await asyncio.sleep(0.05)  # the answer arrives first
            writer.write(answer({}, status))
            return True

        async def alone(asked, writer):
            writer.write(STREAM_HEAD + event({"choices": [{"index": 0, "text": "hi"}], "token_ids": [7]}))
            begun.set()
            await asyncio.sleep(0.1)  # the refusal arrives
            writer.write(DONE + LAST)
            return True

        ours = {"continues_output_ids": True, "disaggregation_bootstrap_port": 7001}
        prefill, decode = engine(PREFILL, on_request=late), engine(DECODE, on_request=alone)
        prefill.info |= ours
        decode.info |= ours
        async with prefill, decode, routing(prefill, decode) as (_, client):
            got = await client.complete("x", stream=True)
            assert got.body.count(b"hi") == 1
            assert got.body.endswith(b"data: [DONE]\n\n")
            assert len(decode.asked) == 1

    run(main())


def test_without_a_prefill_worker_requests_wait():
    async def main():
        meeting = Meeting()
        decode = engine(DECODE, on_request=meeting.decode)
        async with decode, routing(decode, queue_timeout_secs=0.2) as (router, client):
            assert (await client.complete("x")).error == "queue_timeout"
            assert not decode.asked
            prefill = engine(PREFILL, on_request=meeting.prefill())
            async with prefill:
                waiting = asyncio.create_task(client.complete("x"))
                router.add_worker(prefill.url, "api")
                assert (await waiting).status == 200

    run(main())


def test_a_client_that_goes_ends_both_halves():
    async def main():
        async def never(asked, writer):
            await asyncio.Event().wait()

        prefill, decode = engine(PREFILL, on_request=never), engine(DECODE, on_request=never)
        async with prefill, decode, routing(prefill, decode) as (router, client):
            task = asyncio.create_task(client.complete("x"))
            while not (prefill.asked and decode.asked):
                await asyncio.sleep(0.005)
            task.cancel()
            while router.exchanges:
                await asyncio.sleep(0.005)

    run(main())


def vllm_pair(prefill_answer):
    async def prefill(asked, writer):
        writer.write(prefill_answer(asked))
        return True

    return FakeWorker("p", owner="vllm", on_request=prefill), FakeWorker("d", owner="vllm")


def handed_over(asked):
    return answer({"kv_transfer_params": PARAMS, "usage": {"prompt_tokens": 3}})


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_decodes_with_what_prefill_handed_over(stream):
    async def main():
        prefill, decode = vllm_pair(handed_over)
        async with prefill, decode, routing(ready=False) as (router, client):
            router.add_worker(prefill.url, "static", PREFILL)
            router.add_worker(decode.url, "static", DECODE)
            asked = {"max_completion_tokens": 9, "stream": stream, "stream_options": {"include_usage": True}}
            assert (await client.complete("x", **asked)).status == 200
            sent, got = prefill.asked[0].json, decode.asked[0].json
            assert (sent["max_tokens"], sent["max_completion_tokens"], sent["stream"]) == (1, 1, False)
            assert sent["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
            assert "stream_options" not in sent
            assert got["kv_transfer_params"] == PARAMS
            assert (got["max_completion_tokens"], got["stream"]) == (9, stream)

    run(main())


@pytest.mark.parametrize(
    "broken",
    [lambda asked: answer({}, 503), lambda asked: answer(b"no json"), lambda asked: b"HTTP/1.1 nonsense\r\n\r\n"],
)
def test_vllm_decodes_alone_where_prefill_fails(broken):
    async def main():
        prefill, decode = vllm_pair(broken)
        async with prefill, decode, routing(ready=False) as (router, client):
            router.add_worker(prefill.url, "static", PREFILL)
            router.add_worker(decode.url, "static", DECODE)
            assert (await client.complete("x")).json == {"worker": "d"}
            assert "kv_transfer_params" not in decode.asked[0].json

    run(main())


def test_what_the_prefill_worker_refuses_is_refused():
    async def main():
        prefill, decode = vllm_pair(lambda asked: answer({"error": {"code": "too_long"}}, 400))
        async with prefill, decode, routing(ready=False) as (router, client):
            router.add_worker(prefill.url, "static", PREFILL)
            router.add_worker(decode.url, "static", DECODE)
            got = await client.complete("x")
            assert (got.status, got.error) == (400, "too_long")
            assert not decode.asked

    run(main())


def test_roles_by_the_api():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            asked = {"url": "http://127.0.0.1:9", "role": "prefill"}
            assert (await client.ask("POST", "/workers", asked)).json["role"] == "prefill"
            wrong = await client.ask("POST", "/workers", {"url": "http://127.0.0.1:10", "role": "both"})
            assert wrong.status == 400
            assert (await client.complete("x")).json == {"worker": "w"}

    run(main())


def test_decode_goes_where_there_is_room_for_kv():
    policy = make_policy("kv_usage", PolicyOptions())
    small, large = TargetLoad("small", kv_tokens=1000), TargetLoad("large", kv_tokens=10_000)
    small.context_tokens, large.context_tokens = 300, 900
    assert policy.rank(RequestFeatures(100), [small, large]).order == [1, 0]
    small.kv_tokens = 0
    assert policy.rank(RequestFeatures(100), [small, large]).order == [0, 1], "without the sizes, by tokens in flight"


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [1, 2, 3]}, None),
        ({"input_ids": [[1], [2], [3]]}, 3),
        ({"messages": []}, None),
        ({"prompt": []}, None),
    ],
)
def test_batches(fields, prompts):
    assert batch_size(json.loads(json.dumps(fields))) == prompts


def test_an_unknown_role_is_refused():
    with pytest.raises(ConfigError, match="unknown worker role"):
        HttpWorkers.add(None, "http://a:1", "static", "both")
