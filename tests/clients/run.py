"""Tries unchanged clients against a running server: `python -m tests.clients.run [NAME ...]`.

Each client gets its own environment under .venv-clients, made at its first run. The server is `tokenyard serve`
with the demo model (`--mock`: the mock executor). Prints a table and exits with 1 if any client failed.
"""

import argparse
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.servers import ROOT, Server
from tokenyard.config import DEMO_MODEL

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / ".venv-clients"
MODEL = "tokenyard-demo"
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and whether that is under half a gigabyte. alone: a package to install without what it
    says that it needs.
    """

    name: str
    requirements: tuple[str, ...]
    light: bool = True
    alone: str = ""

    @property
    def script(self) -> Path:
        """What is run by the client's own Python."""
        return HERE / f"check_{self.name.replace('-', '_')}.py"

    @property
    def python(self) -> Path:
        """That Python."""
        return ENVIRONMENTS / self.name / "bin" / "python"


CLIENTS = (
    Client("openai", ("openai==3.52.0",)),
    Client("anthropic", ("anthropic==2.12.0",)),
    Client("ollama", ("ollama==0.6.3",)),
    Client("langchain-openai", ("langchain-openai==1.7.3",)),
    Client("instructor", ("instructor==1.17.0",)),
    Client("litellm", ("litellm==1.106.2", "mcp==2.3.0")),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("openai-agents", ("openai-agents==0.24.0",)),
    Client(
        "sglang-lang",
        ("numpy==2.4.6", "requests", "tqdm", "aiohttp", "msgspec", "pydantic", "ipython", "pybase64", "pillow"),
        alone="sglang==0.5.23",
    ),
    Client("guidellm", ("guidellm==0.8.1",), light=False),
    Client(
        "areal",
        (
            *("torch==2.13.0", "transformers==5.23.0", "torchdata==0.11.0", "safetensors==0.8.0", "openai==3.52.0"),
            *(
                "ray==2.60.0",
                "numba==0.68.1",
                "hydra-core==1.4.0.dev1",
                "omegaconf==2.4.0.dev2",
                "pydantic",
                "uvloop",
                "aiohttp",
            ),
            *("aiofiles", "requests", "httpx", "flask", "tenacity", "colorlog", "pybase64", "pillow", "einops", "lark"),
            *("orjson", "psutil", "pyyaml", "rich", "accelerate==1.15.0"),
        ),
        light=False,
        alone="areal==1.0.4",
    ),
    Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.23.0"), light=False),
    Client("aiperf", ("aiperf==0.13.0",), light=False),
    Client("schemathesis", ("schemathesis==4.32.5",), light=False),
)


def install(client: Client) -> None:
    """Make the client's environment unless it is there; raises CalledProcessError if pip fails."""
    stamp = ENVIRONMENTS / client.name / "installed"
    wanted = "\n".join(client.requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {' '.join(client.requirements)} ...", file=sys.stderr, flush=True)
    venv.create(ENVIRONMENTS / client.name, with_pip=True)
    # Any looser range of torch may bring gigabytes of CUDA libraries.
    options = ["--quiet", "--disable-pip-version-check", "-c", str(HERE / "constraints.txt")]
    options += os.environ.get("CLIENT_PIP_FLAGS", "").split()
    subprocess.run([client.python, "-m", "pip", "install", *options, *client.requirements], check=True)
    if client.alone:
        subprocess.run([client.python, "-m", "pip", "install", "-q", "--no-deps", client.alone], check=True)
    stamp.write_text(wanted)


def check(python: str | Path, client: Client, url: str) -> str:
    """Run a client's script and return its line of result; what else it printed goes to standard error on a failure."""
    command = [str(python), str(client.script), url, MODEL, str(DEMO_MODEL)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=HERE)
    except subprocess.TimeoutExpired:
        return f"FAIL {client.name}: not done within {TIMEOUT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASS ", "FAIL "))]
    if not lines or not lines[-1].startswith("PASS "):
        print(done.stdout + done.stderr, file=sys.stderr)
    return lines[-1] if lines else f"FAIL {client.name}: ended with {done.returncode} and without a result"


def run(client: Client, url: str) -> str:
    """Install and check one client."""
    try:
        install(client)
    except subprocess.CalledProcessError as error:
        return f"FAIL {client.name}: cannot be installed: pip ended with {error.returncode}"
    return check(client.python, client, url)


def main() -> int:
    """Try the clients that were named, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--mock", action="store_true", help="serve with the mock executor")
    options = parser.parse_args()
    if unknown := set(options.names) - {client.name for client in CLIENTS}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    flags = ["--executor", "mock", "--mock-step-ms", "2"] if options.mock else ["--device", "cpu"]
    server = Server(*flags, "--log-level", "warning")
    results = []
    try:
        for client in chosen:
            begin = time.monotonic()
            results.append((run(client, server.url), time.monotonic() - begin))
    finally:
        server.close()
    print(f"{'result':8}{'client':28}{'seconds':>8}  what was tried")
    for line, seconds in results:
        verdict, _, rest = line.partition(" ")
        name, _, what = rest.partition(": ")
        print(f"{verdict:8}{name:28}{seconds:8.1f}  {what}")
    return 0 if all(line.startswith("PASS ") for line, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
