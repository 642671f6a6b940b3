"""A real Prometheus scrapes a real server and router and evaluates every query of board and rules."""

import shutil
import socket
import subprocess
import threading
import time

import httpx2
import pytest
import yaml

from tests.deploy.test_manifests import DEPLOY, queries
from tests.e2e.servers import ROOT, Server
from tokenyard.config import DEMO_MODEL

pytestmark = [
    pytest.mark.world,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there"),
]
WITH_DATA = ("slo_requests", "goodput", "time_to_first", "running_requests", "token_usage", "generation_tokens")
WITH_DATA += ("process_cpu", "process_resident", "router_requests", "router_worker_requests", "router_load")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def started(command, url, cwd):
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx2.get(url).status_code == 200:
                return process
        except httpx2.HTTPError:
            pass
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"{command} does not answer")


def ask_for_a_while(url, stop):
    body = {"prompt": "Once upon a time", "max_tokens": 20, "slo": {"ttft_ms": 1000, "tpot_ms": 200}, "stream": True}
    while not stop.is_set():
        httpx2.post(f"{url}/v1/completions", json=body, timeout=30)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    server, router_port, port = Server("--executor", "mock", "--mock-step-ms", "2"), free_port(), free_port()
    route = ["-m", "tokenyard", "route", "--worker-urls", server.url, "--port", str(router_port)]
    router_url, url = f"http://127.0.0.1:{router_port}", f"http://127.0.0.1:{port}"
    router = started([str(ROOT / ".venv/bin/python"), *route], f"{router_url}/ready", ROOT)
    jobs = {"tokenyard": server.url, "tokenyard-router": router_url}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus/rules.yml")],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [at.removeprefix("http://")]}]}
            for name, at in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"]
    scraper = started(command, f"{url}/-/ready", folder)
    stop = threading.Event()
    clients = [threading.Thread(target=ask_for_a_while, args=(router_url, stop)) for _ in range(2)]
    for client in clients:
        client.start()
    time.sleep(12)
    yield url
    stop.set()
    for client in clients:
        client.join()
    for process in (scraper, router):
        process.terminate()
        process.wait(30)
    server.close()


def test_both_are_scraped(prometheus):
    targets = httpx2.get(f"{prometheus}/api/v1/targets").json()["data"]["activeTargets"]
    assert {one["labels"]["job"]: one["health"] for one in targets} == {"tokenyard": "up", "tokenyard-router": "up"}


def test_every_query_of_the_board_and_the_rules_is_evaluated(prometheus):
    empty = []
    for query in queries():
        words = query.replace("$__rate_interval", "10s").replace("$model", ".*")
        answer = httpx2.get(f"{prometheus}/api/v1/query", params={"query": words}).json()
        assert answer["status"] == "success", (query, answer)
        if not answer["data"]["result"] and "[10s]" in words:
            empty.append(query)
    assert not [query for query in empty if any(f"tokenyard_{name}" in query for name in WITH_DATA)]


def test_the_rules_are_loaded_and_healthy(prometheus):
    groups = httpx2.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert set(health.values()) == {"ok"}
    assert "TokenyardSloBurnsFast" in health
