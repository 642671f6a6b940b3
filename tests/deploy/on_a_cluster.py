"""Engines on a Ray cluster of two nodes: `python on_a_cluster.py`, in an environment with Ray and this package.

Prints "PASS" if there were more engines under load and fewer without, every answer came out whole and right through the
router while a node was killed and while engines were taken away, Serve's own path answered, and `compare --ray` found
what `compare` finds.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import ray
from ray import serve
from ray.cluster_utils import Cluster

from tokenyard.on_ray.deployment import build

FLAGS = "--executor mock --mock-step-ms 20 --max-running-requests 8 --log-level warning"
SCALING = {"min_engines": 1, "max_engines": 3, "num_cpus": 1, "upscale_delay_s": 1, "downscale_delay_s": 4}
CLIENTS, TOKENS = 24, 40
MEMORY = {"object_store_memory": 80_000_000}
COMPARED = ("fcfs", "slo", "--synthetic", "tenants", "--limit", "200", "--quiet", "--json")


def until(what: str, holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Wait for the event itself."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


def asked(url: str, prompt: str, stream: bool = True) -> str:
    """The text of one answer; raises if it is cut."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        if not stream:
            return json.load(answer)["choices"][0]["text"]
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", f"the answer breaks off: {lines[-1]}"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


class Load:
    """Clients that ask again and again; what went wrong is kept."""

    def __init__(self, url: str, clients: int, right: dict[str, str]) -> None:
        self.answers, self.wrong, self._stop = 0, [], threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, n, right)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str, number: int, right: dict[str, str]) -> None:
        prompt = sorted(right)[number % len(right)]
        while not self._stop.is_set():
            try:
                if (found := asked(url, prompt)) != right[prompt]:
                    self.wrong.append((prompt, found))
            except Exception as error:
                self.wrong.append((prompt, repr(error)))
            self.answers += 1

    def end(self) -> None:
        """Stop, and see to it that all went well."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrong, self.wrong[:3]
        print(f"{self.answers} answers, all right", flush=True)


def addresses(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []


def scaled_and_killed(cluster: Cluster, url: str, file: Path, right: dict[str, str]) -> None:
    """More engines under load; a node dies, another joins; fewer engines while a few clients continue."""
    load = Load(url, CLIENTS, right)
    until("three engines under load", lambda: len(addresses(file)) == 3)
    print("three engines", flush=True)
    seen = load.answers
    until("answers from three engines", lambda: load.answers > seen + 2 * CLIENTS)
    worker = next(node for node in cluster.list_all_nodes() if not node.head)
    cluster.remove_node(worker, allow_graceful=False)
    until("the engine of the head is left", lambda: len(addresses(file)) == 1)
    print("one engine after its node was killed", flush=True)
    cluster.add_node(num_cpus=2, **MEMORY)
    until("three engines again", lambda: len(addresses(file)) == 3)
    print("three engines again", flush=True)
    load.end()
    load = Load(url, 3, right)
    until("one engine when the load is gone", lambda: len(addresses(file)) == 1)
    load.end()


def same_on_the_cluster(address: str, folder: Path) -> None:
    """`compare` on the cluster and here."""
    results = []
    for name, more in (("here", ("--jobs", "1")), ("there", ("--ray", address))):
        path = folder / f"{name}.json"
        subprocess.run([sys.executable, "-m", "tokenyard", "compare", *COMPARED, str(path), *more], check=True)
        results.append({key: run["decision_hash"] for key, run in json.loads(path.read_text()).items()})
    assert results[0] == results[1], results
    for words in (
        ("goodput", "fcfs", "--synthetic", "plain", "--limit", "100", "--targets", "0.9"),
        ("plan", "--synthetic", "plain", "--limit", "100", "--policies", "fcfs", "--seeds", "1"),
    ):
        subprocess.run([sys.executable, "-m", "tokenyard", *words, "--ray", address], check=True)


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp())
    file = folder / "engines"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **MEMORY})
    others: list[subprocess.Popen[str]] = []
    try:
        ray.init(cluster.address, log_to_driver=False)
        serve.start(http_options={"port": 0})
        handle = serve.run(build({"flags": FLAGS, "drain_s": 20, **SCALING}))
        cluster.add_node(num_cpus=2, **MEMORY)
        pieces = handle.options(stream=True).ask.remote("/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert b'"text"' in b"".join(pieces)
        feed = [sys.executable, "-m", "tokenyard.on_ray.addresses", str(file), "--address", cluster.address]
        others.append(subprocess.Popen(feed, text=True))
        until("an address", lambda: bool(addresses(file)))
        route = [sys.executable, "-m", "tokenyard", "route", "--port", "0", "--worker-file", str(file)]
        route += ["--discovery-interval-secs", "0.2", "--health-check-interval-secs", "0.5"]
        router = subprocess.Popen(route, stderr=subprocess.PIPE, text=True)
        others.append(router)
        assert router.stderr is not None
        url = next(line for line in router.stderr if "routes at" in line).split()[-1]
        threading.Thread(target=lambda: list(router.stderr), daemon=True).start()
        right = {word: asked(addresses(file)[0], word) for word in ("one", "two", "three", "four", "five")}
        scaled_and_killed(cluster, url, file, right)
        same_on_the_cluster(cluster.address, folder)
        print("PASS", flush=True)
    finally:
        for process in others:
            process.terminate()
            process.wait(60)
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
