"""Adapters of a running engine: names, loading and unloading under traffic, and what is left of those that went."""

import queue
import threading

import numpy as np
import pytest

from tokenyard import LLM
from tokenyard.base import ConfigError, InvalidRequestError, Request, SamplingParams, UnloadAdapter
from tokenyard.engine.frontend.lora_registry import parse_adapters
from tokenyard.engine.scheduler_process.attachments.lora import LoraLoader
from tokenyard.kv_layout.model_digest import adapter_digest


def make_adapter(folder, content=b"weights"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def llm(tmp_path):
    make_adapter(tmp_path / "first")
    options = {"executor": "mock", "mock_step_ms": 1.0, "max_loras_per_batch": 2, "max_loaded_loras": 3}
    with LLM(lora_paths=(f"a={tmp_path / 'first'}",), max_running_requests=16, **options) as llm:
        yield llm


def ids(llm, lora_path=None, prompt=(5, 6, 7, 8), tokens=4):
    (answer,) = llm.generate(list(prompt), lora_path=lora_path, max_new_tokens=tokens, temperature=0.0)
    return answer.completions[0].token_ids, answer.cached_tokens


def test_a_name_means_what_is_loaded_under_it_now(llm, tmp_path):
    base, first = ids(llm)[0], ids(llm, "a")[0]
    assert base != first
    assert ids(llm, "a") == (first, 3)
    llm.unload_adapter("a")
    with pytest.raises(InvalidRequestError, match="no adapter 'a'"):
        ids(llm, "a")
    # Other weights under the name: another answer, and no hit on the old prefix.
    llm.load_adapter("a", make_adapter(tmp_path / "first", b"other weights"))
    second, cached = ids(llm, "a")
    assert (second != first, cached) == (True, 0)
    # The same weights again: what was computed with them was freed with them.
    llm.unload_adapter("a")
    llm.load_adapter("a", make_adapter(tmp_path / "first"))
    assert ids(llm, "a") == (first, 0)
    assert ids(llm) == (base, 3)


def test_names_and_numbers_are_limited(llm, tmp_path):
    good = make_adapter(tmp_path / "good")
    for name, folder, match in (
        ("a", good, "loaded already"),
        ("b:c", good, "cannot be the name"),
        ("", good, "cannot be the name"),
        ("b", tmp_path / "absent", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=match):
            llm.load_adapter(name, folder)
    with pytest.raises(InvalidRequestError, match="no adapter 'd'"):
        llm.unload_adapter("d")


def test_more_adapters_than_memory_has_room_for_are_all_served(llm, tmp_path):
    for name in "bcdef":
        llm.load_adapter(name, make_adapter(tmp_path / name, name.encode()))
    answers = {name: ids(llm, name)[0] for name in "abcdef"}
    assert len(set(map(tuple, answers.values()))) == 6
    # An adapter that is read again finds its prefixes.
    assert {name: ids(llm, name) for name in "abcdef"} == {name: (answer, 3) for name, answer in answers.items()}
    llm.unload_adapter("b")
    with pytest.raises(InvalidRequestError, match="no adapter 'b'"):
        ids(llm, "b")


class Memory:
    """As much of an executor and a core as an LoraLoader needs: what is in memory, and what requests have."""

    def __init__(self):
        self.held, self.reads, self.used, self.events = set(), [], set(), []

    def load_adapter(self, adapter, folder):
        self.held.add(adapter)
        self.reads.append(adapter)

    def unload_adapter(self, adapter):
        self.held.discard(adapter)

    def uses_adapter(self, adapter):
        return adapter in self.used


class Calls:
    """Calls of a loader, made as a driver makes them."""

    def __init__(self, max_loaded):
        self.memory, self.arrived, self.replies = Memory(), queue.Queue(), []
        self.loader = LoraLoader(self.memory, self.memory, self.arrived.put, max_loaded)

    def call(self, verb, call_id, **arguments):
        reply = self.loader.verbs()[verb](0, **arguments)
        if reply is None:
            self.replies.append((call_id, ""))
        else:
            reply.add_done_callback(lambda done: self.replies.append((call_id, str(done.exception() or ""))))

    def poll(self):
        self.memory.events += self.loader.poll(0)

    def read_one(self):
        message = self.arrived.get(timeout=30)
        self.loader.verbs()[message.verb](0, **message.arguments)
        self.poll()


def test_adapters_beyond_the_limit_are_freed_by_use_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenyard.engine.scheduler_process.attachments.lora.POLL_INTERVAL_S", 0.0)
    calls = Calls(2)
    memory, read_one, keys = calls.memory, calls.read_one, {}

    def request(name, number):
        named = Request(number, str(number), np.array([1]), SamplingParams(), lora=keys[name])
        return calls.loader.submitted(named, 0)

    for call_id, name in enumerate("abc", 1):
        folder = str(make_adapter(tmp_path / name, name.encode()))
        keys[name] = f"{name}#{adapter_digest(folder)}"
        calls.call("load_adapter", call_id, adapter=keys[name], folder=folder)
        assert len(calls.replies) == call_id - 1
        read_one()
    assert calls.replies == [(1, ""), (2, ""), (3, "")]
    assert memory.held == {keys["b"], keys["c"]}
    # The request waits until its adapter is there; the one that requests have stays, though it is the older one.
    assert not request("b", 1).awaits_adapter
    assert not request("c", 2).awaits_adapter
    memory.used = {keys["b"]}
    assert request("a", 3).awaits_adapter
    assert request("a", 4).awaits_adapter
    read_one()
    assert [event.number for event in memory.events] == [3, 4]
    assert memory.held == {keys["a"], keys["b"]}
    # All in use: one too many, until one is not.
    memory.used = {keys["a"], keys["b"], keys["c"]}
    assert request("c", 5).awaits_adapter
    read_one()
    assert memory.held == set(keys.values())
    memory.used.discard(keys["a"])
    calls.poll()
    assert memory.held == {keys["b"], keys["c"]}
    # One that was freed can be unloaded, and is then unknown; a process that starts again reads what it has room for.
    calls.call("unload_adapter", 9, adapter=keys["a"])
    calls.poll()
    assert calls.replies[-1] == (9, "")
    assert memory.events[-1] == UnloadAdapter(keys["a"])
    with pytest.raises(InvalidRequestError):
        request("a", 6)
    calls.call("load_adapter", 10, adapter=keys["a"], folder=str(tmp_path / "a"), if_room=True)
    assert len(memory.reads) == 5
    assert request("a", 7).awaits_adapter
    memory.used = {keys["a"]}
    read_one()
    assert memory.held == {keys["a"], keys["c"]}
    calls.loader.close()


def test_a_read_that_takes_long_is_logged_with_the_adapter(tmp_path, monkeypatch, caplog):
    calls, folder = Calls(None), str(make_adapter(tmp_path / "a"))
    key = f"a#{adapter_digest(folder)}"
    for limit_s, lines in ((1e9, 0), (0.0, 1)):
        monkeypatch.setattr("tokenyard.engine.scheduler_process.attachments.lora.SLOW_READ_S", limit_s)
        calls.call("load_adapter", 1, adapter=key, folder=folder)
        assert calls.loader.held_reasons()["adapter"].endswith(f"(reading {key})")
        calls.read_one()
        assert key not in calls.loader.held_reasons()["adapter"]
        calls.call("unload_adapter", 2, adapter=key)
        calls.poll()
        assert len([line for line in caplog.messages if f"reading adapter {key}" in line]) == lines
    calls.loader.close()


def test_without_the_setting_there_are_no_adapters(tmp_path):
    with LLM(executor="mock", mock_step_ms=1.0) as llm:
        with pytest.raises(ConfigError, match="--enable-lora"):
            llm.load_adapter("a", make_adapter(tmp_path / "a"))
        with pytest.raises(InvalidRequestError, match="no adapter"):
            ids(llm, "a")


def test_unloading_waits_for_the_requests_that_run_and_refuses_new_ones(llm):
    prompt, many = [9] * 4, SamplingParams(max_new_tokens=400, temperature=0.0, n=3, ignore_eos=True)
    running = llm.stream(prompt, many, lora_path="a")
    next(running)
    unloading = threading.Thread(target=llm.unload_adapter, args=("a",))
    unloading.start()
    while "a" in llm.manager.adapters.loaded:
        pass
    with pytest.raises(InvalidRequestError):
        ids(llm, "a")
    with pytest.raises(ConfigError, match="being unloaded"):
        llm.load_adapter("a", "anywhere")
    assert unloading.is_alive()
    finished = [delta.finish.reason for delta in running if delta.finish is not None]
    unloading.join(20)
    assert (finished, unloading.is_alive()) == (["length"] * 3, False)


def test_adapters_come_and_go_under_traffic_and_nothing_is_lost(llm, tmp_path):
    expected, stop = {None: ids(llm)[0]}, threading.Event()
    for name in ("b", "c"):
        llm.load_adapter(name, make_adapter(tmp_path / name, name.encode()))
        expected[name] = ids(llm, name)[0]
    expected["a"] = ids(llm, "a")[0]
    wrong = []

    def ask(name):
        while not stop.is_set():
            try:
                answers = llm.generate([[5, 6, 7, 8]] * 4, lora_path=name, max_new_tokens=4, temperature=0.0)
            except InvalidRequestError:
                continue
            wrong.extend(answer for answer in answers if answer.completions[0].token_ids != expected[name])

    threads = [threading.Thread(target=ask, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for _ in range(8):
        for name in ("b", "c"):
            llm.unload_adapter(name)
            llm.load_adapter(name, tmp_path / name)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    # Requests that were cancelled with others' refusals may not have ended yet.
    while (snapshot := llm.run(llm.manager.snapshot()).result())["running"] + snapshot["waiting"]:
        pass
    assert (snapshot["used_tokens"], snapshot["measures"]["lora_slots_used"]) == (0, 0)


def test_folders_by_name_from_the_command_line():
    assert parse_adapters(["a=/x/y", "/z/b/", "c"]) == {"a": "/x/y", "b": "/z/b/", "c": "c"}
    for words, match in ((["a=/x", "a=/y"], "twice"), (["=/x"], "cannot be the name"), (["/"], "cannot be the name")):
        with pytest.raises(ConfigError, match=match):
            parse_adapters(words)


def test_a_digest_covers_config_and_weights(tmp_path):
    first = adapter_digest(str(make_adapter(tmp_path / "a")))
    assert adapter_digest(str(make_adapter(tmp_path / "b"))) == first
    assert adapter_digest(str(make_adapter(tmp_path / "b", b"weightz"))) != first
    (tmp_path / "a" / "adapter_config.json").write_text("{} ")
    assert adapter_digest(str(tmp_path / "a")) != first
