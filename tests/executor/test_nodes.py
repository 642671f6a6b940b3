"""A model over two nodes, both on this machine: how they meet, what they compute, and how they end together."""

import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.test_tensor_parallel import OPTIONS, assert_equal_bits, watch_logits
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError
from tokenyard.base.frames import HandshakeError
from tokenyard.executor.distributed import node_connection, remote_nodes
from tokenyard.executor.distributed.distributed_loader import load_executor
from tokenyard.executor.distributed.node_connection import (
    NodeEnded,
    NodeHeartbeat,
    NodePlan,
    open_node_connection,
    own_hello,
)
from tokenyard.executor.distributed.remote_nodes import MultiNodeConfig, wait_for_nodes
from tokenyard.executor.distributed.worker_node import WorkerNode
from tokenyard.executor.model_loader import load_executor as load_part

SIZES = {"max_total_tokens": 512, "max_pool_rows": 8, "page_size": 4}
LONG_S = 60.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def terms_of(number, port, **changes):
    given = {"count": 2, "host": "127.0.0.1", "secret": "s", "timeout_s": LONG_S, "weights": "w"}
    return MultiNodeConfig(number=number, port=port, **given | changes)


def both(left, right):
    """Run two functions at once; returns what each returned or raised."""
    found = {}

    def run(name, work):
        try:
            found[name] = work()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=pair) for pair in (("left", left), ("right", right))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return found["left"], found["right"]


class Recorder(socket.socket):
    """A socket that keeps the last message that it sent."""

    def sendall(self, data, *flags):
        self.last = bytes(data)
        super().sendall(data, *flags)


def ends(here="secret", there="secret", pair=None):
    """Both ends of a connection, or what came of the handshake."""
    left, right = pair or tcp_pair()
    return both(
        lambda: open_node_connection(left, own_hello(0), here.encode(), dialled=False),
        lambda: open_node_connection(right, own_hello(1), there.encode(), dialled=True),
    )


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as door:
        right = socket.create_connection(door.getsockname())
        return door.accept()[0], right


def test_messages_arrive_in_order_and_unsigned_ones_are_dropped():
    left, right = tcp_pair()
    right = Recorder(fileno=right.detach())
    (node_0, hello), (node_1, _) = ends(pair=(left, right))
    assert hello.node == 1
    node_1.send(NodePlan(b"a" * 100_000))
    node_1.send(NodeHeartbeat())
    assert [node_0.receive(), node_0.receive()] == [NodePlan(b"a" * 100_000), NodeHeartbeat()]
    right.sendall(right.last)
    with pytest.raises(HandshakeError, match="wrong signature"):
        node_0.receive()


def test_a_peer_with_another_secret_gets_the_reason():
    for error in ends(there="other"):
        assert isinstance(error, HandshakeError)
        assert error.message == "the secret is another one (TOKENYARD_DIST_SECRET)"


def test_a_peer_of_another_version_gets_the_reason():
    left, right = tcp_pair()
    here, there = both(
        lambda: open_node_connection(left, own_hello(0), b"", dialled=False),
        lambda: open_node_connection(
            right, node_connection.NodeHello("0.0.1", sys.byteorder, 1, b"n" * 32), b"", dialled=True
        ),
    )
    assert "it runs Tokenyard 0.0.1, this node runs" in here.message
    assert "this node runs 0.0.1" in there.message


