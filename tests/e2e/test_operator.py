"""What an operator sees of a real server: JSON lines only, refusals, what it drains, where it listens."""

import json
import random
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from datetime import datetime
from pathlib import Path

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.base import SchedulerSettings
from tokenyard.config import DEMO_MODEL
from tokenyard.cost import get_profile
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.formats import read_trace

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
QUEUE, SEATS = 8, 8
SLO_MS = 800


def overload(server, requests, rate):
    """Send requests, `rate` a second; their statuses and true lengths by id."""
    rng, statuses, lengths = random.Random(7), {}, {}

    def ask(rid):
        body = {"prompt": [5] * 12, "max_tokens": lengths[rid], "ignore_eos": True, "rid": rid}
        body["slo"] = {"ttft_ms": SLO_MS, "tpot_ms": 50}
        statuses[rid] = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code

    threads = []
    for number in range(requests):
        lengths[f"r{number}"] = rng.randrange(60, 160)
        threads.append(threading.Thread(target=ask, args=(f"r{number}",)))
        threads[-1].start()
        threading.Event().wait(rng.expovariate(rate))
    for thread in threads:
        thread.join()
    return statuses, lengths


def share_met(server):
    counts = dict.fromkeys(("yes", "no"), 0.0)
    for line in httpx2.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("tokenyard_slo_requests_total"):
            counts["yes" if 'met="yes"' in line else "no"] += float(line.split()[-1])
    return counts["yes"] / sum(counts.values())


def share_simulated(path, **given):
    settings = SchedulerSettings(slo_ttft_ms=SLO_MS, slo_ttft_scale=0.0, slo_tpot_ms=50.0, max_in_flight=2, **given)
    setup = Setup(get_profile("a100", "llama-2-7b"), settings)
    return float(simulate(read_trace(path, "tokenyard-log"), setup).met.mean())


@pytest.mark.slow
def test_the_log_of_an_overloaded_server_gives_an_honest_plan(tmp_path):
    flags = ["--executor", "mock", "--cost-profile", "a100/llama-2-7b", "--log-requests", "--log-format", "json"]
    server = Server(*flags, "--max-running-requests", str(SEATS), "--max-queued-requests", str(QUEUE))
    # The log is longer than a pipe holds.
    reader = threading.Thread(target=server.wait_for, args=("stopped, with exit status",))
    reader.start()
    statuses, lengths = overload(server, 150, 40.0)
    served = share_met(server)
    server.signal(signal.SIGTERM)
    reader.join()
    assert server.wait() == 0
    refused = sum(status == 503 for status in statuses.values())
    assert refused > 75
    lines = [json.loads(line) for line in server.log.splitlines()]
    requests = [line for line in lines if line["logger"] == "tokenyard.requests"]
    assert sum(not line["complete"] for line in requests) == refused
    logs = {
        "honest": server.log.splitlines(),
        "naive": [json.dumps(line | {"complete": True}) for line in requests],
        "truth": [json.dumps(line | {"complete": True, "output_tokens": lengths[line["rid"]]}) for line in requests],
    }
    for name, text in logs.items():
        (tmp_path / name).write_text("\n".join(text))
    again = share_simulated(tmp_path / "honest", max_running_requests=SEATS, max_queued_requests=QUEUE)
    assert again == pytest.approx(served, abs=0.12)
    # How much would an engine serve that has more seats, and no limit on its queue?
    planned = {name: share_simulated(tmp_path / name, max_running_requests=2 * SEATS) for name in logs}
    assert planned["honest"] == pytest.approx(planned["truth"], abs=0.12)
    assert planned["naive"] > planned["truth"] + 0.3


def test_json_means_json_lines_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENYARD_LOG_FROMAT", "json")
    path = str(tmp_path / "yard.sock")
    mock = ["--executor", "mock", "--mock-step-ms", "20", "--log-format", "json"]
    server = Server(*mock, "--uds", path, "--max-running-requests", "1", "--max-queued-requests", "1")
    assert server.url == f"unix:{path}"
    client = httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://yard", timeout=60)
    answers = []

    def ask():
        answers.append(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 60, "ignore_eos": True}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_for("refused, as the queue is full")
    assert client.post("/v1/scheduler", json={"policy": "lpm"}).status_code == 200
    usage = [line for line in client.get("/metrics").text.splitlines() if line.startswith("tokenyard_process_cpu")]
    assert {line.split('"')[1] for line in usage} == {"api", "scheduler", "detokenizer"}
    server.process.terminate()
    for thread in threads:
        thread.join()
    assert server.close() == 0
    # Whether the first one runs before the others come is a matter of time.
    assert {answer.status_code for answer in answers} == {200, 503}
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines)
    messages = "\n".join(line["message"] for line in lines)
    for words in (
        "TOKENYARD_LOG_FROMAT is no setting; did you mean TOKENYARD_LOG_FORMAT",
        "the policy is now lpm",
        "open requests may run for 30 s more",
        "stopped, with exit status 0",
    ):
        assert words in messages
    assert not Path(path).exists()


@pytest.mark.slow
def test_an_address_that_is_taken_is_a_json_line_too():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = Server("--executor", "mock", "--log-format", "json", "--port", port, ready=False)
        assert server.wait() == 2
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert any("cannot listen on" in line["message"] and line["level"] == "critical" for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path):
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    made += ["-days", "1", "-subj", "/CN=yard", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    server = Server("--executor", "mock", "--ssl-certfile", certificate, "--ssl-keyfile", key)
    try:
        assert server.url.startswith("https://127.0.0.1:")
        body = {"prompt": "Once", "max_tokens": 4, "stream": True}
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, verify=trusted, timeout=30)
        assert answer.text.rstrip().endswith("data: [DONE]")
        for url in (server.url, server.url.replace("https", "http")):
            with pytest.raises(httpx2.TransportError):
                httpx2.get(f"{url}/health")
        assert httpx2.get(f"{server.url}/health", verify=trusted).status_code == 200
    finally:
        assert server.close() == 0
    mixed_up = Server("--executor", "mock", "--ssl-certfile", key, "--ssl-keyfile", certificate, ready=False)
    assert mixed_up.wait() == 2
    assert mixed_up.log.startswith("tokenyard: --ssl-certfile and --ssl-keyfile cannot be used")
