"""The other nodes of a model over several machines, as rank 0 on node 0 sees them.

Node 0 listens while it waits for the others. Each of them (`worker_node`) proves that it knows the secret, sends
its settings, and starts its ranks when all nodes have connected. Their ranks load and report like rank 0's children.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenyard.base import ConfigError, EngineDeadError
from tokenyard.base.frames import HandshakeError
from tokenyard.executor.distributed.child_ranks import END_TIMEOUT_S, START_TIMEOUT_S
from tokenyard.executor.distributed.node_connection import (
    Message,
    NodeConnection,
    NodeEnded,
    NodeHello,
    NodeRankReport,
    NodeSettings,
    NodeStatus,
    Refused,
    open_node_connection,
    own_hello,
)
from tokenyard.executor.distributed.partition import ParallelKind
from tokenyard.executor.distributed.rank_messages import RankReport

logger = logging.getLogger(__name__)

OF_EACH_NODE = ("threads", "mem_fraction_static", "rank", "ranks", "nodes")
"""Options of `load_executor` that may differ between nodes."""

FLAG_OF_OPTION = {
    "max_pool_rows": "--max-running-requests",
    "seed": "--random-seed",
    "deterministic": "--enable-deterministic-inference",
    "draft_tokens": "--speculative-num-draft-tokens",
    "draft_model": "--speculative-draft-model-path",
    "lora_slots": "--max-loras-per-batch",
    "lora_rank": "--max-lora-rank",
}
WEIGHTS = "--model-path"
MAX_OPENING = 64
"""Connections to node 0 that have not proved yet that they know the secret."""


@dataclass(frozen=True, slots=True)
class MultiNodeConfig:
    """How the nodes of a model find each other.

    count: the number of nodes.
    number: the number of this node.
    host, port: where node 0 listens.
    secret: the secret that all nodes share.
    timeout_s: how long nodes wait for each other.
    weights: a digest of the model's weights, whose folder may differ between nodes.
    """

    count: int
    number: int
    host: str
    port: int
    secret: str
    timeout_s: float
    weights: str

    @property
    def place(self) -> str:
        """The address of node 0, as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def facts(self, options: dict[str, Any], form: ParallelKind, size: int) -> dict[str, Any]:
        """Return the settings that must be the same on all nodes, by flag."""
        flags = {FLAG_OF_OPTION.get(name, f"--{name.replace('_', '-')}"): value for name, value in options.items()}
        own = {f"--{name.replace('_', '-')}" for name in OF_EACH_NODE}
        shared = {flag: value for flag, value in flags.items() if flag not in own}
        division = {"--tp-size" if form == "tensor" else "--pp-size": size, "--nnodes": self.count}
        return division | shared | {WEIGHTS: self.weights}

    def ranks_of(self, node: int, size: int) -> range:
        """Return the ranks that a node has, of a model of `size` ranks."""
        each = size // self.count
        return range(node * each, (node + 1) * each)


class RemoteNode:
    """Another node that has connected. A thread receives its messages, and calls `on_ended` when it ends."""

    def __init__(self, number: int, link: NodeConnection) -> None:
        self.number, self.link = number, link
        self.reason = ""
        self.heard_ns = 0
        self.statuses: list[dict[str, Any]] = []
        self.on_ended: Callable[[str], None] = lambda reason: None
        self._reports: queue.SimpleQueue[RankReport | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name=f"node {number}", daemon=True)
        self._listener.start()

    def wait_report(self, name: str) -> RankReport:
        """Wait for the report of the next of its ranks while it starts. Raises EngineDeadError."""
        try:
            report = self._reports.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise EngineDeadError(f"{name} has not started within {START_TIMEOUT_S:g} s") from None
        if report is None:
            raise EngineDeadError(self.reason)
        return report

    def close(self, last: NodeEnded) -> None:
        """Send it a last message, and close the connection."""
        self.link.leave(last)
        self._listener.join(END_TIMEOUT_S)
        self.link.close()

    def _listen(self) -> None:
        try:
            while not self.reason:
                self._take(self.link.receive())
        except HandshakeError as error:
            self.reason = f"node {self.number} makes no sense: {error.message}"
        except (EOFError, OSError):
            self.reason = f"node {self.number} has gone"
        self._reports.put(None)
        self.on_ended(self.reason)

    def _take(self, message: Message) -> None:
        if isinstance(message, NodeRankReport):
            self._reports.put(message.report)
        elif isinstance(message, NodeStatus):
            self.statuses = message.ranks
        elif isinstance(message, NodeEnded):
            self.reason = f"node {self.number}: {message.reason}"
        else:
            raise HandshakeError(f"a {type(message).__name__} does not belong there")
        self.heard_ns = time.monotonic_ns()