def node_of(port, options=OPTIONS, number=1, path="", size=2, form="tensor", **changes):
    return WorkerNode(terms_of(number, port, **changes), path, options, form, size)


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        ({"options": OPTIONS | {"dtype": "bfloat16"}}, "node 1 has --dtype 'bfloat16', but node 0 has 'float32'"),
        ({"options": OPTIONS | {"max_pool_rows": 9}}, "node 1 has --max-running-requests 9, but node 0 has None"),
        ({"size": 4}, "node 1 has --tp-size 4, but node 0 has 2"),
        ({"form": "pipeline"}, "node 1 has --tp-size None, but node 0 has 2"),
        ({"weights": "v"}, r"node 1 has another model than node 0 \(--model-path\)"),
        ({"number": 2}, r"node 2 is not one of the nodes 1 to 1 \(--node-rank\)"),
        ({"secret": "other"}, r"the secret is another one \(TOKENYARD_DIST_SECRET\)"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_another_one_waited_for(node, complaint):
    terms = terms_of(0, free_port())
    facts = terms.facts(OPTIONS | {"threads": 3}, "tensor", 2)

    def come():
        with pytest.raises(ConfigError, match=complaint):
            node_of(terms.port, **node).run()
        node_of(terms.port).run()

    present, ended = both(
        lambda: [node.close(NodeEnded("")) or node.number for node in wait_for_nodes(terms, facts)], come
    )
    assert present == [1]
    assert ended is None


def test_connections_that_say_nothing_delay_no_node(monkeypatch):
    monkeypatch.setattr(node_connection, "HANDSHAKE_S", 10 * LONG_S)
    monkeypatch.setattr(remote_nodes, "MAX_OPENING", 4)
    terms = terms_of(0, free_port())
    silent = []

    def come():
        while len(silent) < 8:
            try:
                silent.append(socket.create_connection((terms.host, terms.port)))
            except OSError:
                time.sleep(0.01)
        node_of(terms.port).run()

    present, ended = both(
        lambda: [
            node.close(NodeEnded("")) or node.number
            for node in wait_for_nodes(terms, terms.facts(OPTIONS | {"threads": 3}, "tensor", 2))
        ],
        come,
    )
    assert present == [1]
    assert ended is None
    assert silent[0].recv(1 << 16), "node 0 says hello first"
    assert silent[0].recv(1) == b"", "the oldest of too many silent connections is closed"
    for sock in silent:
        sock.close()


def test_nodes_wait_for_each_other_only_so_long():
    port = free_port()
    with pytest.raises(EngineDeadError, match=rf"^node 1 did not come to 127.0.0.1:{port} within 0.05 s$"):
        wait_for_nodes(terms_of(0, port, timeout_s=0.05), {})
    with pytest.raises(EngineDeadError, match=rf"^node 0 did not come to 127.0.0.1:{port} within 0.05 s .*refused$"):
        node_of(port, timeout_s=0.05).run()


def test_a_port_that_is_taken_is_an_error_of_settings():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--dist-init-addr: node 0 cannot listen at 127.0.0.1:{port}: "):
            wait_for_nodes(terms_of(0, port), {})


class TwoNodes:
    """Node 0 in this thread, node 1 in another one; each rank of node 1 is a process."""

    def __init__(self, path, **changes):
        torch.set_num_threads(1)
        terms = terms_of(0, free_port())
        self.node = node_of(terms.port, OPTIONS | SIZES, path=path, timeout_s=0.5, **changes)
        self.ended, self.result = threading.Event(), None
        threading.Thread(target=self._follow, daemon=True).start()
        given = {name: getattr(terms, name) for name in MultiNodeConfig.__slots__}
        self.executor = load_executor(path, **{f"{self.flag}_size": 2}, nodes=given, **OPTIONS, **SIZES)

    @property
    def flag(self):
        return "tp" if self.node.form == "tensor" else "pp"

    def _follow(self):
        try:
            self.node.run()
        except EngineDeadError as error:
            self.result = error
        self.ended.set()


def serve(executor):
    """Chunks, mixed steps and decodes; returns the tokens of three answers and all logits."""
    seen, driver = watch_logits(executor), Driver(executor)
    sequences = [driver.start(prompt_of(length, seed=length)) for length in (5, 23, 40)]
    driver.prefill(sequences[1], chunk=7)
    driver.step((sequences[0], 5), (sequences[2], 16), (sequences[1], 1))
    return [driver.generate(sequence, 8) for sequence in sequences], seen


@pytest.mark.slow
def test_nodes_compute_what_threads_compute_and_a_rank_that_is_killed_ends_all(folder):
    nodes = TwoNodes(folder("llama"))
    executor, heard = nodes.executor, threading.Event()
    try:
        executor.on_lost(lambda why: heard.set())
        (found, seen), (judged, expected) = map(serve, (executor, load_virtual(folder("llama"), 2, **OPTIONS, **SIZES)))
        assert found == judged
        assert_equal_bits(seen, expected)
        while len(places := executor.describe_ranks()) < 2:
            assert not nodes.ended.is_set()
        assert places[1]["node"] == 1
        os.kill(places[1]["pid"], signal.SIGKILL)
        assert heard.wait(LONG_S)
        driver = Driver(executor)
        with pytest.raises(DeviceLostError, match=r"^node 1: tensor-parallel rank 1 was killed by signal 9$"):
            driver.generate(driver.start(prompt_of(9, seed=1)), 1)
        # Node 1 waits for node 0 again, which does not come.
        assert nodes.ended.wait(LONG_S)
        assert "node 0 did not come" in nodes.result.message
    finally:
        executor.close()


@pytest.mark.slow
def test_stages_on_two_nodes_are_the_model_and_end_on_request(folder):
    nodes = TwoNodes(folder("llama"), form="pipeline")
    try:
        (found, seen), (judged, expected) = map(
            serve, (nodes.executor, load_part(folder("llama"), model_impl="torch", **OPTIONS, **SIZES))
        )
        assert found == judged
        assert_equal_bits(seen, expected)
    finally:
        nodes.executor.close()
    assert nodes.ended.wait(LONG_S)
    assert nodes.result is None
