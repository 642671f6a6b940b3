"""Changing, pausing and resuming single requests over HTTP."""

from contextlib import contextmanager

import pytest

from tests.server.fake import FakeManager
from tokenyard.base import Slo

MS = 1_000_000


@contextmanager
def streaming(start, path="/generate", **body):
    """A server with one request in flight."""
    manager = FakeManager()
    manager.delay_s = 0.1
    server = start(manager)
    if path == "/generate":
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 60}, **body}
    else:
        body = {"prompt": "hello", "max_tokens": 60, **body}
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        pieces = answer.iter_bytes()  # kept: the response closes when this is collected
        next(pieces)
        yield server


def test_a_request_is_changed_paused_and_resumed_by_its_id(start):
    with streaming(start, rid="a/b c") as server:
        patched = server.client.patch("/v1/requests/a%2Fb c", json={"priority": 7, "deadline_ms": 500})
        assert patched.json() == {"id": "a/b c", "priority": 7, "deadline_ms": 500.0}
        assert server.client.post("/v1/requests/a/b c/pause").json() == {"id": "a/b c", "paused": True}
        assert server.client.post("/v1/requests/a/b c/resume").json() == {"id": "a/b c", "paused": False}
    assert server.manager.calls == [
        ("update", "a/b c", {"priority": 7, "deadline_ms": 500.0}),
        ("pause_request", "a/b c"),
        ("resume_request", "a/b c"),
    ]


@pytest.mark.parametrize(
    ("policy", "noted"),
    [("fcfs", True), ("levels+lpm", True), ("priority+fcfs", False), ("vtc+priority", False), ("mine:Own", False)],
)
def test_a_priority_that_does_not_count_is_noted(start, monkeypatch, policy, noted):
    async def snapshot(self):
        return {"policy": policy}

    monkeypatch.setattr(FakeManager, "snapshot", snapshot)
    with streaming(start, rid="x") as server:
        note = server.client.patch("/v1/requests/x", json={"priority": 1}).json().get("note", "")
        assert ("--enable-priority-scheduling" in note) == noted
        assert "note" not in server.client.patch("/v1/requests/x", json={"deadline_ms": 5}).json()


def test_the_id_of_the_answer_will_do(start):
    with streaming(start, "/v1/completions", rid="x") as server:
        assert server.client.patch("/v1/requests/cmpl-x", json={"priority": 1}).status_code == 200
    assert server.manager.calls == [("update", "x", {"priority": 1, "deadline_ms": None})]


def test_every_prompt_of_a_batch_is_reached(start):
    with streaming(start, text=["hello", "dog"], rid="x") as server:
        assert server.client.post("/v1/requests/x/pause").status_code == 200
    assert sorted(server.manager.calls) == [("pause_request", "x-0"), ("pause_request", "x-1")]


@pytest.mark.parametrize(("method", "path"), [("PATCH", "x"), ("POST", "x/pause"), ("POST", "cmpl-x/resume")])
def test_a_request_that_is_gone_is_a_404(server, method, path):
    answer = server.client.request(method, f"/v1/requests/{path}", json={"priority": 1})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("body", [{}, {"priority": "high"}, {"priority": 1.5}, {"deadline_ms": "soon"}])
def test_wrong_changes_are_refused(server, body):
    assert server.client.patch("/v1/requests/x", json=body).status_code == 400


@pytest.mark.parametrize(
    "body", [{"priority": 2**40}, {"deadline_ms": 1e300}, {"slo": {"ttft_ms": 1e300}}, {"slo": {"tpot_ms": 0}}]
)
def test_absurd_urgency_is_refused(server, body):
    answer = server.client.post("/v1/completions", json={"prompt": "hello", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] in body


def test_requests_need_the_admin_key(start):
    server = start(api_key="k1", admin_api_key="k2")
    for key, status in (("k1", 401), ("k2", 404)):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.client.post("/v1/requests/x/pause", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("body", "ttft_ms", "tpot_ms"),
    [
        ({"service_tier": "flex"}, 60_000, None),
        ({"priority": "interactive"}, 500, 30),
        ({"priority": "interactive", "slo": {"tpot_ms": 10}}, 500, 10),
        ({"priority": "interactive", "deadline_ms": 900}, None, 30),
        ({}, 2000, None),
        ({"service_tier": "auto"}, 2000, None),
    ],
)
def test_a_request_without_targets_gets_those_of_its_class(start, body, ttft_ms, tpot_ms):
    targets = {"flex": Slo(60_000 * MS), "interactive": Slo(500 * MS, 30 * MS), "default": Slo(2000 * MS)}
    server = start(class_targets=targets)
    server.client.post("/v1/completions", json={"prompt": "hello", **body}).raise_for_status()
    found = server.manager.specs[-1].slo
    assert (found.ttft_ns, found.tpot_ns) == tuple(None if ms is None else ms * MS for ms in (ttft_ms, tpot_ms))


def test_a_class_without_targets_leaves_them_to_the_scheduler(start):
    server = start(class_targets={"flex": Slo(60_000 * MS)})
    server.client.post("/v1/completions", json={"prompt": "hello", "service_tier": "scale"}).raise_for_status()
    assert server.manager.specs[-1].slo is None


@pytest.mark.parametrize(
    ("body", "headers", "tenant"),
    [
        ({}, {}, ""),
        ({"user": "u"}, {}, "u"),
        ({"user": "u"}, {"X-Tenant": "h"}, "h"),
        ({"user": "u", "tenant": "t"}, {"X-Tenant": "h"}, "t"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_whose_request_it_is(start, path, body, headers, tenant):
    server = start()
    prompt = {"text": "hello"} if path == "/generate" else {"prompt": "hello"}
    server.client.post(path, json={**prompt, **body}, headers=headers).raise_for_status()
    assert server.manager.specs[-1].tenant == tenant
