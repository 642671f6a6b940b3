"""A node other than node 0 of a model over several machines: it starts its ranks and forwards rank 0's messages.

It has no scheduler and no server. When any rank or node of the model ends, its ranks end, and it waits for node 0
again.
"""

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError
from tokenyard.base.frames import HandshakeError
from tokenyard.executor.distributed.child_ranks import END_TIMEOUT_S, ChildRanks
from tokenyard.executor.distributed.node_connection import (
    NodeConnection,
    NodeEnded,
    NodeHeartbeat,
    NodePlan,
    NodeRankReport,
    NodeSettings,
    NodeStatus,
    NodeWelcome,
    Refused,
    open_node_connection,
    own_hello,
)
from tokenyard.executor.distributed.partition import ParallelKind
from tokenyard.executor.distributed.process_group import Rendezvous
from tokenyard.executor.distributed.process_watch import HEARTBEAT_INTERVAL_S, ProcessWatch
from tokenyard.executor.distributed.rank_messages import AgreedNumPages, RankSetup
from tokenyard.executor.distributed.remote_nodes import MultiNodeConfig

logger = logging.getLogger(__name__)

RETRY_S = 0.2
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """A node and its part of the ranks.

    terms: how the nodes find each other.
    model_path: the model to load.
    options: those of `load_executor`, JSON values only.
    form: how the model is divided.
    size: the number of ranks of the model.
    """

    terms: MultiNodeConfig
    model_path: str
    options: dict[str, Any]
    form: ParallelKind
    size: int

    def run(self) -> None:
        """Compute what node 0 says until it says that all is over. Raises ConfigError where node 0 refuses this node,
        EngineDeadError if it does not come in time.
        """
        place = self.terms.place
        while True:
            link = self._dial()
            logger.info("node 0 is there at %s; waiting for all nodes", place)
            end = _Session(self, link).run()
            if end.wrong_settings:
                raise ConfigError(end.reason)
            if not end.reason:
                return
            logger.critical("%s, so all ranks of node %d end; waiting for node 0 again", end.reason, self.terms.number)

    def setups(self, link: NodeConnection, port: int) -> list[RankSetup]:
        """Return the first message to each rank of this node. port: where all ranks connect."""
        ranks = self.terms.ranks_of(self.terms.number, self.size)
        threads = self.options.get("threads") or torch.get_num_threads()
        options = self.options | {"threads": max(1, threads // len(ranks)), "nodes": self.terms.count}
        meeting = Rendezvous(host=self.terms.host, port=port, address=link.own_address)
        return [
            RankSetup(
                *(self.model_path, options, rank, self.size, os.getpid(), meeting),
                *(place, len(ranks) + 1, self.form),
            )
            for place, rank in enumerate(ranks, 1)
        ]

    def _dial(self) -> NodeConnection:
        """Connect to node 0, which may start later than this node."""
        terms, end_s = self.terms, time.monotonic() + self.terms.timeout_s
        logger.info("waiting for node 0 at %s", terms.place)
        while True:
            try:
                sock = socket.create_connection((terms.host, terms.port), CONNECT_S)
                link, hello = open_node_connection(sock, own_hello(terms.number), terms.secret.encode(), dialled=True)
                if hello.node:
                    raise HandshakeError(f"that is node {hello.node}")
                return link
            except HandshakeError as error:
                raise ConfigError(f"node 0 at {terms.place}: {error.message}") from error
            except (OSError, EOFError) as error:
                if time.monotonic() > end_s:
                    why = getattr(error, "strerror", None) or str(error)
                    raise EngineDeadError(
                        f"node 0 did not come to {terms.place} within {terms.timeout_s:g} s (dist-timeout-s): {why}"
                    ) from error
                time.sleep(RETRY_S)


class _Session:
    """One connection to node 0: the main thread reads its messages, and another thread watches the ranks."""

    def __init__(self, node: WorkerNode, link: NodeConnection) -> None:
        self._node, self._link = node, link
        self._children: ChildRanks | None = None
        self._reason = ""
        self._heard_ns = 0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="ranks of this node", daemon=True)

    def run(self) -> NodeEnded:
        """Follow node 0; returns why the session ended."""
        node = self._node
        end = NodeEnded("it was told to stop")
        try:
            self._link.send(NodeSettings(node.terms.facts(node.options, node.form, node.size)))
            end = self._follow()
            if self._reason:
                end = NodeEnded(self._reason)
        except (EOFError, OSError, HandshakeError, DeviceLostError) as error:
            gone = isinstance(error, EOFError | OSError)
            end = NodeEnded(self._reason or ("node 0 has gone" if gone else str(error)))
        finally:
            self._close(end)
        return end

    def _follow(self) -> NodeEnded:
        while True:
            message = self._link.receive()
            if isinstance(message, NodePlan):
                assert self._children is not None
                self._children.send(message.data)
            elif isinstance(message, NodeHeartbeat):
                if not self._heard_ns:
                    logger.info("all ranks have loaded, %s among them", ", ".join(self._names()))
                self._heard_ns = time.monotonic_ns()
            elif isinstance(message, AgreedNumPages):
                assert self._children is not None
                for child in self._children:
                    child.wire.send(message)
            elif isinstance(message, NodeWelcome):
                self._children = ChildRanks(self._node.setups(self._link, message.port), self._check)
                self._keeper.start()
            elif isinstance(message, Refused):
                return NodeEnded(f"node 0 refuses this node: {message.why}", wrong_settings=True)
            elif isinstance(message, NodeEnded):
                return NodeEnded(message.reason and f"node 0: {message.reason}", message.wrong_settings)
            else:
                raise HandshakeError(f"node 0 says what does not belong there: {type(message).__name__}")

    def _names(self) -> list[str]:
        return [child.name for child in self._children or ()]

    def _keep(self) -> None:
        """Forward the ranks' reports to node 0 while they start, and then their heartbeats."""
        assert self._children is not None
        try:
            # Each reports what it has loaded, and later that it is ready.
            for child in [*self._children, *self._children]:
                self._link.send(NodeRankReport(report := child.wait_report()))
                if report.failure:
                    return
            self._watch(self._children)
        except (EngineDeadError, ConfigError) as error:
            self._lose(error.message)
        except OSError:
            # The main thread has the reason.
            return

    def _watch(self, children: ChildRanks) -> None:
        watch = ProcessWatch()
        while not self._closing.wait(HEARTBEAT_INTERVAL_S):
            reason = children.check(watch)
            if watch.is_silent(self._heard_ns):
                reason = reason or "nothing is heard of node 0"
            if reason:
                self._lose(reason)
                return
            self._link.send(NodeStatus(children.describe()[1:]))

    def _lose(self, reason: str) -> None:
        """End this session from the thread that watches the ranks."""
        if self._closing.is_set():
            return
        self._reason = reason
        assert self._children is not None
        self._children.kill()
        self._link.leave(NodeEnded(reason))
        self._link.shut_down()

    def _check(self) -> None:
        if self._reason:
            raise DeviceLostError(self._reason)

    def _close(self, end: NodeEnded) -> None:
        """End the ranks: immediately, unless the session ended normally."""
        self._closing.set()
        if self._children is not None:
            if end.reason:
                self._children.kill()
            self._link.leave(end)
            if self._keeper.is_alive():
                self._keeper.join(END_TIMEOUT_S)
            self._children.close(0.0 if end.reason else END_TIMEOUT_S)
        self._link.close()
