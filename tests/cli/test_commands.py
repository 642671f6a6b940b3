"""The commands doctor and generate, and the imports behind the command line."""

import json
import subprocess
import sys

import pytest

from tokenyard.cli.generate import read_inputs
from tokenyard.cli.main import main
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
MOCK = ["--executor", "mock", "--mock-step-ms", "0"]


def test_generate_one_prompt(capsys):
    assert main(["generate", "Hello there", "--max-tokens", "4", *MOCK]) == 0
    first = capsys.readouterr().out
    assert first.strip()
    assert main(["generate", "Hello there", "--max-tokens", "4", *MOCK]) == 0
    assert capsys.readouterr().out == first


def test_generate_from_files(tmp_path, capsys):
    lines, records, out = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines.write_text("one\n\ntwo\n")
    messages = [{"role": "user", "content": "two"}]
    records.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"messages": messages}) + "\n")
    for file in (lines, records):
        assert main(["generate", "--input", str(file), "--output", str(out), "--max-tokens", "3", *MOCK]) == 0
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        assert [answer["completion_tokens"] for answer in answers] == [3, 3]
        assert answers[0]["prompt"] == "one"
    assert answers[1]["messages"] == messages


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--max-tokens", "0"], "at least 1"), (["--stop", ""], "empty strings"), (["--top-p", "0"], "top_p")],
)
def test_generate_refuses_what_the_server_refuses(arguments, words, capsys):
    assert main(["generate", "Hello", *arguments, *MOCK]) == 2
    assert words in capsys.readouterr().err


def test_unreadable_inputs_name_the_line(tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('"fine"\n{"x": 1}\n')
    assert main(["generate", "--input", str(file), *MOCK]) == 2
    assert "line 2" in capsys.readouterr().err


def test_prompt_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin.read", lambda: "typed", raising=False)
    assert list(read_inputs("-", None)) == ["typed"]


def test_doctor_reports_as_json(capsys):
    assert main(["doctor", "--json", "--port", "5", "--api-key", "secret", *MOCK]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["settings"]["port"] == {"value": 5, "from": "--port"}
    assert report["problems"] == []
    assert report["machine"]["cpu_cores"] >= 1
    assert "secret" not in text


def test_doctor_shows_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("tokenyard.cli.doctor.device", lambda: {"torch": None, "would_choose": "mock"})
    assert main(["doctor"]) == 1
    assert "tokenyard[torch]" in capsys.readouterr().out


def test_doctor_finds_a_missing_model(tmp_path, capsys):
    assert main(["doctor", "--json", "--model", str(tmp_path)]) == 1
    problems = " ".join(json.loads(capsys.readouterr().out)["problems"])
    assert "config.json" in problems
    assert "tokenizer.json" in problems


def test_doctor_finds_that_there_is_no_model(capsys):
    assert main(["doctor", "--json", "--model", "/nonexistent"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["there is no model folder '/nonexistent'"]


def test_help_needs_no_heavy_import():
    code = (
        "import sys; from tokenyard.cli.main import build_parser; import tokenyard; build_parser().format_help();"
        "print([name for name in ('torch', 'starlette', 'tokenizers', 'zmq', 'tokenyard.sim') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_that_look_like_markup_are_shown_as_they_are(capsys):
    assert main(["doctor", "--served-model-name", "[/x]", *MOCK]) == 0
    assert "[/x]" in capsys.readouterr().out
