"""The live page, the router's page and a report in a real browser: Debian's Chromium, driven by Playwright."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.servers import ROOT, Server

pytestmark = pytest.mark.world
KEY = "the-admin-key"
PLAYWRIGHT = "playwright==1.65.2"
ENVIRONMENT = ROOT / ".venv-clients" / "playwright"
SCRIPT = Path(__file__).parent / "check_pages.py"


@pytest.fixture(scope="module")
def browser_python() -> str:
    """A Python with Playwright, in a separate environment."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", PLAYWRIGHT], check=True)
    return str(python)


def run_tokenyard(*words, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tokenyard", *words], env=environment, **more)


def test_pages(browser_python, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium; apt install chromium")
    report = tmp_path / "report.html"
    asked = ("compare", "fcfs", "slo", "--synthetic", "tenants", "--limit", "200", "--quiet", "--report", str(report))
    assert run_tokenyard(*asked).wait(120) == 0
    server = Server("--executor", "mock", "--admin-api-key", KEY)
    route = ("route", "--worker-urls", server.url, "--worker-api-key", KEY, "--port", "0")
    router = run_tokenyard(*route, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in router.stderr if "routes at" in line)
        urls = (server.url, line.split()[-1], report.as_uri())
        shots = os.environ.get("TOKENYARD_SCREENSHOTS", "")
        command = [browser_python, str(SCRIPT), chromium, *urls, *([shots] if shots else [])]
        found = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert found.stdout.strip() == "PASS", found.stdout + found.stderr
    finally:
        router.terminate()
        router.wait(30)
        server.close()
