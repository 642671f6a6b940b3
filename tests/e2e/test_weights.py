"""A server whose weights change under running requests. Transformers with the same weights is the judge."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.e2e.servers import Server
from tests.executor.tiny_models import judge

PROMPT = list(range(5, 60))
BYTES_PER_TOKEN = 3 * 2 * 2 * 20 * 4  # layers, keys and values, heads, numbers, bytes
FLAGS = ("--dtype", "float32", "--device", "cpu", "--skip-tokenizer-init", "--page-size", "4")


def another(model, seed):
    """A model of the same config with other weights."""
    torch.manual_seed(seed)
    return type(model)(model.config).eval()


def post(url, body=None):
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@torch.inference_mode()
def greedy_over(runs, prompt):
    """Greedy tokens of models that follow one another over the same KV. runs: (model, tokens)."""
    ids, past, found = torch.tensor([prompt]), None, []
    for model, tokens in runs:
        for _ in range(tokens):
            output = model(ids, past_key_values=past, use_cache=True)
            past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by name, and the folder that has each."""
    root = tmp_path_factory.mktemp("weights")
    first = judge("qwen3")
    found = {"a": first, "b": another(first, 7)}
    for name, model in found.items():
        model.save_pretrained(root / name)
    judge("qwen2").save_pretrained(root / "other-model")
    tensors = load_file(root / "b" / "model.safetensors")
    for name in ("nan", "short", "misshapen"):
        shutil.copytree(root / "b", root / name)
    norm = "model.norm.weight"
    save_file(tensors | {norm: torch.full_like(tensors[norm], torch.nan)}, root / "nan" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != norm}, root / "short" / "model.safetensors")
    save_file(tensors | {norm: torch.ones(7)}, root / "misshapen" / "model.safetensors")
    shutil.copytree(root / "b", root / "cut")
    data = (root / "b" / "model.safetensors").read_bytes()
    (root / "cut" / "model.safetensors").write_bytes(data[: len(data) // 2])
    (root / "empty").mkdir()
    return found, root


@pytest.fixture(scope="module")
def server(models):
    running = Server(str(models[1] / "a"), *FLAGS, "--enable-overlap-schedule", "--max-total-tokens", "2048")
    yield running
    assert running.close() == 0


def ask(server, tokens=8, prompt=PROMPT, **more):
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, answer = post(f"{server.url}/generate", {"input_ids": prompt, "sampling_params": sampling} | more)
    assert status == 200, answer
    return answer


def update(server, folder, **more):
    return post(f"{server.url}/update_weights_from_disk", {"model_path": str(folder)} | more)


def test_new_requests_are_those_of_the_new_weights_and_running_ones_go_on(server, models):
    (a, b), root = models[0].values(), models[1]
    assert update(server, root / "a", weight_version="start")[0] == 200
    assert ask(server)["output_ids"] == greedy_over([(a, 8)], PROMPT)
    found = []
    long = threading.Thread(target=lambda: found.append(ask(server, 180, PROMPT[:20])))
    long.start()
    time.sleep(0.1)
    status, answer = update(server, root / "b", weight_version="v2")
    assert (status, answer["success"], answer["weight_version"]) == (200, True, "v2")
    fresh = ask(server)
    assert fresh["output_ids"] == greedy_over([(b, 8)], PROMPT)
    assert (fresh["meta_info"]["weight_version"], fresh["meta_info"]["cached_tokens"]) == ("v2", 0)
    long.join()
    runs = found[0]["meta_info"].get("weight_runs", [{"weight_version": "v2", "tokens": 180}])
    by_version = [({"start": a, "v2": b}[run["weight_version"]], run["tokens"]) for run in runs]
    assert found[0]["output_ids"] == greedy_over(by_version, PROMPT[:20])
    with urllib.request.urlopen(f"{server.url}/weight_version") as said:
        assert json.load(said) == {"weight_version": "v2"}


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("nowhere", "there is no model folder"),
        ("empty", "config.json"),
        ("other-model", "is another model"),
        ("nan", "NaN"),
        ("short", "no tensor 'model.norm.weight'"),
        ("misshapen", "has shape (7,)"),
        ("cut", "damaged"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(server, models, folder, says):
    root = models[1]
    assert update(server, root / "a", weight_version="good")[0] == 200
    before = ask(server)
    status, answer = update(server, root / folder, weight_version="bad")
    assert (status, answer["success"]) == (400, False)
    assert says in answer["message"]
    assert answer["error"]["param"] == "model_path"
    after = ask(server)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "good"
    assert after["meta_info"]["cached_tokens"] == 52


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": 3}, "model_path"),
        ({"model_path": "x", "load_format": "pickle"}, "load_format"),
        ({"model_path": "x", "weight_version": "a#b"}, "weight_version"),
        ({"model_path": "x", "weight_version": "v" * 200}, "weight_version"),
    ],
)
def test_wrong_fields_are_named(server, body, param):
    status, answer = post(f"{server.url}/update_weights_from_disk", body)
    assert status == 400
    assert param in str(answer["error"])


def test_a_pause_that_retracts_computes_all_by_the_new_weights(server, models):
    (a, b), root = models[0].values(), models[1]
    assert update(server, root / "a", weight_version="one")[0] == 200
    found = []
    long = threading.Thread(target=lambda: found.append(ask(server, 150, PROMPT[:20])))
    long.start()
    time.sleep(0.1)
    assert post(f"{server.url}/pause?mode=retract")[1]["status"] == "paused"
    assert update(server, root / "b", weight_version="two")[0] == 200
    assert post(f"{server.url}/resume") == (200, {"status": "resumed"})
    long.join()
    answer = found[0]
    runs = answer["meta_info"].get("weight_runs", [{"weight_version": "two", "tokens": 150}])
    kept = sum(run["tokens"] for run in runs if run["weight_version"] == "one")
    begun = answer["output_ids"][:kept]
    assert begun == greedy_over([(a, kept)], PROMPT[:20])
    assert answer["output_ids"][kept:] == greedy_over([(b, 150 - kept)], PROMPT[:20] + begun)


def test_a_pause_that_aborts_returns_what_there_is(server, models):
    found = []
    long = threading.Thread(
        target=lambda: found.append(ask(server, 200, PROMPT[:20], return_logprob=True)), daemon=True
    )
    long.start()
    time.sleep(0.1)
    assert post(f"{server.url}/pause_generation", {"mode": "abort"})[0] == 200
    long.join(10)
    assert post(f"{server.url}/continue_generation")[0] == 200
    meta = found[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(found[0]["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert 0 < meta["completion_tokens"] < 200


@pytest.mark.slow
def test_a_process_that_restarts_gets_the_weights_again(server, models):
    (_, b), root = models[0].values(), models[1]
    assert update(server, root / "b", weight_version="kept")[0] == 200
    os.kill(server.children()[0], signal.SIGKILL)
    answer = ask(server)
    assert answer["output_ids"] == greedy_over([(b, 8)], PROMPT)
    assert answer["meta_info"]["weight_version"] == "kept"


def send(server, tensors, query="", path=None):
    """Send tensors as the body, or as a file at `path`."""
    if path is not None:
        save_file(tensors, path)
        return post(f"{server.url}/update_weights_from_tensor{query}", {"path": str(path)})
    headers = {"content-type": "application/octet-stream"}
    request = urllib.request.Request(f"{server.url}/update_weights_from_tensor{query}", save(tensors), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_tensors_that_a_trainer_sends(server, models, tmp_path):
    (a, b), root = models[0].values(), models[1]
    assert update(server, root / "a", weight_version="base")[0] == 200
    tensors = load_file(root / "b" / "model.safetensors")
    names = sorted(tensors)
    first, second = ({name: tensors[name] for name in part} for part in (names[:9], names[9:]))
    status, answer = send(server, first, "?flush_cache=false")
    assert (status, answer["success"]) == (200, True)
    assert ask(server)["output_ids"] == greedy_over([(a, 8)], PROMPT), "a part alone changes nothing"
    assert send(server, second, "?weight_version=sent", tmp_path / "shared")[1]["weight_version"] == "sent"
    assert ask(server)["output_ids"] == greedy_over([(b, 8)], PROMPT)
    # One tensor of a product that is computed with others.
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = another(b, 0)
    changed.load_state_dict(tensors | {name: 2 * tensors[name]}, strict=False)
    assert send(server, {name: 2 * tensors[name]})[0] == 200
    assert ask(server)["output_ids"] == greedy_over([(changed, 8)], PROMPT)
    status, rows = post(f"{server.url}/get_weights_by_name", {"name": name, "truncate_size": 2})
    assert status == 200, rows
    assert torch.equal(torch.tensor(rows), 2 * tensors[name][:2])
    assert post(f"{server.url}/get_weights_by_name", {"name": "no.such"})[1]["error"]["param"] == "name"


def test_tensors_that_do_not_fit_change_nothing(server, models, tmp_path):
    a, root = models[0]["a"], models[1]
    assert update(server, root / "a", weight_version="good")[0] == 200
    name = "model.norm.weight"
    for tensors, says in (
        ({"no.such.weight": torch.ones(3)}, "no tensor 'no.such.weight'"),
        ({name: torch.ones(3)}, "has shape (3,)"),
        ({name: torch.full((48,), torch.inf)}, "NaN or infinite"),
    ):
        # What is sent with tensors that do not fit is dropped with them.
        assert send(server, {name: torch.zeros(48)}, "?flush_cache=false")[0] == 200
        status, answer = send(server, tensors)
        assert (status, answer["success"]) == (400, False)
        assert says in answer["message"]
    for body, param in (
        ({"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors"),
        ({}, "path"),
        ({"path": str(tmp_path / "nothing")}, "path"),
    ):
        status, answer = post(f"{server.url}/update_weights_from_tensor", body)
        assert (status, answer["error"]["param"]) == (400, param)
    for data in (b"", b"no file", save({name: torch.zeros(48)})[:-4]):
        headers = {"content-type": "application/octet-stream"}
        request = urllib.request.Request(f"{server.url}/update_weights_from_tensor", data, headers)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request)
    answer = ask(server)
    assert (answer["meta_info"]["weight_version"], answer["output_ids"]) == ("good", greedy_over([(a, 8)], PROMPT))


def resident_bytes(server):
    """Memory of the scheduler process that is not a file's."""
    status = Path(f"/proc/{server.children()[0]}/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


@pytest.mark.slow
def test_memory_is_given_back_and_taken_again(models):
    a, root = models[0]["a"], models[1]
    running = Server(str(root / "a"), *FLAGS, "--max-total-tokens", "200000")
    try:
        found = []
        long = threading.Thread(target=lambda: found.append(ask(running, 150)))
        long.start()
        time.sleep(0.1)
        status, answer = post(f"{running.url}/release_memory_occupation")
        assert (status, answer["success"]) == (400, False)
        assert "requests are open" in answer["message"]
        long.join()
        # The pool takes memory as it is written.
        before = resident_bytes(running)
        ask(running, 1, [[first, second, *range(198)] for first in range(15) for second in range(20)])
        written = resident_bytes(running) - before
        assert written > 0.9 * 300 * 200 * BYTES_PER_TOKEN
        assert post(f"{running.url}/release_memory_occupation", {"tags": ["gpu"]})[1]["error"]["param"] == "tags"
        assert post(f"{running.url}/release_memory_occupation")[0] == 200
        assert resident_bytes(running) < before + 0.1 * written
        assert post(f"{running.url}/continue_generation")[0] == 400
        waiting = threading.Thread(target=lambda: found.append(ask(running)))
        waiting.start()
        assert post(f"{running.url}/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
        waiting.join(0.3)
        assert waiting.is_alive(), "there are no weights yet"
        assert post(f"{running.url}/resume_memory_occupation")[0] == 200
        waiting.join(10)
        assert found[1]["output_ids"] == greedy_over([(a, 8)], PROMPT)
        assert post(f"{running.url}/release_memory_occupation", {"tags": ["weights"]})[0] == 200
        assert update(running, root / "b")[0] == 200
        assert ask(running)["output_ids"] == greedy_over([(models[0]["b"], 8)], PROMPT)
    finally:
        assert running.close() == 0


TRAINER = """
import json, sys, threading, urllib.request
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from safetensors.torch import load_file

url, path, port, size = sys.argv[1:]
size = int(size)

def post(route, body):
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + route, data, kind)))

# As SGLang's clients make the group.
name, answers = "weight_update_group", []
place = {"master_address": "127.0.0.1", "master_port": int(port)}
asked = place | {"rank_offset": 1, "world_size": size, "backend": "gloo"}
joining = threading.Thread(target=lambda: answers.append(post("/init_weights_update_group", asked)))
joining.start()
store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, size))
store = dist.PrefixStore(name, store)
limit = c10d.default_pg_timeout
group, _ = c10d._new_process_group_helper(size, rank, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit)
c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
joining.join()
tensors = load_file(path)
names = sorted(tensors)
for part in (names[:7], names[7:]):
    said = {
        "names": part,
        "dtypes": [str(tensors[one].dtype).removeprefix("torch.") for one in part],
        "shapes": [list(tensors[one].shape) for one in part],
        "flush_cache": part[-1] == names[-1],
        "weight_version": "broadcast",
    }
    sending = threading.Thread(target=lambda: answers.append(post("/update_weights_from_distributed", said)))
    sending.start()
    for one in part:
        dist.broadcast(tensors[one], src=0, group=group)
    sending.join()
answers.append(post("/destroy_weights_update_group", {}))
print(json.dumps(answers))
"""


def broadcast(server, path, size):
    """Have a trainer broadcast the tensors of a file to a server, with whose processes it is a group of `size`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", TRAINER, server.url, str(path), str(port), str(size)]
    trainer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert trainer.returncode == 0, trainer.stderr
    answers = json.loads(trainer.stdout.splitlines()[-1])
    assert [answer["success"] for answer in answers] == [True] * 4
    assert answers[2]["weight_version"] == "broadcast"


@pytest.mark.slow
def test_a_trainer_broadcasts_weights(server, models):
    (_, b), root = models[0].values(), models[1]
    assert update(server, root / "a", weight_version="base")[0] == 200
    broadcast(server, root / "b" / "model.safetensors", 2)
    answer = ask(server)
    assert answer["output_ids"] == greedy_over([(b, 8)], PROMPT)
    assert answer["meta_info"]["weight_version"] == "broadcast"
    status, answer = post(
        f"{server.url}/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
    )
    assert (status, answer["success"]) == (400, False)
    assert "/init_weights_update_group" in answer["message"]


DIVIDED = {
    "tensor-parallel": ("--tp-size", "2"),
    "DP attention": ("--enable-dp-attention", "--tp-size", "2", "--dp-size", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tensor-parallel", pytest.param("DP attention", marks=pytest.mark.world)])
def test_all_ranks_of_a_model_change_their_weights_or_none(models, form):
    (a, b), root = models[0].values(), models[1]
    by_version = {"default": a, "v2": b}
    # Only the second tensor-parallel rank reads the row.
    tensors, name = load_file(root / "b" / "model.safetensors"), "model.layers.1.mlp.gate_proj.weight"
    tensors[name][-1] = torch.nan
    shutil.copytree(root / "b", root / form)
    save_file(tensors, root / form / "model.safetensors")
    running = Server(str(root / "a"), *FLAGS, "--max-total-tokens", "2048", "--threads", "1", *DIVIDED[form])
    try:
        status, answer = update(running, root / form, weight_version="bad")
        assert (status, answer["success"]) == (400, False)
        assert f"tensor {name!r} has numbers that are NaN" in answer["message"]
        assert ("tensor-parallel rank 1: " in answer["message"]) == (form == "tensor-parallel")
        assert ask(running)["output_ids"] == greedy_over([(a, 8)], PROMPT)
        found = []
        many = [threading.Thread(target=lambda: found.append(ask(running, 100, PROMPT[:20]))) for _ in range(3)]
        for thread in many:
            thread.start()
        time.sleep(0.2)
        assert update(running, root / "b", weight_version="v2")[0] == 200
        for thread in many:
            thread.join()
        for answer in found:
            runs = answer["meta_info"].get("weight_runs", [{"weight_version": "v2", "tokens": 100}])
            models_of_runs = [(by_version[run["weight_version"]], run["tokens"]) for run in runs]
            assert answer["output_ids"] == greedy_over(models_of_runs, PROMPT[:20])
        assert post(f"{running.url}/release_memory_occupation")[0] == 200
        # A process that takes the place of another gives its memory back too.
        os.kill(running.children()[0], signal.SIGKILL)
        running.wait_for(rf"(?s)(?:runs again.*){{{1 if form == 'tensor-parallel' else 2}}}")
        waiting = threading.Thread(target=lambda: found.append(ask(running)))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "there are no weights yet"
        assert post(f"{running.url}/resume_memory_occupation")[0] == 200
        waiting.join(20)
        # It has the weights that the other had.
        assert found[-1]["output_ids"] == greedy_over([(b, 8)], PROMPT)
        assert found[-1]["meta_info"]["weight_version"] == "v2"
        assert update(running, root / "a")[0] == 200
        broadcast(running, root / "b" / "model.safetensors", 3)
        answer = ask(running)
        assert answer["output_ids"] == greedy_over([(b, 8)], PROMPT)
        assert answer["meta_info"]["weight_version"] == "broadcast"
    finally:
        assert running.close() == 0
