"""Bodies of very many parts are refused before they are read; long texts are not."""

import json
import logging

import pytest

from tokenyard.base import InvalidRequestError
from tokenyard.server.http.large_bodies import INLINE_BYTES, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_parts
from tokenyard.server.protocol import CompletionRequest, parse

TEXT = 'a, {"b": [1, 2]}, "c\\" d", ' * 200_000


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
        b"[" + b"{}," * (MAX_CONTAINERS + 1) + b"{}]",
        b'{"a":"x","b":' + b"[" * MAX_CONTAINERS + b" " * INLINE_BYTES,
        b"{" + b'"k":"",' * (MAX_STRINGS // 2 + 1) + b'"k":""}',
    ],
)
def test_too_many_parts_are_refused(body):
    with pytest.raises(InvalidRequestError, match="too many parts"):
        check_parts(body)


def test_text_that_is_full_of_json_is_text():
    body = json.dumps({"prompt": TEXT, "echo": True}).encode()
    assert body.count(b",") > 600_000
    assert body.count(b"{") > MAX_CONTAINERS
    check_parts(body)
    assert parse(body, CompletionRequest).prompt == TEXT


def test_a_prompt_may_have_a_million_ids():
    assert len(parse(b'{"prompt":[' + b"1," * 1_000_000 + b"1]}", CompletionRequest).prompt) == 1_000_001


def test_a_string_without_an_end_is_no_json():
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse(b'{"prompt":"' + b"\\\\n," * 300_000, CompletionRequest)


def test_unknown_fields_write_little_to_the_log(caplog, monkeypatch):
    monkeypatch.setattr("tokenyard.server.protocol.seen_unknown", set())
    names = {f"unknown_{place}_{'x' * 70}": 1 for place in range(100)}
    with caplog.at_level(logging.WARNING):
        parse(json.dumps({"prompt": "a", **names}).encode(), CompletionRequest)
    (record,) = caplog.records
    assert len(record.getMessage()) < 2000
    assert "and 80 more" in record.getMessage()


def test_a_large_request_is_answered_like_a_small_one(server):
    # Over the wire, with a form whose grammar is also made off the event loop.
    form = {"enum": [f"value {place}" for place in range(30_000)]}
    body = {"prompt": "hello", "max_tokens": 1, "json_schema": form}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    native = {"text": "hello", "sampling_params": {"max_new_tokens": 1, "json_schema": form}}
    assert server.client.post("/generate", json=native).status_code == 200
    grammar = server.manager.specs[-1].grammar
    assert grammar == server.manager.specs[-2].grammar
    assert '"value 29999"' in grammar
