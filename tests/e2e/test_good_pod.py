"""What gateways, autoscalers and operators ask of a pod: names of metrics, identity, readiness, drain, KV events."""

import re
import signal

import httpx2
import pytest

from tests.e2e.servers import Server
from tests.e2e.test_life import Stream, wait_until
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
VLLM = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
SGLANG = ("num_running_reqs", "num_queue_reqs", "token_usage")


def test_the_contract_of_a_pod():
    server = Server("--executor", "mock", "--mock-step-ms", "50", "--metrics-compat", "vllm,sglang")
    try:
        text = httpx2.get(f"{server.url}/metrics").text
        for engine, names in (("vllm", VLLM), ("sglang", SGLANG)):
            for name in names:
                assert re.search(rf"^{engine}:{name}\{{", text, re.M), name
        info = httpx2.get(f"{server.url}/server_info").json()
        assert {"version", "page_size", "dp_size", "kv_events_endpoint"} <= info.keys()
        assert httpx2.get(f"{server.url}/ready").status_code == 200
        stream = Stream(server, 40)
        assert stream.begun.wait(20)
        server.signal(signal.SIGTERM)
        # Not ready, alive, and what is open goes on to its end.
        assert wait_until(lambda: httpx2.get(f"{server.url}/ready").status_code == 503)
        assert httpx2.get(f"{server.url}/health").status_code == 200
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        stream.join(30)
        assert stream.text.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
    finally:
        server.process.kill()
