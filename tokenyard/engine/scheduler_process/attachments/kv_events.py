"""Publishes what enters and leaves the prefix cache, for routers that keep an index of it.

The wire format is the one that vLLM and SGLang use: ZeroMQ PUB frames [topic, sequence number (8 bytes, big-endian),
msgpack of [unix seconds, events, rank]], where events are maps. A gap in the numbers means that a subscriber was too
slow and lost events. It requests them from a ROUTER socket, starting at the first number that it lacks. If that one is
no longer kept, the reply is one batch with the whole state: all blocks cleared, then every block stored.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from tokenyard.base import ConfigError, TokenBatch
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.scheduler_process.attachments.base import Attachment, VerbHandler
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
HIGH_WATER = 100_000
KEPT_BATCHES = 10_000
MAX_SNAPSHOT_S = 5.0
"""How long a subscriber waits at most for the whole cache, which the scheduler tells between two steps."""

STOP_POLL_MS = 200
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
LOCAL_HOSTS = ("*", "0.0.0.0", "[::]", "::", "127.0.0.1", "localhost", "[::1]", "::1")
"""Hosts at which one binds; to any other one connects, as to an indexer that hears all engines."""

Batch = tuple[int, bytes]


def should_bind(endpoint: str) -> bool:
    """Whether an endpoint is one to bind to."""
    scheme, _, rest = endpoint.partition("://")
    return scheme != "tcp" or rest.rpartition(":")[0] in LOCAL_HOSTS


class KvEventPublisher:
    """A PUB socket. Publishing never waits: a subscriber that is too slow loses messages."""

    def __init__(
        self,
        endpoint: str,
        rank: int = 0,
        topic: str = "",
        replay_endpoint: str = "",
        request_snapshot: Callable[[], None] = lambda: None,
    ) -> None:
        """`request_snapshot`, called in another thread, asks for `publish_snapshot`. Raises ConfigError if an endpoint
        cannot be had.
        """
        self._rank, self._topic = rank, topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self.number = 0
        self.kept: deque[Batch] = deque(maxlen=KEPT_BATCHES)
        self._snapshot_number = -1
        self._lock = threading.Lock()
        self._snapshot_sent = threading.Condition(self._lock)
        self._replay: _Replay | None = None
        try:
            self._socket = self._open(zmq.PUB, endpoint, "--kv-events-endpoint")
            if replay_endpoint:
                socket = self._open(zmq.ROUTER, replay_endpoint, "--kv-events-replay-endpoint")
                self._replay = _Replay(socket, self._topic, lambda number: self._since(number, request_snapshot))
        except ConfigError:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """Where events can be asked for again, "" for nowhere."""
        return "" if self._replay is None else self._replay.endpoint

    def publish(self, events: list[Any]) -> None:
        """Send the events of a step as one message; nothing for none."""
        if events:
            self._send(events, is_snapshot=False)

    def publish_snapshot(self, events: list[Any]) -> None:
        """Send `events` that tell of the whole cache: the first one empties it."""
        self._send(events, is_snapshot=True)

    def close(self) -> None:
        """Close the sockets; what was not sent yet is dropped."""
        if self._replay is not None:
            self._replay.close()
        self._context.destroy(linger=0)

    def _open(self, kind: int, endpoint: str, flag: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        try:
            if should_bind(endpoint):
                socket.setsockopt(zmq.IPV6, "[" in endpoint)
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{flag} {endpoint}: {error}; choose another one") from error
        return socket

    def _send(self, events: list[Any], *, is_snapshot: bool) -> None:
        payload = self._encoder.encode([time.time(), events, self._rank])
        with self._lock:
            number, self.number = self.number, self.number + 1
            self.kept.append((number, payload))
            if is_snapshot:
                self._snapshot_number = number
                self._snapshot_sent.notify_all()
        self._socket.send_multipart([self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload])

    def _since(self, number: int, request_snapshot: Callable[[], None]) -> list[Batch]:
        """All batches from `number` on, or from a newer one that tells of the whole cache."""
        with self._lock:
            if number < (self.kept[0][0] if self.kept else self.number) or number > self.number:
                before = self._snapshot_number
                request_snapshot()
                self._snapshot_sent.wait_for(lambda: self._snapshot_number > before, MAX_SNAPSHOT_S)
                number = self._snapshot_number
            return [batch for batch in self.kept if batch[0] >= number >= 0]


class _Replay:
    """Answers subscribers that ask for events again, in its own thread. A request is [identity, "", number], an
    answer [identity, "", topic, number, payload] for each batch, and the number -1 at the end.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", topic: bytes, since: Callable[[int], list[Batch]]) -> None:
        self._socket, self._topic, self._since = socket, topic, since
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(STOP_POLL_MS):
                    self._answer(self._socket.recv_multipart())
            except zmq.ZMQError as error:
                logger.warning("a request for KV events failed: %s", error)

    def _answer(self, frames: list[bytes]) -> None:
        """What is no request is ignored."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
            return
        identity = frames[0]
        for number, payload in self._since(int.from_bytes(frames[2], "big")):
            answer = [identity, b"", self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload]
            self._socket.send_multipart(answer)
        self._socket.send_multipart([identity, b"", b"", END, b""])


class KvEvents(Attachment):
    """Publishes what enters and leaves the prefix cache of a scheduler."""

    name = "kv_events"
    optional = True

    def __init__(self, core: Core, publisher: KvEventPublisher) -> None:
        self._core = core
        self._publisher = publisher

    def sent(self, batch: TokenBatch) -> None:
        """Publish the events of a step."""
        self._publisher.publish(self._core.kv_records())

    def verbs(self) -> Mapping[str, VerbHandler]:
        """The replay thread asks for the whole cache."""
        return {"publish_kv_snapshot": self._publish_snapshot}

    def _publish_snapshot(self, now: int) -> None:
        self._publisher.publish_snapshot(self._core.kv_snapshot())


def open_kv_events(config: EngineConfig, rank: int, request_snapshot: Callable[[], None]) -> KvEventPublisher | None:
    """The publisher that the settings ask for, if they do; rank r listens r ports above the endpoint's.

    Raises ConfigError if its endpoint cannot be had.
    """
    if not config.scheduler.enable_kv_events:
        return None
    return KvEventPublisher(
        _rank_endpoint(config.kv_events_endpoint, rank),
        rank,
        config.kv_events_topic,
        _rank_endpoint(config.kv_events_replay_endpoint, rank),
        request_snapshot,
    )


def _rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: its port, or its path, is `rank` further."""
    host, colon, port = endpoint.rpartition(":")
    if rank and port.isdecimal() and int(port):
        return f"{host}{colon}{int(port) + rank}"
    return f"{endpoint}{rank}" if rank and endpoint.startswith("ipc://") else endpoint
