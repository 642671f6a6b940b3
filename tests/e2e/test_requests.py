"""Single requests held back and changed on a real server with the mock executor."""

import time

import httpx2
import pytest

from tests.server.sse import events
from tokenyard.cli.main import main

BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def tokens_of(event_list):
    return [token for event in event_list[:-1] for token in event["choices"][0]["token_ids"]]


def test_a_paused_request_resumes_exactly_where_it_stopped(mock_server):
    url = mock_server.url
    expected = httpx2.post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["token_ids"]
    text = ""
    with httpx2.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True, "rid": "held"}) as answer:
        pieces = answer.iter_text()
        text += next(pieces)
        assert httpx2.post(f"{url}/v1/requests/cmpl-held/pause").status_code == 200
        deadline = time.monotonic() + 10
        while httpx2.get(f"{url}/v1/loads").json()["data"][0]["running_requests"]:
            assert time.monotonic() < deadline, "the request did not give up its place"
        assert httpx2.patch(f"{url}/v1/requests/held", json={"priority": 3, "deadline_ms": 9e4}).status_code == 200
        assert httpx2.patch(f"{url}/v1/requests/held", json={"priority": 2**40}).status_code == 400
        assert httpx2.post(f"{url}/v1/requests/held/resume").status_code == 200
        text += "".join(pieces)
    found = events(text)
    assert found[-1] == "[DONE]"
    assert tokens_of(found) == expected
    assert httpx2.post(f"{url}/v1/requests/held/resume").status_code == 404


def test_a_request_is_explained_while_it_runs_and_afterwards(mock_server):
    url = mock_server.url
    with httpx2.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True, "rid": "explained"}) as answer:
        pieces = answer.iter_text()
        next(pieces)
        running = httpx2.get(f"{url}/v1/requests/explained/explain").json()["answers"][0]
        assert running["state"] == "decode"
        "".join(pieces)
    ended = httpx2.get(f"{url}/v1/requests/cmpl-explained/explain").json()["answers"][0]
    assert (ended["state"], ended["finish_reason"]) == ("ended", "length")
    assert ended["completion_tokens"] == BODY["max_tokens"]
    assert ended["stages_ms"]["decode"] > running["stages_ms"]["decode"]
    assert ended["total_ms"] == pytest.approx(sum(ended["stages_ms"].values()))
    assert ended["waited_behind"]["policy"] == "fcfs"
    assert httpx2.get(f"{url}/v1/requests/never/explain").status_code == 404


def test_a_profile_of_a_real_server(mock_server):
    url = mock_server.url
    assert httpx2.post(f"{url}/start_profile").status_code == 200
    assert httpx2.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 5, "rid": "drawn"}).status_code == 200
    events = httpx2.post(f"{url}/stop_profile").json()["traceEvents"]
    steps = [event for event in events if event["name"] == "DECODE"]
    (stream,) = [event for event in events if event["name"] == "drawn/0" and event["ph"] == "b"]
    assert len(steps) == 4
    assert all(event["ts"] >= stream["ts"] for event in steps), "both processes use one clock"


def test_explain_goes_past_proxies(mock_server, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    httpx2.post(f"{mock_server.url}/v1/completions", json={**BODY, "max_tokens": 1, "rid": "direct"}, trust_env=False)
    assert main(["explain", "direct", "--url", mock_server.url]) == 0
    assert "direct" in capsys.readouterr().out
