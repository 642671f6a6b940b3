"""The commands on the pages are run as written, in a folder that has the files they name.

Those that are not run are named with the reason.
"""

import gzip
import io
import json
import re
import signal
import tarfile

import httpx2
import pytest
import zstandard

from tests.e2e.servers import Server
from tests.style.test_commands import PAGES, ROOT, commands, words_of
from tokenyard.cli import simulation_arguments
from tokenyard.cli.main import main
from tokenyard.config import DEMO_MODEL
from tokenyard.cost import get_profile
from tokenyard.cost.profiles import save_profile
from tokenyard.sim.traces.synthetic import synthetic

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
NOT_RUN = {
    "serve": "runs until it is stopped: tests/e2e",
    "route": "runs until it is stopped: tests/router, tests/e2e/test_fleet.py",
    "top": "runs until it is stopped: tests/server/test_top.py",
    "batch": "needs a running server: tests/e2e/test_batches.py",
    "bench": "needs a running server: tests/e2e/test_bench.py",
    "calibrate": "takes a minute and a model of one's own: tests/cli/test_calibrate.py",
}
REQUESTS = 100
SLOW = {"plan", "goodput"}
"""What takes seconds even on little."""


def cases():
    """(command line, words) of every page, each once."""
    seen = {}
    for page in PAGES:
        for line in commands(page):
            words = words_of(line)
            if words[0] not in NOT_RUN and "..." not in words and "--help" not in words:
                seen.setdefault(tuple(words), line)
    return [pytest.param(words, id=" ".join(words), marks=[pytest.mark.slow] * (words[0] in SLOW)) for words in seen]


def block(page, beginning):
    """The block of a page that begins so."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return next(found for found in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M) if found.startswith(beginning))


def write_sessions(path, sessions=160):
    """Sessions of two turns in the form of kv-cache-tester."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for place in range(sessions):
            turns = [{"type": "n", "in": 64 * n, "out": 4, "hash_ids": list(range(n))} for n in (9, 12)]
            session = {"id": f"s{place}", "block_size": 64, "hash_id_scope": "local", "requests": turns}
            raw = json.dumps(session).encode()
            info = tarfile.TarInfo(f"sessions/s{place}.json")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    path.write_bytes(zstandard.compress(archive.getvalue()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traces, a tape and a log of a short run of the server, and the files that the pages show."""
    path = tmp_path_factory.mktemp("docs")
    (path / "fleet.yaml").write_text(block("simulator.md", "routers:"))
    (path / "devices.yaml").write_text(block("simulator.md", "devices:"))
    (path / "my_policies.py").write_text(block("your_own_policy.md", '"""my_policies.py"""'))
    (path / "my_routing.py").write_text(block("your_own_policy.md", '"""my_routing.py"""'))
    asked = [line for line in block("applications.md", "$ cat asked.jsonl").splitlines() if line.startswith("{")]
    (path / "asked.jsonl").write_text("\n".join(asked))
    lines = [f"2023-11-16 18:15:{n % 60:02}.000,{50 + 7 * n},{5 + n % 9}\n" for n in range(40)]
    with gzip.open(path / "azure.csv.gz", "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    with gzip.open(path / "conversation_trace.jsonl.gz", "wt") as file:
        for n in range(40):
            turn = {"timestamp": 900 * n, "input_length": 600 + 9 * n, "output_length": 5 + n % 9}
            file.write(json.dumps({**turn, "hash_ids": [n % 4, 100 + n]}) + "\n")
    write_sessions(path / "sessions.tar.zst")
    turns = [("user", "Hello"), ("assistant", "Hi"), ("user", "Who are you?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    (path / "a.json").write_text(json.dumps({"messages": messages[:1]}))
    (path / "b.json").write_text(json.dumps({"messages": messages}))
    save_profile(get_profile("cpu", "smollm2-135m"), path / "mine.json")
    tape = str(path / "hour.tape")
    server = Server("--executor", "mock", "--record", tape, "--log-requests", "--log-format", "json")
    for begin in range(3, 9, 2):
        prompts = [[*range(begin + 7 * number, begin + 7 * number + 1000)] for number in range(16)]
        body = {"prompt": prompts, "max_tokens": 4}
        assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    (path / "server.log").write_text(server.log)
    (path / "traffic.tape").write_bytes((path / "hour.tape").read_bytes())
    assert main(["replay", tape, "--to-trace", str(path / "hour.jsonl")]) == 0
    return path


@pytest.mark.part(9)
@pytest.mark.parametrize("words", cases())
def test_a_command_of_the_docs_does_what_it_says(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
    # Nothing but the length of the traffic is another than on the page.
    monkeypatch.setattr(
        simulation_arguments, "synthetic", lambda name, requests, *more: synthetic(name, min(requests, REQUESTS), *more)
    )
    status, printed = main(list(words)), capsys.readouterr()
    assert status == 0, printed
    assert printed.out + printed.err
    for flag in ("--report", "--json", "--to-trace", "--output"):
        if flag in words:
            assert (folder / words[words.index(flag) + 1]).stat().st_size > 0


def test_what_is_not_run_is_on_a_page():
    first = {words_of(line)[0] for page in PAGES for line in commands(page)}
    assert set(NOT_RUN) <= first, "a reason for no command"


def test_words_of_a_command():
    assert words_of("tokenyard top &    # next to it") == ["top"]
    assert words_of("tokenyard serve --log-format json 2> server.log") == ["serve", "--log-format", "json"]
