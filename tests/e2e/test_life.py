"""Start, drain, death and hang-ups of a real server with the mock executor."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from tests.e2e.servers import Server, alive
from tests.server.sse import events
from tokenyard.config import DEMO_MODEL
from tokenyard.engine.processes import child

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
SLOW = ["--executor", "mock", "--mock-step-ms", "50"]


@pytest.fixture(scope="module")
def steady_server():
    """For tests that leave it as they found it."""
    server = Server(*SLOW)
    yield server
    assert server.close() == 0


@pytest.fixture
def slow_server():
    """For tests that end it."""
    server = Server(*SLOW, "--shutdown-timeout", "20")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.wait()


def wait_until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def running(server):
    load = httpx2.get(f"{server.url}/v1/loads").json()["data"][0]
    return load["running_requests"] + load["queued_requests"]


class Stream(threading.Thread):
    """Reads one streamed completion in the background."""

    def __init__(self, server, tokens):
        super().__init__(daemon=True)
        self._body = {"prompt": "Hello there", "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": 5}
        self._url = server.url
        self.text = ""
        self.begun = threading.Event()
        self.start()

    def run(self):
        with httpx2.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()


@pytest.mark.slow
def test_a_model_on_the_cpu_yields_to_the_rest_of_the_server():
    server = Server("--threads", "2")
    try:
        niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (*server.children(), server.process.pid)]
        scheduler, detokenizer, api = niceness
        assert detokenizer == api
        assert scheduler == min(api + child.MODEL_NICE, 19)
    finally:
        server.close()


def test_probes_and_the_box(steady_server):
    assert httpx2.get(f"{steady_server.url}/health").status_code == 200
    assert httpx2.get(f"{steady_server.url}/ready").status_code == 200
    assert httpx2.get(f"{steady_server.url}/health_generate").status_code == 200
    for word in ("URL", "Model", "KV tokens", "Policy", "Device"):
        assert word in steady_server.log


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_place(steady_server, stream):
    body = json.dumps({"prompt": "Hello there", "max_tokens": 900, "stream": stream, "ignore_eos": True}).encode()
    host, port = steady_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: running(steady_server) == 1)
    assert wait_until(lambda: running(steady_server) == 0, timeout_s=3.0)


@pytest.mark.slow
def test_the_address_of_the_box_can_be_called():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = Server("--executor", "mock", "--host", "::1")
    try:
        assert httpx2.get(f"{server.url}/health").status_code == 200
    finally:
        server.close()


def test_first_signal_drains(slow_server):
    stream = Stream(slow_server, 40)
    assert stream.begun.wait(20)
    children = slow_server.children()
    slow_server.signal(signal.SIGTERM)
    assert wait_until(lambda: httpx2.get(f"{slow_server.url}/ready").status_code == 503)
    refused = httpx2.post(f"{slow_server.url}/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert slow_server.wait() == 0
    stream.join(10)
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(children) == 2
    assert wait_until(lambda: not any(alive(pid) for pid in children))


@pytest.mark.slow
def test_when_the_time_is_over_streams_end_with_an_error():
    server = Server(*SLOW, "--shutdown-timeout", "0.2")
    stream = Stream(server, 900)
    assert stream.begun.wait(20)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    stream.join(10)
    assert events(stream.text)[-1]["error"]["code"] == "draining"


@pytest.mark.slow
def test_second_signal_stops_at_once(slow_server):
    stream = Stream(slow_server, 900)
    assert stream.begun.wait(20)
    children = slow_server.children()
    slow_server.signal(signal.SIGTERM)
    assert wait_until(lambda: httpx2.get(f"{slow_server.url}/ready").status_code == 503)
    slow_server.signal(signal.SIGTERM)
    slow_server.wait(15)
    assert wait_until(lambda: not any(alive(pid) for pid in children))


@pytest.mark.slow
def test_an_incomplete_request_does_not_delay_the_exit(slow_server):
    host, port = slow_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert wait_until(lambda: httpx2.get(f"{slow_server.url}/ready").status_code == 200)
        slow_server.signal(signal.SIGTERM)
        assert slow_server.wait() == 0
    assert "Traceback" not in slow_server.log


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("files", ["2>/dev/full", pytest.param("<&- >&- 2>&-", marks=pytest.mark.slow)])
def test_a_server_that_cannot_write_its_log_serves(files):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = f"exec {sys.executable} -m tokenyard serve --executor mock --mock-step-ms 1 --port {port} {files}"
    process = subprocess.Popen(["/bin/sh", "-c", command], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert wait_until(lambda: answers(port), timeout_s=60.0)
        body = {"prompt": "Hello there", "max_tokens": 3}
        assert httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 200
    finally:
        process.terminate()
        process.wait(30)


def answers(port):
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.part(2)
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_while_the_model_loads_ends_at_once(to_all):
    server = Server("--device", "cpu", ready=False)
    try:
        assert wait_until(lambda: len(server.children()) == 2, timeout_s=120.0)
        children = server.children()
        server.signal(signal.SIGTERM)
        for pid in children if to_all else []:  # as a service manager does
            os.kill(pid, signal.SIGTERM)
        assert server.wait(120) == 0, server.log
        assert "did not end by itself" not in server.log
        assert "did not start" not in server.log
        assert not any(map(alive, children))
    finally:
        if server.process.poll() is None:
            server.process.kill()


def whole_text(answer_events):
    *chunks, done = answer_events
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.mark.slow
def test_streams_outlive_a_killed_scheduler_without_gap_or_repeat():
    """It is started again first. tests/e2e/test_faults.py does the same with several ranks."""
    server = Server("--executor", "mock", "--mock-step-ms", "20")
    try:
        schedulers = server.children()[:-1]
        whole = Stream(server, 60)
        whole.join(30)
        streams = [Stream(server, 60) for _ in range(8)]
        assert all(stream.begun.wait(20) for stream in streams)
        os.kill(schedulers[0], signal.SIGKILL)
        for stream in streams:
            stream.join(40)
            assert whole_text(events(stream.text)) == whole_text(events(whole.text))
            assert events(stream.text)[-2]["choices"][0]["finish_reason"] == "length"
        server.wait_for("runs again")
        assert len(server.children()) == len(schedulers) + 1
        assert schedulers[0] not in server.children()
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert wait_until(lambda: running(server) == 0)
    finally:
        assert server.close() == 0
    assert "the scheduler was killed by signal 9; rank 0 starts again" in server.log


@pytest.mark.slow
def test_an_engine_that_cannot_start_again_ends_requests_and_the_server(tmp_path):
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    server = Server(*SLOW, "--model", str(folder))
    stream = Stream(server, 900)
    assert stream.begun.wait(20)
    shutil.rmtree(folder)
    for pid in server.children():
        os.kill(pid, signal.SIGKILL)
    assert server.wait() == 1
    stream.join(10)
    assert events(stream.text)[-1]["error"]["code"] == "engine_dead"
    assert "tokenyard: " in server.log


@pytest.mark.slow
def test_a_model_that_cannot_load_ends_with_a_reason(tmp_path):
    server = Server("--executor", "mock", "--model", str(tmp_path), ready=False)
    assert server.wait(60) == 2
    assert "there is no tokenizer" in server.log
    server = Server("--device", "cpu", "--model", str(tmp_path), ready=False)
    assert server.wait(60) == 2
    assert server.log.startswith(f"tokenyard: there is no config.json in {tmp_path}")


@pytest.mark.parametrize("flags", [["--executor", "mock"], pytest.param(["--device", "cpu"], marks=pytest.mark.slow)])
def test_a_missing_model_is_one_line(flags):
    server = Server(*flags, "--model", "/nonexistent/model", ready=False)
    assert server.wait(60) == 2
    assert server.log == "tokenyard: there is no model folder '/nonexistent/model'\n"


@pytest.mark.slow
def test_a_port_in_use_ends_with_a_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server("--executor", "mock", "--port", str(taken.getsockname()[1]), ready=False)
        assert server.wait(60) == 2
    assert "cannot listen on 127.0.0.1" in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_token_ids_only():
    server = Server("--executor", "mock", "--mock-step-ms", "1", "--skip-tokenizer-init")
    try:
        assert len(server.children()) == 1
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
        answer = httpx2.post(f"{server.url}/generate", json=body).json()
        assert len(answer["output_ids"]) == 4
        assert httpx2.post(f"{server.url}/generate", json={"text": "x"}).status_code == 400
        body["sampling_params"]["stop"] = "x"
        assert httpx2.post(f"{server.url}/generate", json=body).status_code == 400
    finally:
        assert server.close() == 0
