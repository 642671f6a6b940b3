"""What gateways, autoscalers and operators ask of a pod: names of metrics, identity, readiness, drain, KV events."""

import re
import signal
import socket

import httpx2
import msgspec
import pytest
import zmq

from tests.e2e.servers import Server
from tests.e2e.test_life import Stream, wait_until
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
VLLM = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
SGLANG = ("num_running_reqs", "num_queue_reqs", "token_usage")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def first_events(server, endpoint):
    """The topic and the events of the first message that a subscriber gets, which joins at no certain time."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        for number in range(100):
            body = {"prompt": [*range(number, number + 40)], "max_tokens": 1}
            assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
            if subscriber.poll(500):
                topic, _, payload = subscriber.recv_multipart()
                return topic.decode(), msgspec.msgpack.decode(payload)[1]
    raise AssertionError("a subscriber hears nothing")


def test_the_contract_of_a_pod():
    events = f"tcp://127.0.0.1:{free_port()}"
    names = ("--metrics-compat", "vllm,sglang", "--kv-events-topic", "kv@{ip}:{port}@{model}")
    kv = ("--enable-kv-events", "--kv-events-endpoint", events)
    server = Server("--executor", "mock", "--mock-step-ms", "50", *kv, *names)
    try:
        topic, batch = first_events(server, events)
        assert topic == f"kv@{server.url.removeprefix('http://')}@tokenyard-demo"
        assert batch[0]["type"] in ("AllBlocksCleared", "BlockStored")
        text = httpx2.get(f"{server.url}/metrics").text
        for engine, names in (("vllm", VLLM), ("sglang", SGLANG)):
            for name in names:
                assert re.search(rf"^{engine}:{name}\{{", text, re.M), name
        # The few gauges that a gateway asks for many times a second.
        load = httpx2.get(f"{server.url}/metrics/load").text
        assert all(re.search(rf"^vllm:{name}\{{", load, re.M) for name in VLLM)
        info, again = (httpx2.get(f"{server.url}/server_info").json() for _ in range(2))
        assert {"version", "page_size", "dp_size"} <= info.keys()
        assert info["kv_events_endpoint"] == events
        assert info["boot_id"] == again["boot_id"] != ""
        assert httpx2.get(f"{server.url}/ready").status_code == 200
        stream = Stream(server, 40)
        assert stream.begun.wait(20)
        server.signal(signal.SIGTERM)
        # Not ready, alive, and open requests run to their end.
        assert wait_until(lambda: httpx2.get(f"{server.url}/ready").status_code == 503)
        assert httpx2.get(f"{server.url}/health").status_code == 200
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        stream.join(30)
        assert stream.text.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
    finally:
        server.process.kill()
