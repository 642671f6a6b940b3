"""Two engines as two commands start them: prompts computed by one, answers given by the other, and either may fall."""

import json
import os
import signal
import threading
import time
import urllib.request

import psutil
import pytest

from tests.e2e.servers import Server
from tests.executor.tiny_models import judge, logits, prompt_of
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="the demo model is not there")

PROMPT = "Once upon a time there was a girl named Lily who lived in a small house near the forest. " * 6
FLAGS = ("--page-size", "16", "--dtype", "float32", "--log-level", "info")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart") / "settings.yaml"
    path.write_text("disaggregation_beat_s: 0.3\ndisaggregation_lease_s: 2.0\n")
    return str(path)


@pytest.fixture(scope="module")
def engines(settings):
    """A prefill and a decode engine that have found each other."""
    p = Server(*FLAGS, "--config", settings, "--disaggregation-mode", "prefill")
    d = Server(*FLAGS, "--config", settings, "--disaggregation-mode", "decode", "--prefill-engines", p.url)
    wait_until(lambda: disagg_state(d).get("connected"))
    yield p, d
    for server in (d, p):
        if server.process.poll() is None:
            server.close()


def wait_until(condition, most_s: float = 30.0):
    end = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.05)


def disagg_state(server: Server) -> dict:
    with urllib.request.urlopen(server.url + "/v1/transfer", timeout=10) as answer:
        return next(iter(json.load(answer)["ranks"].values()), {})


