"""Requests of other sites' pages on a running server."""

import pytest

EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
CHANGES = (
    ("POST", "/flush_cache"),
    ("POST", "/pause_generation"),
    ("PATCH", "/v1/requests/x"),
    ("POST", "/v1/scheduler"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
)


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_a_page_of_another_site_changes_nothing(start, method, path):
    answer = start().client.request(method, path, headers=EVIL, content=b"{}")
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["type"] == "permission_error"
    assert "http://evil.example" in error["message"]


def test_the_live_page_and_programs_may_do_the_same(start):
    server = start()
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, own):
        assert server.client.post("/pause_generation", headers=headers).status_code == 200


def test_a_site_that_is_named_may_call(start):
    server = start(cors_allow_origins=["http://evil.example"])
    assert server.client.post("/pause_generation", headers=EVIL).status_code == 200


def test_a_key_is_enough(start):
    server = start(api_key="k")
    assert server.client.post("/pause_generation", headers=EVIL).status_code == 401
    with_key = EVIL | {"Authorization": "Bearer k"}
    assert server.client.post("/pause_generation", headers=with_key).status_code == 200


def test_a_name_that_was_given_this_address_is_refused_on_loopback(start):
    server = start(loopback_only=True)
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert server.client.post("/v1/chat/completions", headers=rebound, content=b"{}").status_code == 403
    assert server.client.get("/server_info", headers={"Host": "evil.example"}).status_code == 403
    assert server.client.get("/server_info").status_code == 200
    assert server.client.get("/health", headers={"Host": "evil.example"}).status_code == 200
