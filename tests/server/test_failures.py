"""What happens when something breaks, and when a client disconnects."""

import json
import socket
import time

import pytest

from tests.server.fake import FakeManager, finish
from tests.server.sse import events
from tokenyard.base import EngineDeadError


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_error_after_the_first_byte_is_one_event_and_the_end(start):
    manager = FakeManager()
    manager.fail_after, manager.failure = 2, EngineDeadError("the scheduler died")
    server = start(manager)
    answer = server.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9, "stream": True})
    assert answer.status_code == 200
    *chunks, error = events(answer.text)
    assert len(chunks) == 2
    assert error["error"]["code"] == "engine_dead"
    assert "[DONE]" not in answer.text


def test_error_before_the_first_byte_is_a_status(start):
    manager = FakeManager()
    manager.fail_after, manager.failure = 0, EngineDeadError("the scheduler died")
    answer = start(manager).client.post("/v1/completions", json={"prompt": "hello", "stream": True})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


def test_a_fault_of_ours_is_a_500_without_details(start):
    manager = FakeManager()
    manager.fail_after, manager.failure = 0, RuntimeError("secret detail")
    answer = start(manager).client.post("/v1/completions", json={"prompt": "hello"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cause", "status"), [("queue_full", 503), ("tenant_limit", 429)])
def test_a_refused_request_gets_its_status_and_retry_after(start, cause, status, stream):
    manager = FakeManager()
    manager.reject = finish("abort", cause=cause, message="the queue is full")
    answer = start(manager).client.post("/v1/completions", json={"prompt": "hello", "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("the queue is full", cause)


def test_an_abort_on_purpose_is_a_finish_reason(start):
    manager = FakeManager()
    manager.reject = finish("abort", cause="cancelled", message="the request was aborted")
    server = start(manager)
    answer = server.client.post("/v1/completions", json={"prompt": "hello"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    native = server.client.post("/generate", json={"text": "hello"}).json()
    assert native["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_request_id_in_flight_cannot_be_used_twice(start):
    manager = FakeManager()
    manager.delay_s = 0.2
    server = start(manager)
    body = {"text": "hello", "rid": "same", "sampling_params": {"max_new_tokens": 20}, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as first:
        chunks = first.iter_bytes()  # kept: the response closes when this is collected
        next(chunks)
        second = server.client.post("/generate", json=body)
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "duplicate_rid"
    assert wait_until(lambda: server.state.open_requests == 0)
    manager.delay_s = 0.0
    assert server.client.post("/generate", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_client_that_disconnects_cancels_its_request(start, path, stream):
    manager = FakeManager()
    manager.delay_s = 0.1
    server = start(manager)
    content = {"prompt": "hello", "max_tokens": 50, "stream": stream, "rid": "gone"}
    if path == "/generate":
        content = {"text": "hello", "sampling_params": {"max_new_tokens": 50}, "stream": stream, "rid": "gone"}
    body = json.dumps(content).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: bool(manager.specs))
    assert wait_until(lambda: manager.closed == ["gone"])
    assert wait_until(lambda: server.state.open_requests == 0)


def test_a_batch_is_cancelled_as_one(start):
    manager = FakeManager()
    manager.delay_s = 0.1
    server = start(manager)
    body = {"prompt": ["hello", "dog", "fox"], "max_tokens": 50, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    assert wait_until(lambda: len(manager.closed) == 3)


def test_garbage_bodies_are_400(server):
    for content in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}'):
        answer = server.client.post("/v1/completions", content=content)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