def post(server: Server, body: dict):
    data = json.dumps({"max_tokens": 40, "temperature": 0, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", data, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def ask(server: Server, name: str, **fields) -> str:
    with post(server, {"prompt": f"{name} tells: {PROMPT}", **fields}) as answer:
        return json.load(answer)["choices"][0]["text"]


class Streaming:
    """Reads a streamed answer in the background."""

    def __init__(self, server: Server, name: str, tokens: int) -> None:
        self.text = ""
        self.ended = ""
        self._server, self._body = server, {"prompt": f"{name} tells: {PROMPT}", "stream": True, "max_tokens": tokens}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with post(self._server, self._body) as answer:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    self.ended = "done"
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.ended = "error"
                        return
                    self.text += event["choices"][0]["text"] if event["choices"] else ""


def scheduler_of(server: Server) -> int:
    found = [
        child for child in psutil.Process(server.process.pid).children() if "scheduler" in " ".join(child.cmdline())
    ]
    return found[0].pid


def nothing_left(server: Server) -> None:
    def empty():
        state = disagg_state(server)
        return state and not (state["open"] or state["computing_for_others"] or state["held_for_others"])

    wait_until(empty)


@pytest.mark.slow
def test_prompts_are_computed_there_and_the_answer_is_the_same(engines):
    p, d = engines
    before = disagg_state(d).get("transferred", 0)
    texts = [ask(d, name) for name in ("Anna", "Ben")]
    assert texts == [ask(p, name) for name in ("Anna", "Ben")]
    wait_until(lambda: disagg_state(d).get("transferred", 0) == before + 2)
    assert disagg_state(d)["moved_bytes"]
    sampled = {"temperature": 0.9, "seed": 7, "logprobs": 2}
    assert ask(d, "Carl", **sampled) == ask(p, "Carl", **sampled)
    for server in engines:
        nothing_left(server)


@pytest.mark.slow
def test_kv_of_one_byte_is_handed_over_with_its_scales(settings):
    flags = (*FLAGS, "--config", settings, "--kv-cache-dtype", "fp8_e4m3")
    p = Server(*flags, "--disaggregation-mode", "prefill")
    d = Server(*flags, "--disaggregation-mode", "decode", "--prefill-engines", p.url)
    try:
        wait_until(lambda: disagg_state(d).get("connected"))
        assert ask(d, "Anna") == ask(p, "Anna")
        wait_until(lambda: disagg_state(d).get("transferred") == 1)
    finally:
        for server in (d, p):
            server.close()


def generate(server: Server, prompt: list[int], tokens: int) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    request = urllib.request.Request(server.url + "/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["output_ids"]


@pytest.mark.slow
def test_recurrent_states_are_handed_over(tmp_path, settings):
    """The prompt ends inside a page; the second turn finds the first one's checkpoint at the decode engine."""
    judge("qwen3.5").save_pretrained(tmp_path)
    flags = (str(tmp_path), *FLAGS, "--config", settings, "--skip-tokenizer-init", "--max-total-tokens", "800")
    flags += ("--disaggregation-transfer-backend", "tcp")
    p = Server(*flags, "--disaggregation-mode", "prefill")
    d = Server(*flags, "--disaggregation-mode", "decode", "--prefill-engines", p.url)
    try:
        wait_until(lambda: disagg_state(d).get("connected"))
        known, answered = prompt_of(130, seed=1), []
        for turn in range(2):
            answer = generate(d, known, 12)
            answered += range(len(known), len(known) + 12)
            known = known + answer + prompt_of(40, seed=2 + turn)
        wait_until(lambda: disagg_state(d).get("transferred", 0) >= 1)
        nothing_left(d)
        nothing_left(p)
    finally:
        for server in (d, p):
            server.close()
    likeliest = logits("qwen3.5", known).argmax(dim=-1).tolist()
    assert [likeliest[position - 1] for position in answered] == [known[position] for position in answered]


@pytest.mark.slow
def test_halves_of_a_request_meet_by_their_bootstrap_room(engines):
    p, d = engines
    host, port = disagg_state(p)["address"].split(":")
    expected, before = ask(p, "Jane"), disagg_state(d).get("transferred", 0)
    meeting = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": 2**63 - 5}
    halves = []
    first = threading.Thread(target=lambda: halves.append(ask(p, "Kate", **meeting)))
    first.start()
    assert ask(d, "Kate", **meeting) == ask(p, "Kate")
    first.join()
    assert len(halves[0]) < len(expected)
    with post(p, {"prompt": f"Jane tells: {PROMPT}", "kv_transfer_params": {"do_remote_decode": True}}) as answer:
        handed = json.load(answer)
    assert handed["choices"][0]["finish_reason"] == "length"
    assert ask(d, "Jane", kv_transfer_params=handed["kv_transfer_params"]) == expected
    wait_until(lambda: disagg_state(d).get("transferred", 0) == before + 2)
    gone = {**handed["kv_transfer_params"], "remote_port": 1}
    assert ask(d, "Lena", kv_transfer_params=gone) == ask(p, "Lena")
    for server in engines:
        nothing_left(server)


@pytest.mark.slow
def test_a_stopped_prefill_engine_costs_a_pause(engines):
    p, d = engines
    expected = ask(p, "Dora")
    pid = scheduler_of(p)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ask(d, "Dora") == expected
        assert ask(d, "Emil")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: disagg_state(d).get("connected"))
    for server in engines:
        nothing_left(server)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_a_client_that_streams_sees_only_a_pause_when_either_side_is_killed(engines, side):
    p, d = engines
    name = ("Fred", "Gina")[side]
    expected = ask(p, name, max_tokens=600)
    stream = Streaming(d, name, 600)
    wait_until(lambda: len(stream.text) > 100)
    late = Streaming(d, f"{name} too", 100)
    assert not stream.ended
    os.kill(scheduler_of(engines[side]), signal.SIGKILL)
    for one in (stream, late):
        one.thread.join(60)
        assert one.ended == "done"
    assert stream.text == expected
    wait_until(lambda: disagg_state(d).get("connected"))
    for server in engines:
        nothing_left(server)
    assert late.text == ask(p, f"{name} too", max_tokens=100)


@pytest.mark.slow
def test_incompatible_engines_serve_alone(engines, settings):
    p, _ = engines
    other = Server(
        "--page-size", "32", "--disaggregation-mode", "decode", "--prefill-engines", p.url, "--dtype", "float32"
    )
    try:
        other.wait_for("another --page-size")
        assert ask(other, "Hugo") == ask(p, "Hugo")
    finally:
        other.close()


@pytest.mark.slow
def test_a_prefill_engine_that_is_gone_for_good_costs_no_answer(engines):
    p, d = engines
    expected = ask(p, "Ida")
    p.process.kill()
    p.wait()
    assert ask(d, "Ida") == expected
    nothing_left(d)


@pytest.mark.slow
def test_kv_of_divided_models_moves():
    divided = (*FLAGS, "--tp-size", "2", "--threads", "2")
    p = Server(*divided, "--disaggregation-mode", "prefill")
    d = Server(*divided, "--disaggregation-mode", "decode", "--prefill-engines", p.url)
    try:
        wait_until(lambda: disagg_state(d).get("connected"), 60.0)
        assert ask(d, "Ada", max_tokens=16) == ask(p, "Ada", max_tokens=16)
        assert disagg_state(d)["transferred"] == 1
        assert disagg_state(d)["moved_bytes"] > 0
    finally:
        d.close()
        p.close()
