"""guidellm: a short run of two concurrent streams, all of which must succeed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Target, expect, try_client

REQUESTS = 8


def concurrent_streams(target: Target) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            *(str(Path(sys.executable).parent / "guidellm"), "run"),
            *("--backend", f"kind=openai_http,target={target.url},model={target.model}"),
            *("--tokenizer", f"kind=hf_auto,model={target.tokenizer}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={out}"),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=dict(os.environ))
        expect(done.returncode == 0, f"guidellm ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
        report = json.loads(out.read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["successful"] >= REQUESTS and not totals["errored"], f"totals {totals}")
    return f"{totals['successful']} of {REQUESTS} requests in two streams"


if __name__ == "__main__":
    try_client("guidellm", [concurrent_streams])
