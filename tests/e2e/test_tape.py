"""Tapes of real servers replay into the same plans, in another process than the one that made them."""

import threading
import time

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
WORDS = ["a cat", "the small boat", "once upon a time", "snow and rain and wind", "why"]
SECRET = "wholly secret words"


def ask(server, number, **more):
    """One streamed completion; every fifth client disconnects in the middle."""
    body = {
        "prompt": f"{SECRET}, {WORDS[number % 5]} and {WORDS[number % 3]} " * (1 + number % 4),
        "max_tokens": 5 + number % 23,
        "stream": True,
        "seed": number,
        "priority": number % 3,
        "tenant": f"{SECRET} {number % 2}",
        **more,
    }
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for count, _ in enumerate(answer.iter_text()):
            if number % 5 == 4 and count > 1:
                return


def load(server, requests):
    """Overlapping requests with stop strings, hang-ups, pauses and an emptied cache."""
    for begin in range(0, requests, 8):
        numbers = range(begin, min(begin + 8, requests))
        stop = {"stop": [" the", "e"]} if begin % 16 else {}
        threads = [threading.Thread(target=ask, args=(server, number), kwargs=stop) for number in numbers]
        for thread in threads:
            thread.start()
        mode = ("in_place", "retract", "abort")[begin // 8 % 3]
        httpx2.post(f"{server.url}/pause_generation", json={"mode": mode})
        time.sleep(0.02)
        httpx2.post(f"{server.url}/continue_generation", json={})
        for thread in threads:
            thread.join()
    httpx2.post(f"{server.url}/flush_cache")
    ask(server, 1)


def check(path, log):
    data = path.read_bytes()
    tape = Tape(data, path.name)
    report = replay(tape)
    assert report.difference is None, (report.difference, log)
    assert report.plans == report.equal > 20
    assert SECRET.encode() not in data
    assert tape.truncated_bytes == 0
    kinds = {type(record.body).__name__ for record in tape.records()}
    assert {"Submit", "Planned", "Committed", "Idled", "Flush"} <= kinds
    return kinds


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-priority-scheduling", "--page-size", "4"],
        pytest.param(["--schedule-policy", "lpm"], marks=pytest.mark.slow),
    ],
)
def test_a_mock_server_under_load(tmp_path, flags):
    path = tmp_path / "s.tape"
    fast = ["--executor", "mock", "--mock-profile", "h100/llama-3-8b", "--max-total-tokens", "1200"]
    server = Server(*fast, *flags, "--max-running-requests", "4", "--record", str(path))
    load(server, 40)
    assert server.close() == 0
    kinds = check(path, server.log)
    assert {"Cancel", "StopFound", "Pause", "Resume"} <= kinds


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="the demo model is not there")
def test_a_real_server_on_the_cpu(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "s.tape"
    server = Server("--device", "cpu", "--threads", "1", "--max-total-tokens", "2k", "--record", str(path))
    load(server, 16)
    assert server.close() == 0
    check(path, server.log)


@pytest.mark.slow  # the scheduler is started again after longer and longer pauses
def test_a_step_that_never_ends_fails_its_request_and_not_the_server(tmp_path):
    """The watchdog shows where the scheduler hangs and keeps the tape of what led there; others are served on."""
    path = tmp_path / "s.tape"
    server = Server("--executor", "mock", "--mock-step-ms", "60000", "--watchdog-timeout", "1", "--record", str(path))
    with httpx2.stream("POST", f"{server.url}/generate", json={"text": "x", "stream": True}, timeout=60) as answer:
        assert "has not ended for" in answer.read().decode()
    assert httpx2.get(server.url + "/health").status_code == 200
    server.close()
    assert "the device's work on a step has not ended for" in server.log
    assert "running=1" in server.log
    assert "in collect" in server.log
    assert replay(Tape(path.read_bytes(), "s")).plans == 2
