"""Publishes what enters and leaves the prefix cache, for routers that keep an index of it.

The wire format is the one that vLLM and SGLang use: ZeroMQ PUB frames [topic, sequence number (8 bytes, big-endian),
msgpack of [unix seconds, events, rank]]. A gap in the numbers means that a subscriber was too slow and lost events; the
first event of a server is that every block is gone.
"""

import time
from typing import Any

import msgspec
import zmq

from tokenyard.base import ConfigError
from tokenyard.engine.processes.config import EngineConfig

TOPIC = b"kv-events"
NUMBER_BYTES = 8


class KvEventPublisher:
    """A PUB socket. Publishing never waits: a subscriber that is too slow loses messages."""

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        """Raises ConfigError if the endpoint cannot be had."""
        self._rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-endpoint {endpoint}: {error}; choose another one") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[Any]) -> None:
        """Send the events of a step as one message; nothing for none."""
        if events:
            payload = self._encoder.encode([time.time(), events, self._rank])
            self._socket.send_multipart([TOPIC, self._number.to_bytes(NUMBER_BYTES, "big"), payload])
            self._number += 1

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        self._context.destroy(linger=0)


def open_kv_events(config: EngineConfig, rank: int = 0) -> KvEventPublisher | None:
    """The publisher that the settings ask for, if they do; rank r listens r ports above the endpoint's.

    Raises ConfigError if its endpoint cannot be had.
    """
    if not config.scheduler.enable_kv_events:
        return None
    endpoint = config.kv_events_endpoint
    host, colon, port = endpoint.rpartition(":")
    if rank and port.isdecimal() and int(port):
        endpoint = f"{host}{colon}{int(port) + rank}"
    return KvEventPublisher(endpoint, rank)
