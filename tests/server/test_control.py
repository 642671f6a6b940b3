"""Probes, models, tokenizing, metrics, authentication and the other routes without generation."""

import gzip
from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake import FakeManager
from tokenyard.base.admin_paths import ADMIN_PATHS
from tokenyard.server.http.api_keys import OPEN_PATHS


def test_probes_of_a_healthy_server(server):
    for path in ("/health", "/ready", "/ping", "/health_generate"):
        assert server.client.get(path).status_code == 200
    assert server.client.head("/health").status_code == 200
    assert server.client.head("/ready").status_code == 200


def test_old_heartbeat_makes_the_probes_fail(server):
    server.manager.age_s = 1000.0
    ill = server.client.get("/health")
    assert (ill.status_code, ill.text[:46]) == (503, "the scheduler has been unhealthy for 1000 s; s")
    assert server.client.get("/ready").text.startswith("stuck: the scheduler has been unhealthy")
    server.manager.age_s = float("inf")
    assert server.client.get("/health").text == "the engine has ended"


def test_while_loading_alive_but_not_ready(start):
    server = start(loading=True)
    assert server.client.get("/health").status_code == 200
    answer = server.client.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    refused = server.client.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "loading"
    assert server.client.get("/v1/loads").status_code == 503
    assert server.client.get("/metrics").status_code == 200


def test_while_draining_new_requests_are_refused(server):
    server.state.start_draining()
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    refused = server.client.post("/generate", json={"text": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


def test_models(server):
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 64)
    assert server.client.get("/v1/models/fake").json() == card
    assert server.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_models_have_what_anthropics_clients_read(server):
    listed = server.client.get("/v1/models").json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "tuned")
    card = server.client.get("/v1/models/fake").json()
    assert (card["id"], card["type"], card["display_name"]) == ("fake", "model", "fake")
    assert card["max_input_tokens"] == card["max_tokens"] == card["max_model_len"]
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]


def test_a_model_has_several_names(start):
    server = start(model_aliases=("gpt-5", "llama3:8b"))
    listed = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed if card["root"] == "fake"] == ["fake", "gpt-5", "llama3:8b"]
    assert server.client.get("/v1/models/llama3:8b").json()["id"] == "llama3:8b"
    for name in ("fake", "gpt-5", "llama3:8b", "default"):
        answer = server.client.post("/v1/completions", json={"model": name, "prompt": "x"})
        assert (answer.status_code, answer.json()["model"]) == (200, "fake")
    tuned = server.client.post("/v1/completions", json={"model": "llama3:8b:tuned", "prompt": "x"})
    assert tuned.status_code == 200
    for name in ("gpt-6", "gpt-5:none", "llama3"):
        refused = server.client.post("/v1/completions", json={"model": name, "prompt": "x"}).json()["error"]
        assert "'fake', 'gpt-5', 'llama3:8b'" in refused["message"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(server, prefix):
    answer = server.client.post(f"{prefix}/tokenize", json={"prompt": "hello dog"}).json()
    assert answer == {"tokens": [1, 11], "count": 2, "max_model_len": 64}
    text = server.client.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "hello dog"}