def wait_for_nodes(terms: MultiNodeConfig, facts: dict[str, Any]) -> list[RemoteNode]:
    """Wait at node 0 for all other nodes; returns them by number.

    A node with another secret or other settings is refused, and the wait goes on. Raises ConfigError if node 0 cannot
    listen at the address, EngineDeadError if a node is late.
    """
    try:
        listener = socket.create_server(
            (terms.host, terms.port), family=socket.AF_INET6 if ":" in terms.host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(f"--dist-init-addr: node 0 cannot listen at {terms.place}: {error.strerror}") from error
    present: dict[int, RemoteNode] = {}
    end_s = time.monotonic() + terms.timeout_s
    try:
        with listener:
            door = _Door(listener, terms.secret.encode())
            while missing := _missing(terms, present):
                logger.info("waiting for node %s at %s", ", ".join(map(str, missing)), terms.place)
                opened = door.next(end_s - time.monotonic())
                if opened is None:
                    listener.shutdown(socket.SHUT_RDWR)
                    names = ", ".join(f"node {number}" for number in missing)
                    raise EngineDeadError(f"{names} did not come to {terms.place} within {terms.timeout_s:g} s")
                _admit(opened, terms, facts, present)
            # Closing alone does not wake the thread that accepts.
            listener.shutdown(socket.SHUT_RDWR)
    except BaseException:
        for node in present.values():
            node.close(NodeEnded("node 0 waits no longer for the other nodes"))
        raise
    return [present[number] for number in sorted(present)]


def _missing(terms: MultiNodeConfig, present: dict[int, RemoteNode]) -> list[int]:
    for number in [number for number, node in present.items() if node.reason]:
        del present[number]
    return [number for number in range(1, terms.count) if number not in present]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A connection of a node that knows the secret.

    address: the host that dialled.
    settings: what it would compute.
    """

    address: str
    link: NodeConnection
    hello: NodeHello
    settings: NodeSettings


class _Door:
    """Accepts connections while node 0 waits, and shakes hands with several at a time: one that says nothing delays no
    other. At most `MAX_OPENING` are open before they are authenticated; the oldest makes way.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._opened: queue.SimpleQueue[_Opened] = queue.SimpleQueue()
        self._opening: deque[socket.socket] = deque()
        threading.Thread(target=self._accept, name="nodes that connect", daemon=True).start()

    def next(self, timeout_s: float) -> _Opened | None:
        """The next connection of a node; None if there is none in time."""
        try:
            return self._opened.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            self._opening.append(sock)
            if len(self._opening) > MAX_OPENING:
                with suppress(OSError, IndexError):
                    self._opening.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._open, args=(sock, address[0]), name="handshake", daemon=True).start()

    def _open(self, sock: socket.socket, address: str) -> None:
        try:
            link, hello = open_node_connection(sock, own_hello(0), self._secret, dialled=False)
            settings = link.receive()
            if not isinstance(settings, NodeSettings):
                raise HandshakeError("it does not say what it would compute")
            self._opened.put(_Opened(address, link, hello, settings))
        except HandshakeError as error:
            logger.warning("refused a node at %s: %s", address, error.message)
            sock.close()
        except (EOFError, OSError):
            sock.close()
        finally:
            with suppress(ValueError):
                self._opening.remove(sock)


def _admit(opened: _Opened, terms: MultiNodeConfig, facts: dict[str, Any], present: dict[int, RemoteNode]) -> None:
    """Add a node to those present, or refuse it."""
    if why := _why_not(opened.hello, opened.settings, terms, facts, present):
        logger.warning("refused a node at %s: %s", opened.address, why)
        opened.link.leave(Refused(why))
        opened.link.close()
        return
    present[opened.hello.node] = RemoteNode(opened.hello.node, opened.link)


def _why_not(
    hello: NodeHello,
    settings: NodeSettings,
    terms: MultiNodeConfig,
    facts: dict[str, Any],
    present: dict[int, RemoteNode],
) -> str:
    """Return why a node is refused, "" if it is not."""
    name = f"node {hello.node}"
    for flag in [*facts, *(flag for flag in settings.values if flag not in facts)]:
        here, there = facts.get(flag), settings.values.get(flag)
        if here == there:
            continue
        if flag == WEIGHTS:
            return f"{name} has another model than node 0 ({WEIGHTS}): config or weights differ"
        return f"{name} has {flag} {there!r}, but node 0 has {here!r}"
    if not 0 < hello.node < terms.count:
        return f"{name} is not one of the nodes 1 to {terms.count - 1} (--node-rank)"
    if hello.node in present and not present[hello.node].reason:
        return f"{name} is there already (--node-rank)"
    return ""
