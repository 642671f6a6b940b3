"""`tokenyard cache-check`."""

import json

import pytest

from tokenyard.cli.main import main

SYSTEM = {"role": "system", "content": "You help. Today is 2026-11-24."}
ASK = {"role": "user", "content": "fix it"}
SAY = {"role": "assistant", "content": "done", "reasoning_content": "hmm"}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "required": ["a", "b"]}}}
BODY = {"model": "m", "tools": [TOOL], "messages": [SYSTEM, ASK, SAY]}
MORE = {"role": "user", "content": "more"}
REORDERED = {"function": TOOL["function"], "type": "function"}


def check(tmp_path, capsys, before, after, *flags):
    for name, body in (("a", before), ("b", after)):
        (tmp_path / name).write_text(json.dumps(body))
    code = main(["cache-check", str(tmp_path / "a"), str(tmp_path / "b"), *flags])
    return code, capsys.readouterr().out


def with_messages(*messages, **fields):
    return {**BODY, "messages": list(messages), **fields}


@pytest.mark.parametrize(
    ("after", "part", "how"),
    [
        (with_messages(SYSTEM, ASK, {**SAY, "content": "no"}, MORE), "messages[2]", "changed"),
        (with_messages(SYSTEM, ASK, {"role": "assistant", "content": "done"}, MORE), "messages[2]", "reasoning"),
        (with_messages({**SYSTEM, "content": "You help. Today is 2026-11-25."}, ASK), "messages[0]", "a date or time"),
        (with_messages(SYSTEM, ASK), "messages[2]", "left out"),
        (with_messages(SYSTEM, ASK, SAY, MORE, tools=[REORDERED]), "tools[0]", "reordered"),
        (with_messages(SYSTEM, ASK, SAY, MORE, tools=[]), "tools[0]", "left out"),
        (with_messages(SYSTEM, ASK, SAY, MORE, cache_salt="x"), "cache_salt", "salt"),
    ],
)
def test_the_first_difference_is_named(tmp_path, capsys, after, part, how):
    code, text = check(tmp_path, capsys, BODY, after)
    assert code == 1
    assert f"differ from {part} on" in text
    assert how in text
    numbers = json.loads(check(tmp_path, capsys, BODY, after, "--json")[1])
    assert (numbers["continues"], numbers["part"]) == (False, part)


def test_a_prompt_that_continues(tmp_path, capsys):
    code, text = check(tmp_path, capsys, BODY, with_messages(SYSTEM, ASK, SAY, MORE))
    assert code == 0
    assert "continues" in text


def test_claude_codes_billing_header(tmp_path, capsys):
    bodies = [
        {"system": [{"type": "text", "text": f"x-anthropic-billing-header: n={n};\nYou help."}], "messages": [ASK]}
        for n in (1, 2)
    ]
    assert "system on (changed: a billing header)" in check(tmp_path, capsys, *bodies)[1]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"messages": "x"}'])
def test_what_is_no_body(tmp_path, capsys, text):
    (tmp_path / "a").write_text(text)
    assert main(["cache-check", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert str(tmp_path / "a") in capsys.readouterr().err
    assert main(["cache-check", str(tmp_path / "none"), str(tmp_path / "a")]) == 2
