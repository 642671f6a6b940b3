"""Events of caches over ZeroMQ, in the forms of vLLM and SGLang, and prompts as tokens."""

import asyncio
import socket

import msgspec
import numpy as np
import pytest
import zmq

from tests.router.fakes import FakeWorker, routing
from tokenyard.base import ConfigError
from tokenyard.base.blocks import block_digests
from tokenyard.cli.route import make_tokenize
from tokenyard.config import DEMO_MODEL
from tokenyard.engine.scheduler_process.attachments.kv_events import KvEventPublisher
from tokenyard.router.kv_event_subscriber import KvEventSubscriber, KvEventSubscriptions
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.prefix_index import PrefixIndex

TOKENS = list(range(128))
DIGESTS = block_digests(np.array(TOKENS, np.int32))
STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 64,
    "lora_id": None,
    "medium": "GPU",
}


def message(number, *events, rank=0, at_s=1.5):
    return [b"kv@pod@model", number.to_bytes(8, "big"), msgspec.msgpack.encode([at_s, list(events), rank])]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def _until(holds):
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


def test_the_index_follows_what_a_worker_publishes():
    async def main():
        publisher = zmq.Context.instance().socket(zmq.PUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        async with FakeWorker() as worker, routing(worker) as (router, client):
            events = KvEventSubscriptions(router, f"tcp://{{host}}:{port}")
            task = asyncio.create_task(events.run())
            name = str(router.workers.find("w0").url)
            number = 0

            async def publish(*parts):
                nonlocal number
                publisher.send_multipart(message(number, *parts))
                number += 1
                await asyncio.sleep(0.01)

            async with asyncio.timeout(5):
                while not router.index.blocks_of(name):
                    await publish(STORED)
            assert router.index.match(name, DIGESTS) == 2
            await publish(["BlockRemoved", [12]])
            await _until(lambda: router.index.match(name, DIGESTS) == 1)
            # A report of a restart comes late: what has been published since then stays known.
            for boot, known in (("one", 1), ("two", 1), ("three", 0)):
                router.workers.report(router.workers.find("w0"), {"boot_id": boot})
                assert router.index.match(name, DIGESTS) == known
            await publish(STORED)
            await _until(lambda: router.index.match(name, DIGESTS) == 2)
            await publish({"type": "AllBlocksCleared"})
            await _until(lambda: router.index.blocks_of(name) == 0)
            assert (await client.complete()).status == 200
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        publisher.close(linger=0)

    asyncio.run(main())


def test_sequence_numbers_that_restart_and_gaps():
    index = PrefixIndex(1 << 20)
    follower = KvEventSubscriber(index, "w")
    assert follower.missing(message(5, STORED)) is None
    assert KvEventSubscriber(index, "w", from_start=True).missing(message(5, STORED)) == 0
    follower.take(message(5, STORED))
    assert (follower.missing(message(6)), follower.missing(message(9))) == (None, 6)
    follower.take(message(9))
    assert index.match("w", DIGESTS) == 2
    follower.take(message(7, {"type": "AllBlocksCleared"}), replayed=True)
    assert index.match("w", DIGESTS) == 2, "a repeated event changes nothing"
    follower.take(message(0))
    assert index.match("w", DIGESTS) == 0


def test_after_a_restart_the_first_events_are_missing_whatever_the_wall_clock_shows():
    index = PrefixIndex(1 << 20)
    follower = KvEventSubscriber(index, "w", from_start=True)
    follower.take(message(5, STORED, at_s=9.5))
    assert follower.missing(message(3, at_s=1.5)) == 0
    assert index.match("w", DIGESTS) == 0
    for number, events in enumerate(([], [STORED], [], [])):
        follower.take(message(number, *events), replayed=True)
    follower.take(message(3))
    assert (index.match("w", DIGESTS), follower.missing(message(4))) == (2, None)


def test_what_was_missed_is_asked_for_again():
    async def main():
        ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        publisher = KvEventPublisher(ends[0], replay_endpoint=ends[1])
        publisher.publish([STORED])
        try:
            async with FakeWorker() as worker, routing(worker) as (router, _):
                events = KvEventSubscriptions(router, ends[0], ends[1])
                task = asyncio.create_task(events.run())
                name = str(router.workers.find("w0").url)
                await _until(lambda: router.index.match(name, DIGESTS) == 2)
                # A batch that was lost, and one that shows the gap.
                publisher.kept.append((1, msgspec.msgpack.encode([9e9, [{"type": "AllBlocksCleared"}], 0])))
                publisher.number = 2
                async with asyncio.timeout(5):
                    while router.index.match(name, DIGESTS):
                        publisher.publish([{"type": "BlockRemoved", "block_hashes": [99], "medium": "GPU"}])
                        await asyncio.sleep(0.02)
                assert events.gaps == 1
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"topic"],
        [b"t", b"short", b""],
        [b"t", bytes(8), b"\xc1 no msgpack"],
        [b"t", bytes(8), msgspec.msgpack.encode({"a": 1})],
        [b"t", bytes(8), msgspec.msgpack.encode([1.0, 5])],
        [b"t", bytes(8), msgspec.msgpack.encode([1.0, [None, 3, {}]])],
    ],
)
def test_junk_is_ignored(frames):
    index = PrefixIndex(1 << 20)
    KvEventSubscriber(index, "w").take(frames)
    assert index.bytes == 0


def test_a_follower_says_whether_a_message_was_news():
    follower = KvEventSubscriber(PrefixIndex(1 << 20), "w")
    assert follower.take(message(0, STORED))
    assert not follower.take(message(0, STORED), replayed=True)
    assert not follower.take([b"t", (1).to_bytes(8, "big"), b"\xc1 no msgpack"])
    assert not follower.take([b"t", (2).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, 5])])


def test_each_rank_has_its_own_port():
    async def main():
        async with FakeWorker(info={"dp_size": 2}) as worker, routing(worker) as (router, _):
            events = KvEventSubscriptions(router, "tcp://{host}:5557")
            targets = router.workers.find("w0").targets
            assert [events.endpoint(target) for target in targets] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
            for wrong in ("5557", "tcp://host", "ipc:///x:1"):
                with pytest.raises(ConfigError, match="give an endpoint"):
                    KvEventSubscriptions(router, wrong)

    asyncio.run(main())
    with pytest.raises(ConfigError, match="--tokenizer"):
        RouterSettings(kv_events="tcp://{host}:5557")


@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
def test_prompts_are_tokens_where_there_is_a_tokenizer():
    async def main():
        tokenize = make_tokenize(str(DEMO_MODEL))
        assert tokenize({"prompt": ["a", "b"]}) is None
        assert tokenize({"messages": [{"role": 5}]}) is None
        chat = tokenize({"messages": [{"role": "user", "content": "Tell me a story about a fox"}]})
        assert len(chat) > 5
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, tokenize=tokenize) as (router, client):
            first = await client.complete("a long story about a fox " * 60)
            assert (await client.complete("a long story about a fox " * 60 + "end")).json == first.json
            names = [str(worker.url) for worker in router.workers]
            expected = len(tokenize({"prompt": "a long story about a fox " * 60})) // 64
            assert max(map(router.index.blocks_of, names)) in (expected, expected + 1)
            asked = {"messages": [{"role": "user", "content": "a story " * 100}, {"role": "assistant", "content": "x"}]}
            assert (await client.ask("POST", "/v1/chat/completions", asked)).status == 200

    asyncio.run(main())
