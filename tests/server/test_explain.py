"""Explanations of single requests over HTTP, and `tokenyard explain`."""

import json

import pytest

from tests.server.fake import FakeManager
from tokenyard.base import AdmittedRequests, Explanation, RequestTimings
from tokenyard.cli.main import main

COURSE = RequestTimings(
    queue_ns=5_000_000,
    prefill_ns=2_000_000,
    decode_ns=1_000_000,
    prefill_chunks=2,
    preemptions=1,
    recomputed_tokens=7,
    inverted_ns=500_000,
    waiting_ahead=4,
    admitted_ahead=3,
    policy="lpm",
    overtaking="none: longer hits pass",
)
EXPLAINED = Explanation(
    number=2,
    stage="ended",
    timings=COURSE,
    prompt_tokens=20,
    cached_tokens=8,
    completion_tokens=5,
    earlier=AdmittedRequests(1, 30, [1]),
    later=AdmittedRequests(2, 50, [3, 9]),
    complete=True,
    reason="length",
)


@pytest.fixture
def explained(start):
    manager = FakeManager()
    manager.explanations = {"mine": [EXPLAINED], "many-0": [EXPLAINED], "many-1": [EXPLAINED, EXPLAINED]}
    return start(manager)


def test_an_explanation_says_where_the_time_went_and_who_went_before(explained):
    answer = explained.client.get("/v1/requests/chatcmpl-mine/explain").json()["answers"][0]
    assert answer["total_ms"] == 8.0
    assert answer["stages_ms"]["queue"] == 5.0
    assert sum(answer["stages_ms"].values()) == pytest.approx(answer["total_ms"])
    assert answer["retracted"]["preempted"] == 1
    assert answer["lost_its_place"] == answer["retracted"], "the old name"
    behind = answer["waited_behind"]
    assert behind["priority_inversion_ms"] == behind["less_urgent_in_place_ms"] == 0.5
    assert (behind["policy"], behind["overtaking"]) == ("lpm", "none: longer hits pass")
    assert behind["earlier"] == {"requests": 1, "tokens": 30, "latest_ids": ["first"]}
    assert behind["later"]["latest_ids"] == ["third", "#9"]
    assert "most of it queue (5.0 ms)" in answer["summary"]
    assert "8 of 20 prompt tokens came from the cache" in answer["summary"]


def test_every_answer_of_a_batch_is_explained(explained):
    assert len(explained.client.get("/v1/requests/many/explain").json()["answers"]) == 3


def test_an_unknown_request_is_a_404(explained):
    answer = explained.client.get("/v1/requests/other/explain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_the_command_prints_a_table_or_json(explained, capsys):
    assert main(["explain", "mine", "--url", explained.url]) == 0
    text = capsys.readouterr().out
    for word in ("queue", "5.0 ms", "overtook", "third", "lpm"):
        assert word in text
    assert main(["explain", "mine", "--url", explained.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "mine"


def test_the_command_says_what_went_wrong(explained, start, capsys, monkeypatch):
    assert main(["explain", "a/b ?", "--url", explained.url]) == 2
    assert "nothing is known of request 'a/b ?'" in capsys.readouterr().err
    assert main(["explain", "x", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    guarded = start(admin_api_key="k2")
    assert main(["explain", "x", "--url", guarded.url]) == 2
    assert "API key" in capsys.readouterr().err
    monkeypatch.setenv("TOKENYARD_ADMIN_API_KEY", "k2")
    assert main(["explain", "x", "--url", guarded.url]) == 2
    assert "nothing is known" in capsys.readouterr().err
