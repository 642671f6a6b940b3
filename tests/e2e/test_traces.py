"""Traces of a real server at a collector."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    bodies: list[bytes] = []  # noqa: RUF012

    def do_POST(self):
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_spans_reach_the_collector_by_the_end_of_the_server():
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server = Server("--executor", "mock", "--mock-step-ms", "1", "--otlp-traces-endpoint", endpoint)
        body = {"prompt": [5, 6], "max_tokens": 3, "rid": "traced"}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert server.close() == 0
        collector.shutdown()
    sent = b"".join(Collector.bodies)
    for word in (b"llm_request", b"prefill", b"traced"):
        assert word in sent
