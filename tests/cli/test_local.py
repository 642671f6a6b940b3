"""The server's API without a socket: batch files, and programs that run in this process."""

import json
import re

import pytest

from tokenyard import LLM, lang
from tokenyard.cli.main import main
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
MOCK = ("--executor", "mock", "--mock-step-ms", "0")


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="mock", mock_step_ms=0.0) as llm:
        yield llm


@pytest.fixture
def backend(llm):
    return LocalApi(llm).backend()


def line(name, url, **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_each_answer_of_a_batch_file_has_the_id_of_its_request(tmp_path):
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    hello = [{"role": "user", "content": "hello"}]
    lines = [
        line("chat", "/v1/chat/completions", messages=hello, max_tokens=3),
        line("text", "https://api.openai.com/v1/completions", prompt="x", max_tokens=2),
        line("vector", "/v1/embeddings", input="x"),
        line("wrong", "/v1/completions", prompt="x", temperature=-1),
        line("nowhere", "/v1/nothing", prompt="x"),
    ]
    asked.write_text("\n".join(lines))
    assert main(["generate", "--input", str(asked), "--output", str(answered), *MOCK]) == 1
    found = {each["custom_id"]: each["response"] for each in map(json.loads, answered.read_text().splitlines())}
    statuses = {name: response["status_code"] for name, response in found.items()}
    assert statuses == {"chat": 200, "text": 200, "vector": 200, "wrong": 400, "nowhere": 404}
    assert found["chat"]["body"]["usage"]["completion_tokens"] == 3
    assert len(found["vector"]["body"]["data"][0]["embedding"]) > 1
    assert found["wrong"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line("a", "/v1/completions", prompt="x"), '{"prompt": "x"}'], "not both"),
        ([line("a", "/v1/completions", prompt="x"), line("a", "/v1/completions", prompt="y")], "two lines"),
        ([line("a", "/v1/completions", prompt="x", stream=True)], "line 1: .*stream"),
        ([line(3, "/v1/completions", prompt="x")], "line 1: custom_id"),
        ([line("a", "/pause_generation", mode="abort")], "line 1: /pause_generation steers"),
        ([line("a", "http://x/v1/requests/a/pause")], "line 1: /v1/requests/a/pause steers"),
    ],
)
def test_a_wrong_batch_file_is_refused_with_its_line_and_costs_no_earlier_answers(tmp_path, capsys, lines, says):
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(lines))
    answered.write_text("of an earlier run")
    assert main(["generate", "--input", str(asked), "--output", str(answered), *MOCK]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert answered.read_text() == "of an earlier run"


def test_the_output_never_overwrites_the_input(tmp_path, capsys):
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("a", "/v1/completions", prompt="x"))
    assert main(["generate", "--input", str(asked), "--output", str(tmp_path / "." / "in.jsonl"), *MOCK]) == 2
    assert "overwrite the input" in capsys.readouterr().err
    assert asked.read_text()


def test_answers_to_several_prompts_are_labelled_on_the_terminal(tmp_path, capsys):
    asked = tmp_path / "in.txt"
    asked.write_text("one\ntwo\n")
    assert main(["generate", "--input", str(asked), "--max-tokens", "3", *MOCK]) == 0
    found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in found] == ["one", "two"]
    assert all(each["text"] for each in found)


def test_a_fork_of_eight_computes_its_parent_once(llm, backend):
    @lang.function
    def program(s):
        s += "Here is what there is to know of all of them: " * 20
        forks = s.fork(8)
        for place, fork in enumerate(forks):
            fork += f" The {place}th" + lang.gen("part", max_tokens=4)
        forks.join()

    def computed():
        counters = llm.run(llm.manager.snapshot()).result()["counters"]
        return counters["prompt_tokens"] - counters["hit_tokens"]

    before = computed()
    state = program.run(backend=backend)
    assert len(state["part"]) == 8
    parent = len(llm.tokenizer.encode(state.text()).ids)
    assert parent > 100
    # Each fork has a few tokens that the others lack, and may be cut from its parent's last word.
    assert parent <= computed() - before <= parent + 8 * 8


def test_forks_say_how_much_they_found(backend):
    @lang.function
    def program(s, kept):
        s += "Many words stand before that which differs, and they are all the same." * 5
        for fork in s.fork(3):
            fork += " So" + lang.gen("part", max_tokens=2)
            kept.append(fork)

    forks = []
    program.run(kept=forks, backend=backend)
    for fork in forks:
        meta = fork.get_meta_info("part")
        assert meta["prompt_tokens"] - meta["cached_tokens"] <= 3


def test_programs_choose_stream_and_fail_in_this_process_as_over_http(backend):
    @lang.function
    def program(s):
        s += lang.user("hello")
        s += lang.assistant(lang.gen("a", max_tokens=4) + lang.select("b", [" yes", " no"]))

    state = program.run(backend=backend, stream=True)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == state["a"]
    assert state["b"] in (" yes", " no")

    @lang.function
    def wrong(s):
        s += "hello" + lang.gen("a", temperature=-1)

    with pytest.raises(lang.EndpointError, match="400: temperature"):
        wrong.run(backend=backend)
    with pytest.raises(ValueError, match="URL"):
        lang.Endpoint()
