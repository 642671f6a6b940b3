"""Every command with odd terminals, closed or full standard files, and locales that hold no Unicode."""

import os
import subprocess
import sys

import pytest

from tokenyard.cli.main import COMMANDS, main

SIMULATE = ["simulate", "--synthetic", "plain", "--limit", "5"]


def run(*argv, env=None, redirect=""):
    command = f'exec "$0" -m tokenyard "$@" {redirect}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *argv],
        env=os.environ | (env or {}),
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("columns", ["1", "-5", "x", "1000"])
@pytest.mark.parametrize(
    "argv", [["--help"], *([one.name, "--help"] for one in COMMANDS), ["bench", "serve", "--help"]]
)
def test_help_at_any_width(argv, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*argv, "--help"]) == 0
    assert "usage: tokenyard" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["1", "20", "1000"])
def test_tables_at_any_width(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(SIMULATE) == 0
    assert "SLO attainment" in capsys.readouterr().out


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "env",
    [
        {"TERM": "dumb", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"NO_COLOR": "1", "TERM": "", "COLUMNS": "1", "PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_a_table_in_any_environment(env):
    done = run(*SIMULATE, env=env)
    assert done.returncode == 0, done.stderr
    assert b"SLO attainment" in done.stdout
    assert b"\x1b" not in done.stdout


def test_answers_that_the_locale_cannot_hold_are_escaped():
    argv = ["generate", "Once", "--executor", "mock", "--mock-step-ms", "0", "--max-tokens", "200"]
    done = run(*argv, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.part(3)
@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_standard_files(redirect):
    done = run(*SIMULATE, redirect=redirect)
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_prompt_from_a_closed_standard_input_is_refused():
    done = run("generate", "-", "--executor", "mock", redirect="<&-")
    assert done.returncode == 2
    assert b"standard input is closed" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_full_disk_is_one_line():
    done = run(*SIMULATE, redirect=">/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"tokenyard: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("argv", "status"), [(["--help"], 0), (SIMULATE, 1)])
def test_a_closed_pipe_ends_the_command_quietly(argv, status):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tokenyard", *argv]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", status)
