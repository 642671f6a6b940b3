"""Profiles over HTTP: steps of the scheduler and streams of the API process in one file."""


def test_a_profile_holds_steps_and_streams(server):
    watching = list(server.state.observer_factories)
    assert server.client.post("/start_profile").json() == {"success": True}
    server.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "rid": "r1"})
    answer = server.client.post("/stop_profile")
    assert "attachment" in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    assert events[0] == {"name": "plan", "ph": "X"}
    begins = [event["name"] for event in events if event["ph"] == "b"]
    assert begins == ["r1/0", "queue", "prefill", "decode"]
    assert len({(event["id"], event["cat"]) for event in events if event["ph"] in "be"}) == 1
    times = {phase: [event["ts"] for event in events if event["ph"] == phase] for phase in "be"}
    assert min(times["b"]) == times["b"][0]
    assert max(times["e"]) == times["e"][0]
    assert server.state.observer_factories == watching


def test_starting_twice_or_stopping_nothing_is_refused(server):
    assert server.client.post("/stop_profile").json()["error"]["code"] == "no_profile"
    server.client.post("/start_profile")
    assert server.client.post("/start_profile").json()["error"]["code"] == "profile_runs"
    assert server.client.post("/stop_profile").status_code == 200
