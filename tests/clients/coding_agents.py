"""Drives Claude Code, Codex, opencode and aider, unchanged, through a router with two engines:
`python -m tests.clients.coding_agents [NAME ...]`.

They are installed with npm and pip under .venv-clients/agents at the first run, and reach nothing but 127.0.0.1. The
engines serve a checkpoint that always says the same (`scripted_model`): for Claude Code a call of its Bash tool, so
that it goes on for 30 turns, in the middle of which the engine with its session is killed; for the others a sentence.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.clients.scripted_model import tool_call, write_model
from tests.e2e.servers import ROOT, Server

HOME = ROOT / ".venv-clients" / "agents"
NPM = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
AIDER = "aider-chat==0.86.2"
MODEL, SENTENCE = "my-model", "The work is done."
CONTEXT, SMALL_CONTEXT = 131_072, 60_000
TURNS, KILL_AFTER = 30, 15
TIMEOUT_S = 240
AIDER_QUIET = ("--no-check-update", "--no-show-model-warnings", "--message")
CODEX = """model = "{model}"
model_provider = "tokenyard"

[model_providers.tokenyard]
name = "Tokenyard"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE = {"$schema": "https://opencode.ai/config.json", "autoupdate": False, "share": "disabled"}


class Fleet:
    """Two engines behind a router, which serve one checkpoint."""

    def __init__(self, model: Path, *flags: str) -> None:
        common = ("--model", str(model), "--served-model-name", MODEL, "--device", "cpu", "--log-requests")
        self.engines = [Server(*common, "--max-total-tokens", "300000", *flags) for _ in range(2)]
        command = [sys.executable, "-m", "tokenyard", "route", "--port", "0", "--worker-urls"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._log = model.parent / "router.log"
        with self._log.open("w") as log:
            urls = [engine.url for engine in self.engines]
            self.router = subprocess.Popen([*command, *urls], stderr=log, env=environment)
        self.url = self._address()
        self._readers = [threading.Thread(target=self._read, args=(engine,), daemon=True) for engine in self.engines]
        for reader in self._readers:
            reader.start()

    def _address(self) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = re.search(r"routes at (http\S+)", self._log.read_text())
            if found and _answers(f"{found[1]}/v1/models", MODEL):
                return found[1]
            time.sleep(0.2)
        raise AssertionError(f"the router is not ready: {self._log.read_text()}")

    @staticmethod
    def _read(engine: Server) -> None:
        assert engine.process.stderr is not None
        for line in iter(engine.process.stderr.readline, b""):
            engine.log += line.decode(errors="replace")

    def turns(self, engine: Server) -> list[dict[str, str]]:
        """The fields of the engine's finished answers, oldest first."""
        lines = re.findall(r"Finish: (.*)", engine.log)
        return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]

    def close(self) -> None:
        """End all processes."""
        self.router.terminate()
        self.router.wait()
        for engine in self.engines:
            engine.process.terminate()
            engine.process.wait()


