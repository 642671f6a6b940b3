"""Policy `adaptive` in a real server: traffic shifts, and a change is seen."""

import threading
import time

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")

FLAGS = (
    *("--executor", "mock", "--cost-profile", "h100/llama-3-8b", "--context-length", "40000"),
    *("--max-total-tokens", "400k", "--chunked-prefill-size", "8192", "--schedule-policy", "adaptive"),
    *("--policy-options", "interval_s=0.5,horizon_s=5,cpu_share=1,among=fcfs+slo"),
)


class Traffic(threading.Thread):
    """Sends prompts of `tokens` tokens every `pause_s` until stopped; keeps the status of each answer."""

    def __init__(self, url, tokens, pause_s):
        super().__init__(daemon=True)
        self._url, self._tokens, self._pause_s = url, tokens, pause_s
        self._ended = threading.Event()
        self._senders = []
        self.statuses = []
        self.start()

    def run(self):
        turn = 0
        while not self._ended.wait(self._pause_s):
            turn += 1
            ids = [3 + (turn * 7 + place) % 200 for place in range(self._tokens)]
            sender = threading.Thread(target=self._send, args=(ids,), daemon=True)
            sender.start()
            self._senders.append(sender)

    def _send(self, ids):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        self.statuses.append(httpx2.post(f"{self._url}/generate", json=body, timeout=120).status_code)

    def stop(self):
        """Send no more; returns the statuses until now."""
        self._ended.set()
        self.join()
        return set(self.statuses)

    def join_senders(self):
        for sender in self._senders:
            sender.join()


def seen(url, done, timeout_s=60.0):
    """What the server says there as soon as `done` holds of it."""
    end = time.monotonic() + timeout_s
    while not done(answer := httpx2.get(url)):
        assert time.monotonic() < end, answer.text
        time.sleep(0.1)
    return answer


@pytest.mark.slow
def test_a_change_is_seen_when_traffic_shifts():
    server, sources = Server(*FLAGS), []
    route = f"{server.url}/v1/scheduler"
    try:
        sources.append(Traffic(server.url, 100, 0.1))
        state = seen(route, lambda answer: answer.json()["adaptive"]["looks"] >= 3).json()
        assert state["policy"] == state["adaptive"]["current"] == "fcfs"
        assert (state["adaptive"]["candidates"], state["adaptive"]["switches"]) == (["fcfs", "slo"], [])
        # Long prompts, more than can be served, which short ones have to wait behind.
        sources.append(Traffic(server.url, 30_000, 0.4))
        state = seen(route, lambda answer: answer.json()["adaptive"]["switches"]).json()
        assert state["policy"] == state["adaptive"]["current"] == "slo"
        (change,) = state["adaptive"]["latest"]
        assert change["candidate"] == "slo"
        assert "slo lets" in change["reason"]
        seen(f"{server.url}/metrics", lambda answer: 'policy_switches_total{candidate="slo"' in answer.text)
        server.wait_for("the policy becomes slo")
        answer = httpx2.post(route, json={"policy": "lpm"})
        assert (answer.json()["policy"], answer.json()["adaptive"]) == ("lpm", {})
    finally:
        statuses = [source.stop() for source in sources]
        httpx2.post(f"{server.url}/abort_request", json={"abort_all": True})
        for source in sources:
            source.join_senders()
        server.close()
    assert statuses[0] == {200}
    assert statuses[1] <= {200}
