"""A server whose model is divided among processes, on the demo model in float32."""

import json
import os
import signal
import socket
import urllib.request

import pytest

from tests.e2e.servers import Server, alive
from tokenyard.config import DEMO_MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there"),
]
FLAGS = ("--dtype", "float32", "--threads", "2")
BODY = {"prompt": "Alice was beginning", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


def post(server, **fields):
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(BODY | fields).encode())
    return urllib.request.urlopen(request, timeout=120)


def answer(server, **fields):
    with post(server, **fields) as reply:
        return json.load(reply)["choices"][0]["text"]


def tp_ranks(server):
    """The processes of the divided model, by data-parallel and tensor-parallel rank."""
    with urllib.request.urlopen(server.url + "/server_info", timeout=60) as reply:
        info = json.load(reply)
    groups = [group for state in info["internal_states"] for group in state["tp_ranks"].values()]
    return info["tp_size"], [[rank["pid"] for rank in group] for group in groups]


@pytest.mark.parametrize(
    ("form", "number", "victim"),
    [
        pytest.param("tp", signal.SIGKILL, 0, marks=pytest.mark.world),
        ("tp", signal.SIGSTOP, 1),
        ("pp", signal.SIGKILL, 1),
    ],
)
def test_a_stream_outlives_the_ranks_of_its_model(form, number, victim):
    server = Server(*FLAGS, f"--{form}-size", "2")
    try:
        groups = tp_ranks(server)[1]
        assert len(groups[0]) == 2
        expected = answer(server)
        text, hurt = "", False
        with post(server, stream=True) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) > 20 and not hurt:
                    hurt = True
                    os.kill(groups[0][victim], number)
        assert text == expected
        assert not any(alive(pid) for pid in groups[0])
        assert not {*tp_ranks(server)[1][0]} & {*groups[0]}
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as reply:
            rank = f'tokenyard_{form}_rank_step{{dp_rank="0",model="tokenyard-demo",{form}_rank="1"}}'
            assert rank.encode() in reply.read()
    finally:
        assert server.close() == 0
    if victim:
        why = "was killed by signal 9" if number == signal.SIGKILL else "is stalled"
        name = "tensor-parallel rank 1" if form == "tp" else "pipeline stage 0"
        assert f"{name} {why}, so all 2 ranks of the model end" in server.log


def test_groups_of_ranks_side_by_side():
    server = Server(*FLAGS, "--tp-size", "2", "--dp-size", "2")
    try:
        groups = tp_ranks(server)[1]
        assert [len(group) for group in groups] == [2, 2]
        assert answer(server, data_parallel_rank=0) == answer(server, data_parallel_rank=1)
    finally:
        assert server.close() == 0
    assert not any(alive(pid) for group in groups for pid in group)


def test_a_stream_outlives_the_ranks_that_share_mlps():
    server = Server(*FLAGS, "--enable-dp-attention", "--tp-size", "2", "--dp-size", "2")
    try:
        before = [group[0] for group in tp_ranks(server)[1]]
        expected = answer(server, data_parallel_rank=1)
        text, hurt = "", False
        with post(server, stream=True, data_parallel_rank=0) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) > 20 and not hurt:
                    hurt = True
                    os.kill(before[1], signal.SIGKILL)
        assert text == expected
        assert not {group[0] for group in tp_ranks(server)[1]} & {*before}
    finally:
        assert server.close() == 0
    assert "data-parallel rank 1 has gone, so all 2 ranks of the model end" in server.log


def test_a_model_that_cannot_be_divided_is_one_line():
    server = Server(*FLAGS, "--tp-size", "3", ready=False)
    assert server.wait() == 2
    assert server.log.count("--tp-size 3 does not divide the model's num_attention_heads of 8") == 1


LONG_S = 120.0
NODES = (*FLAGS, "--tp-size", "2", "--nnodes", "2", "--dist-init-addr")


def streamed(server, hurt, **fields):
    """The text of a stream; `hurt` is called while it runs."""
    text = ""
    with post(server, stream=True, **fields) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) > 20 and hurt is not None:
                    hurt()
                    hurt = None
    return text


def test_a_stream_outlives_the_ranks_of_another_node(monkeypatch):
    monkeypatch.setenv("TOKENYARD_DIST_SECRET", "s")
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
    server = Server(*NODES, address, ready=False)
    flags = Server(*NODES, address, "--node-rank", "1", "--page-size", "16", ready=False)
    with monkeypatch.context() as other:
        other.setenv("TOKENYARD_DIST_SECRET", "t")
        secret = Server(*NODES, address, "--node-rank", "1", ready=False)
    node = None
    try:
        for wrong, why in (
            (flags, "node 1 has --page-size 16, but node 0 has 1"),
            (secret, "the secret is another one"),
        ):
            assert wrong.wait(LONG_S) == 2
            assert why in wrong.log
        server.wait_for(f"waiting for node 1 at {address}", LONG_S)
        node = Server(*NODES, address, "--node-rank", "1", ready=False)
        server.url = server.wait_for(r"Tokenyard is ready at (\S+)", LONG_S)[1]
        expected = answer(server, max_tokens=60)
        pid = tp_ranks(server)[1][0][1]
        assert streamed(server, lambda: os.kill(pid, signal.SIGSTOP), max_tokens=60) == expected
        assert not alive(pid)
        server.wait_for("node 1: tensor-parallel rank 1 is stalled, so all 2 ranks of the model end")
        node.wait_for("tensor-parallel rank 1 is stalled, so all ranks of node 1 end")

        def replace_node():
            nonlocal node
            node.process.kill()
            node.wait()
            node = Server(*NODES, address, "--node-rank", "1", ready=False)

        assert streamed(server, replace_node, max_tokens=60) == expected
        server.wait_for("node 1 has gone, so all 2 ranks of the model end")
    finally:
        assert server.close() == 0
        assert node is None or node.wait(LONG_S) == 0
    assert "node 1 has ended" in node.log
