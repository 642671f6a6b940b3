"""`tokenyard bench` against a real server with the mock executor."""

import json

import pytest

from tokenyard.cli.main import main
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
SMALL = ["--random-input-len", "20", "--random-output-len", "6"]


def bench(server, *argv):
    return main(["bench", "serve", "--base-url", server.url, *argv])


@pytest.mark.parametrize("backend", ["tokenyard", "openai", "openai-chat"])
def test_all_backends_count_alike(mock_server, tmp_path, capsys, backend):
    out = tmp_path / "out.jsonl"
    flags = ["--backend", backend, "--num-prompts", "10", "--request-rate", "200", "--random-range-ratio", "1", *SMALL]
    assert bench(mock_server, *flags, "--output-file", str(out), "--output-details") == 0
    numbers = json.loads(out.read_text())
    assert (numbers["completed"], numbers["failed"], numbers["total_output_tokens"]) == (10, 0, 60)
    assert numbers["total_input_tokens"] >= 10 * 15
    assert len(numbers["requests"]) == 10
    table = capsys.readouterr().out
    assert "Successful requests:                     10" in table
    assert "Mean TTFT (ms):" in table


def test_concurrency_is_bounded(mock_server, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--num-prompts", "12", "--request-rate", "inf", "--max-concurrency", "3", "--dataset-name", "random-ids"]
    assert bench(mock_server, *flags, *SMALL, "--output-file", str(out)) == 0
    assert json.loads(out.read_text())["max_concurrent_requests"] <= 3


def test_shared_prefixes_hit_the_cache(mock_server, capsys):
    flags = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "1", "--gsp-prompts-per-group", "6"]
    lengths = ["--gsp-system-prompt-len", "100", "--gsp-question-len", "5", "--gsp-output-len", "3"]
    turns = ["--request-rate", "inf", "--max-concurrency", "1"]
    assert bench(mock_server, *flags, *lengths, *turns, "--flush-cache", "--cache-report") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Cached input tokens")]
    assert int(line.split()[-1]) >= 4 * 80


def test_requests_that_fail_are_counted_and_explained(mock_server, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "fine", "max_tokens": 2}, {"prompt": "too long", "max_tokens": 10**6}]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(path), "--request-rate", "inf"]
    assert bench(mock_server, *flags) == 0
    table = capsys.readouterr().out
    assert "Failed requests:                         1" in table
    assert "1 failed: 400: " in table


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dataset-name", "mooncake"], "needs --dataset-path"),
        (["--dataset-path", "x"], "takes no --dataset-path"),
        (["--request-rate", "0"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--header", "x"], "--header"),
        (["--extra-request-body", "[1]"], "JSON object"),
        (["--use-trace-timestamps"], "times"),
        (["--output-details"], "--output-file"),
        (["--tokenizer", "/nonexistent"], "no tokenizer"),
        (["--backend", "openai-chat", "--dataset-name", "random-ids"], "token ids"),
        (["--num-promts", "3"], "did you mean --num-prompts"),
    ],
)
def test_mistakes_are_named(mock_server, capsys, flags, says):
    assert bench(mock_server, *flags) == 2
    assert says in capsys.readouterr().err


def test_no_server_is_one_line(capsys):
    assert main(["bench", "serve", "--port", "9"]) == 2
    error = capsys.readouterr().err
    assert "is a server running there?" in error
    assert error.count("\n") == 1


def test_offline(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    mock = ["--executor", "mock", "--mock-step-ms", "0"]
    flags = ["--num-prompts", "5", "--random-range-ratio", "1", *SMALL, "--output-file", str(out)]
    assert main(["bench", "offline", *flags, *mock]) == 0
    assert "Total generated tokens:                  30" in capsys.readouterr().out
    assert json.loads(out.read_text())["completed"] == 5


def session_trace(tmp_path, sessions=5):
    """Sessions of kv-cache-tester whose prompts grow, with a sub-agent in each."""
    for place in range(sessions):
        requests = [
            {"type": "n", "in": 640, "out": 32, "hash_ids": list(range(10)), "stop": "tool_use"},
            {
                "type": "subagent",
                "agent_id": "a",
                "requests": [{"type": "n", "in": 320, "out": 16, "hash_ids": [90, 91]}],
            },
            {"type": "n", "in": 1280, "out": 32, "hash_ids": list(range(20)), "think_time": 1.6},
        ]
        session = {"id": f"s{place}", "block_size": 64, "hash_id_scope": "local", "requests": requests}
        (tmp_path / f"s{place}.json").write_text(json.dumps(session))
    return ["--dataset-name", "sessions", "--dataset-path", str(tmp_path), "--trace-format", "kv-cache-tester"]


@pytest.mark.parametrize("backend", ["tokenyard", "openai"])
def test_sessions_run_closed_loop_with_the_tokens_of_the_trace(mock_server, tmp_path, capsys, backend):
    (tmp_path / "trace").mkdir()
    out, trace = tmp_path / "out.jsonl", session_trace(tmp_path / "trace")
    words = [*trace, "--backend", backend, "--concurrent-sessions", "2", "--shrink", "16", "--flush-cache"]
    assert bench(mock_server, *words, "--output-file", str(out), "--output-details") == 0
    numbers = json.loads(out.read_text())
    assert (numbers["completed"], numbers["failed"]) == (15, 0)
    assert numbers["total_input_tokens"] == 5 * (40 + 20 + 80)
    assert numbers["total_output_tokens"] == 5 * (2 + 1 + 2)
    figures = numbers["sessions"]
    assert (figures["sessions"], figures["finished"], figures["turns"]) == (5, 5, 15)
    assert figures["hit_share"] > 0.15
    for first, agent, last in zip(*[iter(numbers["requests"])] * 3, strict=True):
        assert agent["sent_s"] >= first["sent_s"] + first["latency_s"]
        assert last["sent_s"] >= agent["sent_s"] + agent["latency_s"] + 0.1
    assert "Sessions that ended:                     5 of 5" in capsys.readouterr().out


def test_sessions_need_a_trace_that_has_some(mock_server, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}) + "\n")
    assert bench(mock_server, "--dataset-name", "sessions") == 2
    assert "needs --dataset-path" in capsys.readouterr().err
    assert bench(mock_server, "--dataset-name", "sessions", "--dataset-path", str(path)) == 2
    assert "has no sessions" in capsys.readouterr().err
