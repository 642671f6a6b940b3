"""Events of the prefix cache on the wire."""

import msgspec
import numpy as np
import pytest
import zmq

from tests.engine.calls import flush
from tests.engine.engines import watched_mock
from tests.engine.test_driver import ScriptedPort, submit
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.cache.kv_events import block_hashes, root_hash
from tokenyard.cache.radix import make_key
from tokenyard.engine.processes.driver import Driver
from tokenyard.engine.processes.event_loop import event_loop_normal
from tokenyard.engine.watch.kv_events import KvEventPublisher
from tokenyard.engine.watch.liveness import LoopState
from tokenyard.engine.watch.step_log import StepLog
from tokenyard.scheduler import Scheduler


class Kept:
    """A publisher that keeps what it is given."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events


def run(*groups, **settings):
    executor = watched_mock(step_ms=0.0, max_total_tokens=16, max_pool_rows=4)
    scheduler = Scheduler(SchedulerSettings(**settings), executor.info)
    kept = Kept()
    port = ScriptedPort(*groups)
    event_loop_normal(Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), kv_events=kept))
    return kept.events, port.tokens()


def test_what_enters_and_leaves_is_told_in_order():
    events, tokens = run([submit(1, range(2, 10))], [submit(2, range(20, 32))], [flush(1)], enable_kv_events=True)
    names = [event[0] for event in events]
    assert names[0] == names[-1] == "AllBlocksCleared"
    assert "BlockRemoved" in names, "the second request needs pages of the first"
    known = {}
    for name, *fields in events:
        if name == "BlockStored":
            hashes, parent, ids, size, adapter = fields
            assert (len(ids), size, adapter) == (len(hashes), 1, None)
            assert parent == root_hash("") or parent in known
            known |= dict(zip(hashes, ids, strict=True))
        elif name == "BlockRemoved":
            for one in fields[0]:
                del known[one]
        else:
            known.clear()
    assert known == {}
    stored = [one for event in events if event[0] == "BlockStored" for one in event[1]]
    whole = np.array([*range(2, 10), *tokens[1][:-1]], np.int32)
    assert set(block_hashes(make_key(whole), 1, root_hash(""))) <= set(stored)


def test_nothing_is_told_unless_asked_for():
    assert run([submit(1, range(2, 10))])[0] == []


def messages(subscriber):
    """Number, time, events and rank of each message that comes."""
    while True:
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv-events"
        yield int.from_bytes(number, "big"), *msgspec.msgpack.decode(payload)


def test_messages_are_numbered_and_reach_a_subscriber():
    publisher = KvEventPublisher("tcp://127.0.0.1:*")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv-")
        sent = 0
        while not subscriber.poll(20):  # a subscriber hears nothing until its connection stands
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
