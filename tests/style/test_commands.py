"""The commands on the pages: their flags exist, and the site that is built of the pages has no warning."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROMPT = re.compile(r"^\s*(\$ )?(\.venv/bin/)?(?=tokenyard )")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
SHELL = ("", "sh", "bash", "console")


def commands(page):
    """The command lines of a page that call the package, with continued lines joined."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            called = PROMPT.sub("", line)
            if called.startswith("tokenyard "):
                yield called.strip()


def words_of(line):
    """The words after `tokenyard` of a command line, up to a pipe, without where its output goes."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("|")] if "|" in words else words
    kept = [place for place, word in enumerate(words) if not word.startswith((">", "2>")) and word != "&"]
    return [words[place] for place in kept if not (place and words[place - 1] in (">", "2>"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_flags_of_every_command_exist(page):
    wrong = []
    for line in commands(page):
        words = words_of(line)
        if "--help" in words or "..." in words:
            continue
        try:
            build_parser(words[0]).parse_strictly(words)
        except (ConfigError, SystemExit) as error:
            wrong.append(f"{line}: {error}")
    assert not wrong


def test_there_are_commands_to_check():
    assert sum(1 for page in PAGES for _ in commands(page)) > 12


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "simulator" / "index.html").is_file()
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("index.html")]
    assert not [found for text in pages for found in re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]+)"', text)]
