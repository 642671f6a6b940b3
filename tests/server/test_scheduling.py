"""Reading and changing the order of the queue over HTTP."""

import pytest


def test_the_policy_is_shown_with_its_bound_its_note_and_its_settings(start):
    server = start(info={"model_path": "m", "schedule_policy": "lpm", "policy_options": {}, "slo_tpot_ms": 40.0})
    assert server.client.get("/v1/scheduler").json() == {
        "policy": "priority+lpm",
        "options": {},
        "overtaking": "a bound",
        "note": "a note",
        "priority_function": "mod:f",
        "adaptive": {},
        "settings": {"slo_tpot_ms": 40.0},
    }
    assert server.client.get("/server_info").json()["internal_states"][0]["policy_note"] == "a note"


def test_a_policy_is_changed(server):
    answer = server.client.post("/v1/scheduler", json={"policy": "vtc"})
    assert (answer.status_code, answer.json()["policy"]) == (200, "priority+lpm")
    server.client.post("/v1/scheduler", json={"policy": "random", "options": {"seed": 3}})
    assert server.manager.calls == [("set_policy", "vtc", {}), ("set_policy", "random", {"seed": 3})]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"policy": "fastest"}, "did you mean fcfs"),
        ({"policy": "os:system"}, "loaded only when the server starts"),
        ({}, "policy"),
        ({"policy": 7}, "policy"),
        ({"policy": "lpm", "options": {"seed": [1]}}, "options"),
    ],
)
def test_a_wrong_policy_is_refused_and_nothing_changes(server, body, words):
    answer = server.client.post("/v1/scheduler", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert server.manager.calls == []


def test_a_user_policy_may_be_set_again_if_the_server_started_with_it(start):
    server = start(info={"schedule_policy": "mine:Policy"})
    assert server.client.post("/v1/scheduler", json={"policy": "mine:Policy"}).status_code == 200


def test_only_the_admin_key_opens_it(start):
    server = start(api_key="k1", admin_api_key="k2")
    for key, status in (("k1", 401), ("k2", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.client.post("/v1/scheduler", json={"policy": "vtc"}, headers=headers).status_code == status
        assert server.client.get("/v1/scheduler", headers=headers).status_code == status


def test_the_age_that_the_fleets_router_states_is_believed_and_a_tenants_is_not(start):
    server = start(tenant_keys={"acme": "ka"}, api_key="fleet")
    for key, age, tenant in (
        ("fleet", "1500.25", "ann"),
        ("fleet", "much", ""),
        ("fleet", "-5", ""),
        ("fleet", "inf", ""),
        ("ka", "1500", "boss"),
    ):
        headers = {"authorization": f"Bearer {key}", "x-tokenyard-age-ms": age, "x-tokenyard-tenant": tenant}
        body = {"prompt": "hello", "max_tokens": 1}
        assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert [spec.age_ns for spec in server.manager.specs] == [1_500_250_000, 0, 0, 24 * 3600 * 10**9, 0]
    assert [spec.tenant for spec in server.manager.specs] == ["ann", "", "", "", "acme"]
