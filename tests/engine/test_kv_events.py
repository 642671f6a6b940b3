"""Events of the prefix cache on the wire."""

import threading

import msgspec
import numpy as np
import pytest
import zmq

from tests.engine.engines import watched_mock
from tests.engine.test_driver import ScriptedPort, submit
from tests.engine.verb_calls import flush
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.cache.kv_events import block_hashes, root_hash
from tokenyard.cache.radix_cache import make_key
from tokenyard.engine.processes.messages import NO_REPLY, RpcRequest
from tokenyard.engine.scheduler_process.attachments.kv_events import (
    END,
    KEPT_BATCHES,
    KvEventPublisher,
    KvEvents,
    should_bind,
)
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.scheduler import Scheduler


class Kept:
    """A publisher that keeps what it is given."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events

    publish_snapshot = publish


def run(*groups, **settings):
    executor = watched_mock(step_ms=0.0, max_total_tokens=16, max_pool_rows=4)
    scheduler = Scheduler(SchedulerSettings(**settings), executor.info)
    kept = Kept()
    port = ScriptedPort(*groups)
    event_loop_normal(
        Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), attachments=[KvEvents(scheduler, kept)])
    )
    return kept.events, port.tokens()


def test_what_enters_and_leaves_is_published_in_order():
    events, tokens = run([submit(1, range(2, 10))], [submit(2, range(20, 32))], [flush(1)], enable_kv_events=True)
    names = [event["type"] for event in events]
    assert names[0] == names[-1] == "AllBlocksCleared"
    assert "BlockRemoved" in names, "the second request needs pages of the first"
    known = {}
    for event in events:
        if event["type"] == "BlockStored":
            hashes, parent, ids = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
            assert (len(ids), event["block_size"], event["lora_name"]) == (len(hashes), 1, None)
            assert parent is None or parent in known
            known |= dict(zip(hashes, ids, strict=True))
        elif event["type"] == "BlockRemoved":
            for one in event["block_hashes"]:
                del known[one]
        else:
            known.clear()
    assert known == {}
    stored = [one for event in events if event["type"] == "BlockStored" for one in event["block_hashes"]]
    whole = np.array([*range(2, 10), *tokens[1][:-1]], np.int32)
    assert set(block_hashes(make_key(whole), 1, root_hash(""))) <= set(stored)


def test_nothing_is_published_by_default():
    assert run([submit(1, range(2, 10))])[0] == []


def messages(subscriber):
    """Number, time, events and rank of each message that comes."""
    while True:
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv-events"
        yield int.from_bytes(number, "big"), *msgspec.msgpack.decode(payload)


def test_messages_are_numbered_and_reach_a_subscriber():
    publisher = KvEventPublisher("tcp://127.0.0.1:*", topic="kv-events")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv-")
        sent = 0
        while not subscriber.poll(20):  # a subscriber gets nothing until it is connected
            publisher.publish([["warm"]])
            sent += 1
        publisher.publish([])
        publisher.publish([["AllBlocksCleared"]])
        number, stamp, events, rank = next(one for one in messages(subscriber) if one[2] != [["warm"]])
        assert (number, events, rank) == (sent, [["AllBlocksCleared"]], 0)
        assert stamp > 0
    publisher.close()


def test_an_endpoint_that_is_taken_is_refused():
    publisher = KvEventPublisher("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="choose another one"):
        KvEventPublisher(publisher.endpoint)
    publisher.close()


def asked_again(publisher, number):
    """What a subscriber gets that asks for batches from `number` on: (number, events) each."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart([b"", number.to_bytes(8, "big")])
        found = []
        while True:
            _, topic, at, payload = socket.recv_multipart()
            if at == END:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((int.from_bytes(at, "big"), msgspec.msgpack.decode(payload)[1]))


def test_missed_events_can_be_replayed():
    asked = []
    publisher = KvEventPublisher(
        "tcp://127.0.0.1:*", topic="t", replay_endpoint="tcp://127.0.0.1:*", request_snapshot=lambda: asked.append(1)
    )
    try:
        assert asked_again(publisher, 0) == []
        for name in "abc":
            publisher.publish([name])
        assert asked_again(publisher, 1) == [(1, ["b"]), (2, ["c"])]
        assert asked_again(publisher, 3) == []
        assert asked == []
    finally:
        publisher.close()


def test_a_subscriber_too_far_behind_gets_a_full_replay():
    publisher = KvEventPublisher(
        "tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        request_snapshot=lambda: threading.Thread(
            target=publisher.publish_snapshot, args=(["cleared", "all"],)
        ).start(),
    )
    try:
        for number in range(KEPT_BATCHES + 5):
            publisher.publish([number])
        assert asked_again(publisher, 2) == [(KEPT_BATCHES + 5, ["cleared", "all"])]
        assert asked_again(publisher, 1 << 40)[0][1] == ["cleared", "all"], "a number of an earlier life"
    finally:
        publisher.close()


def test_a_driver_publishes_the_whole_cache_on_request():
    call = RpcRequest(NO_REPLY, "publish_kv_snapshot")
    events, _ = run([submit(1, range(2, 10))], [call], enable_kv_events=True)
    replayed = events[[event["type"] for event in events].index("AllBlocksCleared", 1) :]
    before = events[: -len(replayed)]
    assert [event for event in replayed if event["type"] == "BlockStored"]

    def held(some):
        stored = [event for event in some if event["type"] == "BlockStored"]
        return {pair for event in stored for pair in zip(event["block_hashes"], event["token_ids"], strict=True)}

    assert held(replayed) == held(before)


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://indexer.example:5557", False),
        ("tcp://10.0.0.7:5557", False),
    ],
)
def test_where_to_bind_and_where_to_connect(endpoint, own):
    assert should_bind(endpoint) is own
