"""The expressions of deploy/ find what is true of a running router and engine, with requests that wait."""

import re
import subprocess
import sys
import threading
import time

import httpx2
import pytest
import yaml

from tests.deploy.promql import Evaluator, scrape
from tests.deploy.test_manifests import DEPLOY
from tests.e2e.servers import ROOT, Server

pytestmark = pytest.mark.slow

AT_ONCE, CLIENTS = 2, 10
MODEL = "model"


class Router:
    """`tokenyard route` on a free port in front of a server."""

    def __init__(self, *flags):
        command = [sys.executable, "-m", "tokenyard", "route", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        line = self.process.stderr.readline()
        self.url = re.search(r"routes at (\S+)", line)[1]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def close(self):
        self.process.terminate()
        self.process.wait(30)


def rules():
    text = (DEPLOY / "prometheus/rules.yml").read_text()
    return {rule.get("alert"): rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


def triggers():
    scaled = yaml.safe_load((DEPLOY / "kubernetes/autoscaler.yaml").read_text())
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def value(vector, **labels):
    return vector.get(frozenset(labels.items()))


@pytest.fixture(scope="module")
def pair():
    """(evaluator while requests wait, metrics of the engine once they have ended, time to first token of each)."""
    flags = ("--executor", "mock", "--mock-step-ms", "10", "--served-model-name", MODEL)
    engine = Server(*flags, "--max-running-requests", str(AT_ONCE), "--slo-ttft-ms", "500")
    router = Router("--worker-urls", engine.url, "--health-check-interval-secs", "0.1")
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}
    waits = []

    def ask():
        begun = time.monotonic()
        with httpx2.stream("POST", f"{router.url}/v1/completions", json=body, timeout=60) as answer:
            for place, _ in enumerate(answer.iter_bytes()):
                if place == 0:
                    waits.append(time.monotonic() - begun)

    def scraped():
        samples = scrape(httpx2.get(f"{engine.url}/metrics").text, job="tokenyard", instance="e")
        return samples | scrape(httpx2.get(f"{router.url}/metrics").text, job="tokenyard-router", instance="r")

    try:
        while httpx2.get(f"{router.url}/ready").status_code != 200:
            time.sleep(0.02)
        before, begun = scraped(), time.monotonic()
        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        all_wait = False
        while not all_wait:
            assert time.monotonic() < begun + 60, "the requests never waited together"
            during = Evaluator(before, scraped() | up(1.0), time.monotonic() - begun)
            # The two are scraped one after the other: a request may be counted by both while it is sent on.
            all_wait = value(during(triggers()[0])) == CLIENTS - AT_ONCE and value(during(triggers()[1])) == AT_ONCE
        for client in clients:
            client.join()
        after = Evaluator(before, scraped() | up(1.0), time.monotonic() - begun)
        yield during, after, waits
    finally:
        router.close()
        engine.close()


def up(state):
    jobs = (("tokenyard", "e"), ("tokenyard-router", "r"))
    return {frozenset({"__name__": "up", "job": job, "instance": name}.items()): state for job, name in jobs}


def test_the_autoscaler_sees_the_requests_that_wait(pair):
    assert [value(pair[0](query)) for query in triggers()] == [CLIENTS - AT_ONCE, AT_ONCE]
    assert [value(pair[1](query)) for query in triggers()] == [0.0, 0.0]


def test_the_engine_counts_from_the_arrival_at_the_router(pair):
    _, after, waits = pair
    late = sum(wait > 0.5 for wait in waits)
    assert late >= CLIENTS // 2
    missed = value(after('sum by (model) (tokenyard_slo_requests_total{met="no"})'), model=MODEL)
    # A request at the edge may count either way, as the client measures from elsewhere.
    assert abs(missed - late) <= 2
    at_the_router = value(after("sum(tokenyard_router_queue_time_seconds_sum)"))
    assert at_the_router > 0.4 * CLIENTS
    assert value(after("sum(tokenyard_queue_time_seconds_sum)")) > 0.95 * at_the_router


def test_the_alerts_are_quiet_on_a_healthy_pair_and_queues_raise_theirs(pair):
    during, after, _ = pair
    quiet = ("TokenyardDown", "TokenyardGone", "TokenyardModelWithoutEngine", "TokenyardEngineUnhealthy")
    for name in (*quiet, "TokenyardRefuses", "TokenyardRouterRefuses", "TokenyardStarves", "TokenyardThrashes"):
        assert not during(rules()[name]), name
    held = rules()["TokenyardRouterQueues"].replace("> 2", "> 0.4")
    assert value(after(held), model=MODEL) > 0.4


def test_the_alerts_on_what_is_gone_are_raised():
    none = Evaluator({}, {}, 1.0)
    assert none(rules()["TokenyardGone"])
    assert Evaluator({}, up(0.0), 1.0)(rules()["TokenyardDown"]).keys() == up(0.0).keys()
    gone = {frozenset({"__name__": "tokenyard_router_healthy_workers", "model": "m"}.items()): 0.0}
    assert value(Evaluator({}, gone, 1.0)(rules()["TokenyardModelWithoutEngine"]), model="m") == 0.0


def test_every_expression_is_of_a_shape_that_the_evaluator_knows(pair):
    for expression in (*rules().values(), *triggers()):
        if expression and "tokenyard:" not in expression:
            pair[0](expression)
