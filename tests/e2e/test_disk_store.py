"""KV on disk, as a user meets it: a server that is started again knows what it had computed."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.servers import ROOT, Server
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="the demo model is not there")

PROMPT = "Once upon a time there was a girl named Lily who lived in a small house near the forest. " * 12
FLAGS = ("--dtype", "float32", "--enable-hierarchical-cache", "--hicache-storage-backend", "disk")


def call(server: Server, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were there."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = call(server, "/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def store_state(server: Server) -> dict:
    return call(server, "/v1/cache")["ranks"]["rank 0"]


def wait_until(condition, most_s: float = 30.0) -> None:
    end = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("--kv-cache-dtype", "int8"), ("--tp-size", "2", "--threads", "2")], ids=["bytes", "ranks"]
)
def test_a_restarted_server_finds_its_kv(tmp_path, more):
    flags = (*FLAGS, "--hicache-storage-dir", str(tmp_path), *more)
    server = Server(*flags)
    answer, cached = ask(server)
    assert cached == 0
    assert server.close() == 0, "what was not stored yet is stored at the end"

    server = Server(*flags)
    again, cached = ask(server)
    assert (again, cached) == (answer, 192)
    assert store_state(server)["loaded_tokens"] == 192
    more, _ = ask(server, 2 * PROMPT)
    # Blocks in memory count too, so those on the disk are complete once nothing is being stored.
    wait_until(lambda: (state := store_state(server))["blocks"] >= 8 and not state["storing"])
    server.signal(signal.SIGKILL)
    server.wait()

    server = Server(*flags)
    try:
        last, cached = ask(server, 2 * PROMPT)
        assert last == more
        assert cached >= 448
        # A block that is being stored holds its pages, and a cache in use is not flushed. A cache that was not flushed
        # would be stored again after a clear.
        wait_until(lambda: store_state(server)["storing"] == 0)
        assert call(server, "/flush_cache", {})
        assert call(server, "/clear_hicache_storage_backend", {})["blocks"] >= 8
        assert ask(server) == (answer, 0)
    finally:
        server.close()


def events(lines) -> list[dict]:
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


@pytest.mark.slow
def test_a_paused_request_outlives_a_server_that_is_killed(tmp_path):
    flags = (*FLAGS, "--hicache-storage-dir", str(tmp_path))
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 400, "seed": 5, "ignore_eos": True}}
    server = Server(*flags)
    expected = call(server, "/generate", body)
    data = json.dumps({**body, "stream": True, "rid": "held"}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(server.url + "/generate", data), timeout=60)
    lines = [answer.readline()]
    assert call(server, "/v1/requests/held/pause", {}) == {"id": "held", "paused": True, "kept": True}
    server.signal(signal.SIGKILL)
    server.wait()
    # What was sent before the end still comes.
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while line := answer.readline():
            lines.append(line)
    before = events(lines)[-1]
    assert 0 < before["meta_info"]["completion_tokens"] < 400

    server = Server(*flags)
    try:
        resumed = urllib.request.Request(server.url + "/v1/requests/held/resume", b"")
        with urllib.request.urlopen(resumed, timeout=60) as answer:
            after = events(answer)[-1]
        assert before["text"] + after["text"] == expected["text"]
        assert before["output_ids"] + after["output_ids"] == expected["output_ids"]
        assert (after["meta_info"]["id"], after["meta_info"]["completion_tokens"]) == ("held", 400)
        for rid in ("held", "never"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                call(server, f"/v1/requests/{rid}/resume", {})
        assert call(server, "/v1/cache")["paused_requests"]["resumed"] == 1
    finally:
        server.close()


@pytest.mark.slow
def test_what_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "slab-0000.kv").write_bytes(b"not a slab" * 1000)
    command = [
        sys.executable,
        "-m",
        "tokenyard",
        "serve",
        "--port",
        "0",
        *FLAGS,
        "--hicache-storage-dir",
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert "slab-0000.kv is no slab of KV" in ran.stderr
    assert "Traceback" not in ran.stderr
