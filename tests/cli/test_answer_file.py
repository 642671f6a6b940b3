"""`generate --input --output`: a run continues what an earlier one left and never destroys an answer."""

import json

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.answer_file import AnswerFile
from tokenyard.cli.main import main

PROMPTS = ["one", "two", "one", "three"]
MOCK = ["--executor", "mock", "--max-tokens", "3"]


def lines_of(*prompts: str) -> list[dict]:
    return [{"prompt": prompt} for prompt in prompts]


def answer(prompt: str, text: str) -> dict:
    return {"prompt": prompt, "text": text}


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interrupted_run_is_continued_and_the_result_is_in_order(tmp_path):
    path = tmp_path / "out.jsonl"
    first = AnswerFile(str(path), lines_of(*PROMPTS), "options")
    first.add(2, answer("one", "c"))
    first.add(1, answer("two", "b"))
    first.close()
    assert not path.exists(), "a file of that name is complete"
    # The process was killed within a line.
    with (tmp_path / "out.jsonl.partial").open("a") as partial:
        partial.write('{"of": "12')
    second = AnswerFile(str(path), lines_of(*PROMPTS), "options")
    assert len(second.missing) == 2
    for place in second.missing:
        second.add(place, answer(PROMPTS[place], "later"))
    second.finish()
    assert [record["prompt"] for record in records(path)] == PROMPTS
    assert sorted(record["text"] for record in records(path)) == ["b", "c", "later", "later"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_answers_with_other_options_do_not_count(tmp_path):
    path = str(tmp_path / "out.jsonl")
    first = AnswerFile(path, lines_of("one"), {"temperature": 0})
    first.add(0, answer("one", "a"))
    first.close()
    second = AnswerFile(path, lines_of("one"), {"temperature": 1})
    assert second.missing == [0]
    second.close()


def test_more_lines_keep_the_answers_of_a_finished_file(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(answer("two", "b")) + "\n" + '{"prompt": "one", "te')
    longer = AnswerFile(str(path), lines_of(*PROMPTS), "")
    assert longer.missing == [0, 2, 3]
    longer.close()
    assert path.read_text().startswith('{"prompt": "two"')


def test_a_file_with_answers_to_something_else_is_kept_under_another_name(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"prompt": "mine"}\n')
    answers = AnswerFile(str(path), lines_of("one"), "")
    answers.add(0, answer("one", "a"))
    assert path.read_text() == '{"prompt": "mine"}\n'
    answers.finish()
    assert records(path) == [answer("one", "a")]
    assert (tmp_path / "notes.jsonl.old").read_text() == '{"prompt": "mine"}\n'


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        AnswerFile(str(tmp_path / "no" / "out.jsonl"), lines_of("one"), "")


def test_a_batch_line_that_failed_is_asked_again(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [{"custom_id": name, "url": "/v1/completions", "body": {}} for name in "ab"]
    done = [{"custom_id": name, "response": {"status_code": status}} for name, status in (("a", 200), ("b", 503))]
    path.write_text("".join(json.dumps(line) + "\n" for line in done))
    again = AnswerFile(str(path), lines, "")
    assert again.missing == [1]
    again.close()


@pytest.mark.parametrize("batch", [False, True])
def test_a_second_run_answers_only_what_is_new(tmp_path, capsys, batch):
    source, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def ask(*prompts: str) -> list[dict]:
        body = {"max_tokens": 3}
        lines = [
            {"custom_id": prompt, "url": "/v1/completions", "body": {**body, "prompt": prompt}} if batch else prompt
            for prompt in prompts
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["generate", "--input", str(source), "--output", str(path), *MOCK]) == 0
        return records(path)

    first = ask("one", "two")
    assert len(first) == 2
    second = ask("zero", "one", "two")
    assert second[1:] == first
    assert "2 of 3 answers are kept" in capsys.readouterr().err
    assert ask("zero", "one", "two") == second
    assert "all 3 answers are in" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
