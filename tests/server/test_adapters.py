"""LoRA adapters over HTTP: who is asked for, which are listed, loading and unloading them."""

import pytest

from tests.server.fake import FakeManager

ADAPTER = "tuned"


def post(server, path, **body):
    return server.client.post(path, json=body)


WAYS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "hello"}], "stream": False}),
    "embeddings": ("/v1/embeddings", {"input": "hello"}),
    "ollama embed": ("/api/embed", {"input": "hello"}),
    "score": ("/v1/score", {"query": "hello", "items": ["world"], "label_token_ids": [1]}),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [ADAPTER, f"fake:{ADAPTER}", f"default:{ADAPTER}"])
def test_model_names_an_adapter_on_every_way_in(server, way, model):
    path, body = WAYS[way]
    answer = post(server, path, model=model, **body)
    assert answer.status_code == 200, answer.text
    assert {spec.lora for spec in server.manager.specs} == {ADAPTER}
    assert answer.json()["model"] == model
    post(server, path, model="fake", **body)
    assert server.manager.specs[-1].lora == ""


def test_lora_path_names_one_as_well(server):
    for path, body in (WAYS["chat"], WAYS["completions"], WAYS["embeddings"]):
        assert post(server, path, lora_path=ADAPTER, **body).status_code == 200
        assert post(server, path, lora_path=ADAPTER, model=f"fake:{ADAPTER}", **body).status_code == 200
    assert {spec.lora for spec in server.manager.specs} == {ADAPTER}
    answer = post(server, "/generate", text=["hello", "world"], lora_path=[ADAPTER, None])
    assert answer.status_code == 200
    assert [spec.lora for spec in server.manager.specs[-2:]] == [ADAPTER, ""]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "fake:other"}, 404, "model", "'fake:other' does not exist; this server has 'fake', 'tuned'"),
        ({"lora_path": "other"}, 404, "lora_path", "'other' does not exist"),
        ({"lora_path": "../../etc"}, 404, "lora_path", "does not exist"),
        ({"lora_path": ["tuned"]}, 400, "lora_path", "the name of an adapter"),
        ({"lora_path": 7}, 400, "lora_path", "lora_path"),
        ({"model": ADAPTER, "lora_path": "other"}, 400, "lora_path", "one of the two"),
    ],
)
def test_wrong_names_are_refused(server, fields, status, param, words):
    path, body = WAYS["completions"]
    answer = post(server, path, **fields, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert words in answer.json()["error"]["message"]
    assert not server.manager.specs


def test_adapters_are_listed_with_their_parent(server, start):
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("fake", None), (ADAPTER, "fake")]
    assert server.client.get(f"/v1/models/{ADAPTER}").json() == cards[1]
    assert [card["id"] for card in start(loading=True).client.get("/v1/models").json()["data"]] == ["fake"]


@pytest.fixture
def adapters(tmp_path):
    """A folder with two adapters, one of which is a link to outside, as are the files of a third."""
    for folder in ("inside/good", "outside/secret", "inside/linked files"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside/secret")
    (tmp_path / "inside/linked files/adapter_config.json").symlink_to("/etc/passwd")
    return tmp_path / "inside"


def test_adapters_are_loaded_from_below_the_given_folders_alone(start, adapters):
    server = start(lora_dirs=(str(adapters),))
    for name, path in (("a", str(adapters / "good")), ("b", "good"), ("c", "./good/../good")):
        answer = post(server, "/load_lora_adapter", lora_name=name, lora_path=path)
        assert answer.status_code == 200
        assert answer.json()["loaded_adapters"][name] == str(adapters / "good")
    refusals = set()
    for path in (
        "link",
        "../outside/secret",
        str(adapters.parent / "outside/secret"),
        "linked files",
        "/etc",
        "absent",
        "",
        ".",
        "~",
        "good\0",
        str(adapters),
    ):
        answer = post(server, "/load_lora_adapter", lora_name="d", lora_path=path)
        assert answer.status_code == 400, path
        refusals.add(answer.json()["error"]["message"].replace(repr(path), "PATH"))
    assert refusals == {"there is no adapter PATH in the folders of --lora-dirs"}
    answer = post(server, "/unload_lora_adapter", lora_name="a")
    assert "a" not in answer.json()["loaded_adapters"]
    assert post(server, "/unload_lora_adapter", lora_name="a").status_code == 404


def test_what_cannot_be_loaded_is_refused(start, adapters, server):
    answer = post(server, "/load_lora_adapter", lora_name="a", lora_path=str(adapters / "good"))
    assert (answer.status_code, "--lora-dirs" in answer.text) == (400, True)
    server = start(lora_dirs=(str(adapters),))
    for body in ({"lora_name": "fake", "lora_path": "good"}, {"lora_name": "a"}, {"lora_name": 1, "lora_path": "good"}):
        assert post(server, "/load_lora_adapter", **body).status_code == 400
    assert [*server.manager.adapters.loaded] == [ADAPTER]


def test_loading_and_unloading_need_the_admin_key(start, adapters):
    server = start(FakeManager(), api_key="user", admin_api_key="admin", lora_dirs=(str(adapters),))
    for path in ("/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "a", "lora_path": "good"}
        for key, allowed in (("user", False), ("admin", True)):
            headers = {"authorization": f"Bearer {key}"}
            assert (server.client.post(path, json=body, headers=headers).status_code == 200) == allowed