def _answers(url: str, text: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return text in answer.read().decode()
    except OSError:
        return False


def install() -> None:
    """Install the four agents unless they are there. Raises CalledProcessError if npm or pip fails."""
    stamp = HOME / "installed"
    wanted = "\n".join((*NPM, AIDER))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    HOME.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", HOME, *NPM], check=True)
    venv.create(HOME / "aider", with_pip=True)
    subprocess.run([HOME / "aider/bin/python", "-m", "pip", "install", "-q", AIDER], check=True)
    stamp.write_text(wanted)


def run_agent(url: str, command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """What an agent prints, run in `folder` without a network beyond this machine."""
    (folder / "home/.codex").mkdir(parents=True, exist_ok=True)
    (folder / "home/.codex/config.toml").write_text(CODEX.format(model=MODEL, url=url))
    work = folder / "work"
    work.mkdir(exist_ok=True)
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": {MODEL: {}}}
    (work / "opencode.json").write_text(json.dumps({**OPENCODE, "provider": {"tokenyard": provider}}))
    nowhere = "http://127.0.0.1:9"
    chosen = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "no_proxy": "127.0.0.1",
        **environment,
    }
    done = subprocess.run(
        command, cwd=work, env=chosen, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.stdout + done.stderr


def claude(fleet: Fleet, folder: Path, turns: int) -> str:
    """Claude Code in a task of so many turns."""
    command = [_npm("claude"), "-p", "print the date", "--max-turns", str(turns), "--allowedTools", "Bash"]
    return run_agent(
        fleet.url,
        [*command, "--output-format", "json"],
        folder,
        ANTHROPIC_BASE_URL=fleet.url,
        ANTHROPIC_AUTH_TOKEN="any",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def _npm(name: str) -> Path:
    return HOME / "node_modules/.bin" / name


def check_claude_code(folder: Path) -> str:
    """30 turns, and the engine that has them is killed after 15: each turn but the first at an engine is a hit."""
    model = write_model(folder / "caller", tool_call("Bash", command="date", description="print the date"), CONTEXT)
    fleet = Fleet(model)
    killed: list[Server] = []

    def kill_home() -> None:
        while not killed:
            for engine in fleet.engines:
                if len(fleet.turns(engine)) >= KILL_AFTER:
                    engine.process.kill()
                    killed.append(engine)
            time.sleep(0.02)

    try:
        threading.Thread(target=kill_home, daemon=True).start()
        printed = claude(fleet, folder, TURNS)
        assert '"terminal_reason":"max_turns"' in printed, printed[-2000:]
        assert killed, "no engine had all the turns"
        (other,) = [engine for engine in fleet.engines if engine not in killed]
        before, after = fleet.turns(killed[0]), fleet.turns(other)
    finally:
        fleet.close()
    answered = {int(turn["turn"]) for turn in before + after}
    assert answered >= set(range(TURNS)), f"turns without an answer: {sorted(set(range(TURNS)) - answered)}"
    for turns in (before, after):
        missed = [turn["turn"] for turn in turns[1:] if turn.get("cache") != "hit"]
        assert not missed, f"turns {missed} missed the cache"
    return f"{len(answered)} turns, {len(before)} of them before an engine was killed, hits in all but the first there"


def check_claude_code_context(folder: Path) -> str:
    """32,000 tokens of answer do not fit: Claude Code reads the error and asks for what does."""
    model = write_model(folder / "small", tool_call("Bash", command="date", description="print the date"), CONTEXT)
    fleet = Fleet(model, "--context-length", str(SMALL_CONTEXT))
    try:
        printed = claude(fleet, folder, 2)
        turns = [turn for engine in fleet.engines for turn in fleet.turns(engine)]
    finally:
        fleet.close()
    asked = [int(turn["max_new_tokens"]) for turn in turns]
    assert '"terminal_reason":"max_turns"' in printed, printed[-2000:]
    assert asked, "no answer"
    assert all(tokens < 32_000 for tokens in asked), asked
    return f"asked for {asked[0]} tokens after it was told that 32,000 do not fit"


def check_others(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Codex, opencode and aider: one turn each, with the answer that the model gives."""
    commands: dict[str, tuple[Sequence[str | Path], dict[str, str]]] = {
        "codex": ([_npm("codex"), "exec", "--skip-git-repo-check", "say hello"], {}),
        "opencode": ([_npm("opencode"), "run", "-m", f"tokenyard/{MODEL}", "say hello"], {}),
        "aider": (
            [HOME / "aider/bin/aider", "--model", f"openai/{MODEL}", "--no-git", "--yes", *AIDER_QUIET, "say hello"],
            {"OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ),
    }
    fleet, found = Fleet(write_model(folder / "speaker", SENTENCE, CONTEXT)), {}
    try:
        for name in names:
            command, environment = commands[name]
            printed = run_agent(fleet.url, command, folder, OPENAI_API_BASE=f"{fleet.url}/v1", **environment)
            found[name] = "PASS answered" if SENTENCE in printed else f"FAIL {printed[-600:]}"
    finally:
        fleet.close()
    return found


def main() -> int:
    """Try the agents that were named, or all, and print a line for each."""
    long: dict[str, Callable[[Path], str]] = {
        "claude-code": check_claude_code,
        "claude-code-context": check_claude_code_context,
    }
    short = ("codex", "opencode", "aider")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*long, *short)))
    names = parser.parse_args().names or [*long, *short]
    if unknown := set(names) - {*long, *short}:
        parser.error(f"there is no agent {', '.join(sorted(unknown))}")
    install()
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in long:
                try:
                    results[name] = f"PASS {long[name](Path(folder) / name)}"
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    results[name] = f"FAIL {error}"
        if chosen := [name for name in names if name in short]:
            results |= check_others(chosen, Path(folder) / "others")
    for name, result in results.items():
        print(f"{result[:4]}  {name:22}{result[5:]}")
    return 0 if all(result.startswith("PASS") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
