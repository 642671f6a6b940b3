"""schemathesis: requests made up from /openapi.json never meet a 5xx."""

import re
import subprocess
import sys
from pathlib import Path

from common import Target, expect, try_client

MAX_SECONDS, EXAMPLES = 60, 20


def no_server_error(target: Target) -> str:
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{target.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--phases", "coverage,fuzzing"),
        # A paused engine would keep every later request waiting.
        *("--exclude-path", "/pause_generation", "--exclude-path-regex", r"/pause$"),
        *("--max-examples", str(EXAMPLES), "--max-time", str(MAX_SECONDS), "--request-timeout", "30"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * MAX_SECONDS)
    expect(done.returncode == 0, f"schemathesis ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    count = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    expect(count and count[1] == count[2], done.stdout[-800:])
    return f"{count[1]} made-up requests, no 5xx"


if __name__ == "__main__":
    try_client("schemathesis", [no_server_error])