def test_tokens_by_name(server):
    answer = server.client.post("/tokenize", json={"prompt": "hello dog", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["hello", "dog"]
    assert server.client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_the_page_of_the_api_needs_no_other_server(server):
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for word in ("/v1/chat/completions", "messages", "/health", "list of object"):
        assert word in page.text
    assert "http" not in page.text.replace("http-equiv", "")
    assert server.client.get("/redoc").status_code == 404


def test_tokenize_messages(server):
    messages = [{"role": "user", "content": "lazy dog"}]
    assert server.client.post("/tokenize", json={"messages": messages}).json()["count"] == 2
    assert server.client.post("/tokenize", json={}).status_code == 400


def test_without_tokenizer_text_is_refused(start):
    manager = FakeManager()
    manager.tokenizer = None
    server = start(manager)
    assert server.client.post("/tokenize", json={"prompt": "x"}).status_code == 400
    assert server.client.post("/detokenize", json={"tokens": [1]}).status_code == 400


def test_flush_cache(server):
    assert server.client.get("/flush_cache").status_code == 200
    assert server.client.post("/flush_cache").status_code == 200
    server.manager.flushable = False
    assert server.client.post("/flush_cache").status_code == 400


def test_abort_pause_continue_reach_the_engine(server):
    assert server.client.post("/abort_request", json={"rid": "a"}).status_code == 200
    assert server.client.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert server.client.post("/abort_request").status_code == 400
    assert server.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert server.client.post("/pause_generation", json={"mode": "nap"}).status_code == 400
    assert server.client.post("/continue_generation").status_code == 200
    assert server.manager.calls == [("abort", None), ("pause", "retract"), ("continue_",)]


def test_aborting_an_id_reaches_every_prompt_of_its_request(start):
    manager = FakeManager()
    manager.delay_s = 0.1
    server = start(manager)
    body = {"text": ["hello", "dog"], "rid": "x", "sampling_params": {"max_new_tokens": 50}, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as answer:
        pieces = answer.iter_bytes()  # kept: the response closes when this is collected
        next(pieces)
        assert server.client.post("/abort_request", json={"rid": "x"}).status_code == 200
    assert sorted(manager.calls) == [("abort", "x-0"), ("abort", "x-1")]


def test_load_reports(server):
    load = server.client.get("/v1/loads").json()["data"][0]
    assert (load["running_requests"], load["queued_requests"], load["token_usage"]) == (3, 2, 0.25)
    assert server.client.get("/get_load").json()[0]["num_reqs"] == 5


def test_loads_by_section(server):
    load = server.client.get("/v1/loads", params={"include": "memory,spec"}).json()["data"][0]
    assert load == {"dp_rank": 0, "memory": {"used_tokens": 25, "total_tokens": 100}, "spec": None}
    assert "queues" in server.client.get("/v1/loads", params={"include": "all"}).json()["data"][0]
    for wrong in ({"include": "everything"}, {"format": "xml"}, {"dp_rank": 1}, {"dp_rank": "x"}):
        assert server.client.get("/v1/loads", params=wrong).status_code == 400


def test_loads_as_prometheus(server):
    answer = server.client.get("/v1/loads", params={"include": "all", "format": "prometheus"})
    assert answer.headers["content-type"].startswith("text/plain")
    values = {s.name: s.value for family in text_string_to_metric_families(answer.text) for s in family.samples}
    assert values["tokenyard_load_running_requests"] == 3
    assert values["tokenyard_load_queues_counters_retracted"] == 4
    assert values["tokenyard_load_memory_total_tokens"] == 100


def test_server_info_hides_keys(start):
    server = start(info={"model_path": "m"}, api_key="secret")
    text = server.client.get("/server_info", headers={"Authorization": "Bearer secret"}).text
    assert '"model_path":"m"' in text
    assert "secret" not in text


def test_the_boot_id_changes_with_every_cache_that_is_lost(start):
    boot_ids = []
    for server in (start(), start()):
        for server.manager.lost in (0, 0, 1):
            boot_ids.append(server.client.get("/server_info").json()["boot_id"])
    assert [boot_ids.index(one) for one in boot_ids] == [0, 0, 2, 3, 3, 5]


def test_server_info_shows_the_sampling_defaults(start):
    server = start(default_sampling={"temperature": 0.8})
    assert server.client.get("/server_info").json()["default_sampling_params"] == {"temperature": 0.8}


def test_metrics_count_what_was_answered(start):
    server = start(metrics_compat=["sglang", "vllm"], info={"page_size": 16})
    body = {"prompt": "hello", "max_tokens": 5, "stream": True}
    server.client.post("/v1/completions", json=body)
    families = {family.name: family for family in text_string_to_metric_families(server.client.get("/metrics").text)}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value for f in families.values() for sample in f.samples
    }
    assert samples["tokenyard_generation_tokens_total", ("model", "fake")] == 5
    assert samples["tokenyard_requests_total", ("finished_reason", "length"), ("model", "fake")] == 1
    assert samples["tokenyard_inter_token_latency_seconds_count", ("model", "fake")] == 4
    assert samples["tokenyard_time_to_first_token_seconds_count", ("model", "fake")] == 1
    assert (
        samples["tokenyard_targets_total", ("class", "normal"), ("met", "yes"), ("model", "fake"), ("target", "ttft")]
        == 1
    )
    assert (
        samples["tokenyard_targets_total", ("class", "normal"), ("met", "no"), ("model", "fake"), ("target", "tpot")]
        == 1
    )
    assert samples["tokenyard_retractions_total", ("model", "fake")] == 4
    assert samples["vllm:num_preemptions_total", ("model_name", "fake")] == 4
    assert samples["sglang:num_running_reqs", ("model_name", "fake")] == 3
    assert samples["sglang:cache_hit_rate", ("model_name", "fake")] == 0.25
    assert samples["sglang:gen_throughput", ("model_name", "fake")] > 0
    assert samples["sglang:num_aborted_requests_total", ("model_name", "fake")] == 2
    stage = "sglang:per_stage_req_latency_seconds_count"
    for name in ("queue", "prefill", "decode"):
        own = samples[f"tokenyard_{name}_time_seconds_count", ("model", "fake")]
        assert samples[stage, ("model_name", "fake"), ("stage", name)] == own
    assert samples["vllm:prefix_cache_queries_total", ("model_name", "fake")] == 40
    assert samples["vllm:request_prefill_time_seconds_count", ("model_name", "fake")] == 1
    assert samples["vllm:cache_config_info", ("block_size", "16"), ("model_name", "fake"), ("num_gpu_blocks", "6")] == 1
    assert samples["vllm:num_requests_waiting", ("model_name", "fake")] == 2


def test_finished_requests_are_logged_if_asked_for(start, caplog):
    caplog.set_level("INFO", logger="tokenyard.requests")
    start().client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
    assert not [record for record in caplog.records if record.name == "tokenyard.requests"]
    start(log_requests=True).client.post("/generate", json={"text": "hello", "rid": "r9"})
    assert [message for message in caplog.messages if "rid=r9" in message and "reason=length" in message]


def test_errors_of_the_framework_use_our_envelope(server):
    missing = server.client.get("/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = server.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert (wrong.json()["error"]["code"], wrong.headers["allow"]) == ("method_not_allowed", "POST")


def test_body_limit(start):
    server = start(max_body_bytes=100)
    for path in ("/v1/completions", "/tokenize"):
        answer = server.client.post(path, json={"prompt": "x" * 200})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_openapi_knows_every_route(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/health", "/metrics"} <= set(paths)
    assert "requestBody" in paths["/v1/chat/completions"]["post"]


def status(server, path, key=None, method="GET"):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.client.request(method, path, headers=headers).status_code


def test_api_key_guards_everything_but_probes_and_metrics(start):
    server = start(api_key="k1", admin_api_key="k2")
    for path in OPEN_PATHS:
        assert status(server, path) == 200
    for path in ("/v1/models", "/openapi.json", "/v1/loads", "/nothing", *ADMIN_PATHS):
        assert status(server, path) == 401
        assert status(server, path, "wrong") == 401
    assert status(server, "/v1/models", "k1") == 200
    assert status(server, "/v1/models", "k2") == 200
    assert status(server, "/server_info", "k1") == 401
    assert status(server, "/server_info", "k2") == 200


def test_admin_key_alone_leaves_the_rest_open(start):
    server = start(admin_api_key="k2")
    assert status(server, "/v1/models") == 200
    assert status(server, "/flush_cache") == 401
    assert status(server, "/flush_cache", "k2") == 200


def test_api_key_alone_opens_admin_paths(start):
    server = start(api_key="k1")
    assert status(server, "/flush_cache", "k1", "POST") == 200


@pytest.mark.parametrize("more", [{"api_key": "k1"}, {"admin_api_key": "k2"}])
def test_a_tenants_key_grants_its_own_access_and_names_the_tenant(start, more):
    server = start(tenant_keys={"acme": "ka", "other": "ko"}, **more)
    assert status(server, "/v1/models") == 401
    assert status(server, "/v1/models", "wrong") == 401
    assert status(server, "/v1/models", "ko") == 200
    assert status(server, "/flush_cache", "ka", "POST") == 401
    body = {"prompt": "hello", "max_tokens": 1, "tenant": "other", "user": "me"}
    headers = {"Authorization": "Bearer ka", "X-Tenant": "other"}
    server.client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    server.client.post("/generate", json={"text": "hello", "tenant": "other"}, headers=headers).raise_for_status()
    assert [spec.tenant for spec in server.manager.specs] == ["acme", "acme"]


def test_the_api_key_next_to_tenants_keys_leaves_the_tenant_to_the_request(start):
    server = start(tenant_keys={"acme": "ka"}, api_key="k1")
    headers = {"Authorization": "Bearer k1"}
    server.client.post("/v1/completions", json={"prompt": "hello", "user": "me"}, headers=headers).raise_for_status()
    assert server.manager.specs[-1].tenant == "me"


def test_cors_is_off_by_default(start):
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in start().client.get("/health", headers=origin).headers
    allowed = start(cors_allow_origins=["http://page.example"]).client.get("/health", headers=origin)
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_compressed_body_is_refused_by_name(server, path):
    body = gzip.compress(b'{"prompt": "hello"}')
    answer = server.client.post(path, content=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert "compressed (gzip)" in answer.json()["error"]["message"]
    for harmless in ("identity", "utf-8"):
        plain = server.client.post(path, content=b'{"prompt": "hello"}', headers={"content-encoding": harmless})
        assert plain.status_code == 200


def test_a_wrong_argument_is_named_without_paths_of_our_files(server):
    answer = server.client.get("/v1/loads?dp_rank=x")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "dp_rank")
    assert "integer" in error["message"]
    assert ".py" not in error["message"]


def test_several_ranks_are_reported_separately(server):
    """With one rank, /health and /metrics do not speak of ranks."""
    engine, client = server.manager, server.client
    assert "ranks" not in client.get("/health").text
    assert "tokenyard_rank_" not in client.get("/metrics").text
    engine.ranks, engine.down = 3, {1}
    health = client.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["down"]) == (200, "degraded", [1])
    assert [rank["status"] for rank in health.json()["ranks"]] == ["up", "down", "up"]
    assert [load["dp_rank"] for load in client.get("/v1/loads").json()["data"]] == [0, 2]
    (one,) = client.get("/v1/loads?dp_rank=2").json()["data"]
    assert (one["dp_rank"], one["running_requests"]) == (2, 3)
    assert client.get("/v1/loads?dp_rank=3").json()["error"]["code"] == "unknown_rank"
    assert 'tokenyard_load_running_requests{dp_rank="2"} 3.0' in client.get("/v1/loads?format=prometheus").text
    assert [load["dp_rank"] for load in client.get("/get_load").json()] == [0, 2]
    assert len(client.get("/server_info").json()["internal_states"]) == 2
    metrics = client.get("/metrics").text
    assert 'tokenyard_rank_up{dp_rank="1",model=' in metrics
    assert metrics.count("tokenyard_rank_running_requests{") == 2
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
    for rank, status in (("2", 200), ("3", 400), ("x", 400), ("-1", 400)):
        answer = client.post("/generate", json=body, headers={"X-Data-Parallel-Rank": rank})
        assert answer.status_code == status
    assert engine.specs[-1].rank == 2
    assert client.post("/generate", json={**body, "routed_dp_rank": 1}).status_code == 200
    assert engine.specs[-1].rank == 1
    engine.down, engine.age_s = {0, 1, 2}, 1e9
    assert client.get("/health").json()["status"] == "down"


def test_the_admin_key_opens_all_paths_as_a_router_sends_one_key(start):
    for more in ({"api_key": "k1"}, {"tenant_keys": {"acme": "ka"}}):
        server = start(admin_api_key="boss", **more)
        headers = {"authorization": "Bearer boss"}
        body = {"prompt": "hello", "max_tokens": 1}
        assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert server.client.get("/server_info", headers=headers).status_code == 200
        assert server.client.get("/server_info", headers={"authorization": "Bearer k1"}).status_code == 401
