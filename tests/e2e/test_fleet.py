"""`tokenyard route` in front of real servers: two engines of ours, one of which is killed under load."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from tests.e2e.servers import ROOT, Route, Server
from tokenyard.cli.main import main
from tokenyard.cli.route import route_settings
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.native.library import NoLibraryError, load_library

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")


def kill(server):
    """kill -9 to the server and its children."""
    pids = [*server.children(), server.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.slow
def test_a_fleet_answers_and_a_killed_engine_costs_no_whole_answer():
    flags = ("--executor", "mock", "--mock-step-ms", "5")
    servers = [Server(*flags) for _ in range(2)]
    route = Route(*(server.url for server in servers))
    try:
        assert [card["id"] for card in route.get("/v1/models")["data"]] == ["tokenyard-demo"]
        whole = json.loads(route.complete("Once upon a time"))
        assert whole["usage"]["completion_tokens"] == 8
        assert route.complete("Once upon a time", stream=True).endswith(b"data: [DONE]\n\n")
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(route.complete, f"story {i}", max_tokens=40) for i in range(48)]
            time.sleep(0.15)
            kill(servers[0])
            answers = [json.loads(one.result()) for one in asked]
        assert all(answer["usage"]["completion_tokens"] == 40 for answer in answers)
        route.wait_for(1)
        assert json.loads(route.complete("still there"))["usage"]["completion_tokens"] == 8
        assert all(worker["open_requests"] == 0 for worker in route.get("/workers")["workers"])
    finally:
        assert route.close() == 0
        servers[1].close()


def test_a_drain_lets_answers_end(mock_server):
    route = Route(mock_server.url)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        open_ones = [pool.submit(route.complete, f"long {i}", max_tokens=200, stream=True) for i in range(4)]
        while route.get("/workers")["workers"][0]["open_requests"] < 4:
            time.sleep(0.01)
        assert route.close() == 0
        assert all(one.result().endswith(b"data: [DONE]\n\n") for one in open_ones)


@pytest.mark.slow
def test_stored_responses_continue_through_two_routers(mock_server):
    """Chains of `previous_response_id` alternate between routers that take turns over engines and know no sessions."""
    openai = pytest.importorskip("openai")
    other = Server("--executor", "mock", "--mock-step-ms", "2")
    flags = ("--policy", "round_robin", "--session-header", "")
    routes = [Route(mock_server.url, other.url, flags=flags) for _ in range(2)]
    try:
        clients = [
            openai.OpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0, timeout=60) for route in routes
        ]
        chains = [[] for _ in range(4)]
        for turn in range(3):
            for number, chain in enumerate(chains):
                client = clients[(turn + number) % 2]
                before = chain[-1].id if chain else None
                fields = {"model": "tokenyard-demo", "max_output_tokens": 4, "previous_response_id": before}
                chain.append(client.responses.create(input=f"turn {turn} of chat {number}", **fields))
        assert {chain[0].id[:17] for chain in chains} == {chain[-1].id[:17] for chain in chains}
        by_engine = {chain[0].id[:17]: chain[-1].id for chain in chains}
        assert len(by_engine) == 2, "both engines have chains"
        for chain in chains:
            assert clients[0].responses.retrieve(chain[1].id).output_text == chain[1].output_text
            items = clients[1].responses.input_items.list(chain[2].id).data
            assert len([item for item in items if item.role == "user"]) == 3
        kill(other)
        outcomes, missing = [], []
        for last in by_engine.values():
            for client in clients:
                fields = {"model": "default", "max_output_tokens": 4, "previous_response_id": last}
                try:
                    outcomes.append(client.responses.create(input="on", **fields).status)
                except openai.BadRequestError as error:
                    missing.append((error.code, f"Previous response with id '{last}' not found." in str(error)))
        assert outcomes == ["incomplete", "incomplete"]
        assert missing == [("previous_response_not_found", True)] * 2
    finally:
        assert [route.close() for route in routes] == [0, 0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "nearest"], "--policy is 'nearest'; choose from predicted_ttft"),
        (["--worker-urls", "http://a:1", "http://a:1/"], "http://a:1 is given twice"),
        (["--worker-urls", "ftp://a"], "is not a worker"),
        (["--port", "many"], "--port: 'many' is not a whole number"),
        (["--max-retries", "-1"], "--max-retries is -1; it must be at least 0"),
        (["--tls-cert-path", "x"], "need each other"),
        (["--tls-cert-path", "/no", "--tls-key-path", "/no"], "cannot be used"),
        (["--tenant-weights", "gold"], "takes name=weight"),
        (["--worker-dns", "host"], "give host:port"),
        (["--polcy", "random"], "did you mean --policy"),
        (["--host", "256.1.1.1"], "cannot listen on"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, capsys):
    assert main(["route", "--port", "0", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_a_log_in_json_is_nothing_else():
    command = [sys.executable, "-m", "tokenyard", "route", "--port", "0", "--log-format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--worker-urls", "http://127.0.0.1:9"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = [json.loads(process.stderr.readline())]
        process.send_signal(signal.SIGTERM)
        lines += map(json.loads, process.stderr)
    assert "routes at http://127.0.0.1:" in lines[0]["message"]
    assert lines[-1]["message"] == "draining 0 open requests"
    ran = subprocess.run([*command, "--worker-dns", "host"], capture_output=True, text=True, env=environment)
    assert ran.returncode == 2
    assert "give host:port" in json.loads(ran.stderr)["message"]


def test_the_environment_sets_what_flags_do_not():
    environ = {"TOKENYARD_ROUTE_WORKER_URLS": "http://a:1,http://b:2", "TOKENYARD_ROUTE_POLICY": "random"}
    settings = route_settings({"policy": "round_robin"}, environ)
    assert (settings.worker_urls, settings.policy) == (("http://a:1", "http://b:2"), "round_robin")


def test_several_processes_share_a_port(mock_server):
    route = Route(mock_server.url, flags=("--processes", "2"))
    try:
        assert len(psutil.Process(route.process.pid).children()) == 1
        for i in range(12):
            assert json.loads(route.complete(f"go {i}"))["usage"]["completion_tokens"] == 8
        wrong = urllib.request.Request(route.url + "/workers", b'{"url": "http://127.0.0.1:9"}')
        with pytest.raises(urllib.error.HTTPError, match="409"):
            urllib.request.urlopen(wrong, timeout=30)
    finally:
        assert route.close() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_on_both_sides(mock_server, tmp_path):
    """A router with TLS in front of a router with TLS."""
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        "1",
    ]
    subprocess.run([*made, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    flags = ("--tls-cert-path", certificate, "--tls-key-path", key)
    os.environ["SSL_CERT_FILE"] = certificate
    try:
        inner = Route(mock_server.url, flags=flags)
        outer = Route(inner.url, flags=(*flags, "--ca-cert-path", certificate))
        assert outer.url.startswith("https://")
        assert outer.complete("Once", stream=True).endswith(b"data: [DONE]\n\n")
        assert outer.close() == 0
        assert inner.close() == 0
    finally:
        del os.environ["SSL_CERT_FILE"]


def streamed(url, body, on_line=lambda so_far: None):
    """The text, end and usage of a stream; `on_line` gets the number of events so far."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"X-Request-Id": "one"})
    text, end, usage, ids, count = "", None, None, set(), 0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                count += 1
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids.add(event["id"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text, end = text + choice["text"], choice["finish_reason"] or end
                on_line(count)
    return text, end, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}, ids


SAMPLED = {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.4}


def has_native_kernels():
    try:
        load_library()
    except NoLibraryError:
        return False
    return True


needs_native = pytest.mark.skipif(not has_native_kernels(), reason="there are no native kernels here")
IN_BFLOAT16 = ("--dtype", "bfloat16", "--enable-deterministic-inference")
IN_FLOAT32 = ("--dtype", "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "flags"),
    [
        pytest.param(SAMPLED, IN_BFLOAT16, marks=needs_native),
        ({"temperature": 0}, IN_FLOAT32),
    ],
)
def test_a_client_does_not_notice_that_its_engine_is_killed(sampling, flags):
    """In bfloat16 only deterministic inference promises it: otherwise a narrow draw may change where the answer so far
    is computed again.
    """
    servers = [Server("--max-total-tokens", "2000", *flags) for _ in range(2)]
    route = Route(*(server.url for server in servers))
    body = {"prompt": "Once upon a time there was a fox", "max_tokens": 80, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}, **sampling}
    killed = []

    def kill_the_busy_one(count):
        if count < 3 or killed:
            return
        busy = next((w["url"] for w in route.get("/workers")["workers"] if w["open_requests"]), None)
        killed.extend(server for server in servers if server.url == busy)
        for server in killed:
            kill(server)

    try:
        expected = [streamed(server.url, body) for server in servers]
        assert expected[0] == expected[1]
        assert streamed(route.url, body, kill_the_busy_one) == expected[0]
        assert killed
    finally:
        assert route.close() == 0
        for server in servers:
            if server not in killed:
                server.close()
