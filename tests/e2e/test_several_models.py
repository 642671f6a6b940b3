"""`tokenyard serve` with several models: loaded on demand, unloaded by idle time and by number, over HTTP."""

import concurrent.futures
import os
import re
import signal
import time

import httpx2
import pytest

from tests.e2e.servers import Server, alive
from tokenyard.config import DEMO_MODEL

MOCK = ("--executor", "mock", "--mock-step-ms", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three models and a file that is none."""
    found = tmp_path_factory.mktemp("models")
    for name in ("fox", "dog", "cat"):
        (found / name).symlink_to(DEMO_MODEL)
    (found / "broken.gguf").write_bytes(b"no GGUF file")
    return found


@pytest.fixture(scope="module")
def server(folder):
    found = Server(str(folder), *MOCK, "--max-loaded-models", "2", "--keep-alive", "1h")
    yield found
    assert found.close() == 0


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as found:
        yield found


def ask(client, model, **fields):
    return client.post("/v1/completions", json={"model": model, "prompt": "Once", "max_tokens": 4, **fields})


def loaded(client):
    return {model["name"] for model in client.get("/api/ps").json()["models"]}


def wait_until(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_models_load_on_demand_and_the_longest_unused_leaves(client):
    assert {model["name"] for model in client.get("/api/tags").json()["models"]} == {"fox", "dog", "cat"}
    assert loaded(client) == set()
    for model in ("fox", "dog"):
        answer = ask(client, model)
        assert answer.status_code == 200
        assert answer.json()["model"] == model
    assert loaded(client) == {"fox", "dog"}
    assert ask(client, "cat").status_code == 200
    assert loaded(client) == {"dog", "cat"}
    states = {card["id"]: card["status"] for card in client.get("/v1/models").json()["data"]}
    assert states == {"fox": "unloaded", "dog": "loaded", "cat": "loaded"}


@pytest.mark.slow
def test_a_model_in_use_stays_and_another_waits_for_it(client):
    """Requests for three models at once, where two are loaded at most: all are answered whole."""
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda place: ask(client, ("fox", "dog", "cat")[place % 3], max_tokens=60), range(9)))
    assert [answer.status_code for answer in answers] == [200] * 9
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [60] * 9


def test_keep_alive_of_a_request_unloads_its_model_after_it(client):
    body = {"model": "fox:latest", "prompt": "Once", "stream": False, "keep_alive": 0, "options": {"num_predict": 3}}
    answer = client.post("/api/generate", json=body)
    assert answer.json()["eval_count"] == 3
    wait_until(lambda: "fox" not in loaded(client))
    assert client.post("/api/generate", json={"model": "cat", "keep_alive": "5m"}).json()["done_reason"] == "load"
    assert "cat" in loaded(client)
    assert client.post("/api/generate", json={"model": "cat", "keep_alive": 0}).json()["done_reason"] == "unload"
    wait_until(lambda: "cat" not in loaded(client))


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"model": "owl", "prompt": "x"}, 404, "the model 'owl' does not exist; .*'dog', 'fox'"),
        ("/v1/completions", {"prompt": "x"}, 400, "names no model"),
        ("/tokenize", {"prompt": "x"}, 400, "names no model"),
        ("/v1/completions", {"model": "broken", "prompt": "x"}, 503, "broken.gguf is damaged"),
        ("/api/chat", {"model": "fox", "messages": [], "keep_alive": "soon"}, 400, "keep_alive must be"),
        ("/api/show", {"model": "owl"}, 404, "'owl' not found"),
        ("/api/show", {}, 400, "must name a model"),
        ("/api/pull", {"model": "owl"}, 404, "'owl' not found"),
        ("/api/copy", {"source": "fox", "destination": "dog"}, 400, "already"),
        ("/api/copy", {"source": "fox"}, 400, "destination must be a name"),
        ("/api/copy", [], 400, "must be a JSON object"),
    ],
)
def test_bad_requests_say_what_is_wrong(client, path, body, status, words):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert re.search(words, error if isinstance(error, str) else error["message"])


def test_copies_are_names_of_their_model(client):
    assert client.post("/api/copy", json={"source": "dog", "destination": "pet"}).status_code == 200
    assert ask(client, "pet").json()["model"] == "dog"
    assert "pet" in {model["name"] for model in client.get("/api/tags").json()["models"]}
    assert client.request("DELETE", "/api/delete", json={"model": "pet"}).status_code == 200
    assert ask(client, "pet").status_code == 404
    kept = client.request("DELETE", "/api/delete", json={"model": "dog"})
    assert kept.status_code == 403
    assert "not this server's to delete" in kept.json()["error"]


@pytest.mark.slow
def test_a_model_that_is_added_to_the_folder_is_served(client, folder):
    (folder / "late").symlink_to(DEMO_MODEL)
    assert ask(client, "late").status_code == 200
    assert client.post("/api/pull", json={"model": "late", "stream": False}).json() == {"status": "success"}


@pytest.mark.slow
def test_an_engine_that_is_killed_is_loaded_again(server, client):
    ask(client, "fox")
    before = set(server.children())
    assert before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert ask(client, "fox").status_code == 200
    wait_until(lambda: not any(alive(pid) for pid in before))


@pytest.mark.slow
def test_a_model_that_does_not_fit_or_load_is_refused(folder, tmp_path):
    """The wait for a model has a bound, and an engine that cannot start says why."""
    server = Server(str(folder / "fox"), str(folder / "dog"), *MOCK, "--model-memory-gb", "0.1")
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        answer = ask(client, "fox")
        assert answer.status_code == 503
        assert "takes 0.60 GB, and all models together may take 0.10 GB" in answer.json()["error"]["message"]
    assert server.close() == 0
    (tmp_path / "settings.yaml").write_text("model-load-timeout-s: 0.2")
    settings = ("--config", str(tmp_path / "settings.yaml"))
    server = Server(str(folder / "fox"), str(folder / "dog"), *MOCK, *settings)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        answer = ask(client, "fox")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        assert "'fox' is still loading" in answer.json()["error"]["message"]
    assert server.close() == 0


def test_settings_of_one_model_are_refused_with_several(folder):
    server = Server(str(folder), "--chat-template", "x.jinja", ready=False)
    assert server.wait() == 2
    assert "--chat-template is for one model" in server.log
