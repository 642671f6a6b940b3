"""aiperf: a short streaming run with made-up prompts, no request of which may fail."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Target, expect, try_client

REQUESTS = 10


def streaming_chat(target: Target) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # It takes a path for a name on the hub unless it is relative.
        shutil.copytree(target.tokenizer, folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
        command = [
            *(str(Path(sys.executable).parent / "aiperf"), "profile", "--model", target.model, "--url", target.url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", "tokenizer"),
            *("--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
            *("--artifact-dir", "out"),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)
        expect(done.returncode == 0, f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
        report = json.loads(next((folder / "out").rglob("profile_export_aiperf.json")).read_text())
    count = int(report["request_count"]["avg"])
    errors = int((report.get("error_request_count") or {"avg": 0})["avg"])
    expect(count == REQUESTS and not errors, f"{count} requests, {errors} errors")
    return f"{count} of {REQUESTS} requests, time to first token {report['time_to_first_token']['avg']:.0f} ms"


if __name__ == "__main__":
    try_client("aiperf", [streaming_chat])
