"""The kernels' own tests under the compiler's address and undefined-behaviour sanitizers, which take four minutes to
compile and run.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tokenyard.executor.native.build import BuildError, find_compiler

ROOT = Path(__file__).resolve().parents[2]
TESTS = "test_native_kernels or test_native_experts or test_native_lora or test_all_draw"
BEST = f"({TESTS}) and (avx512-bf16 or (avx2 and not avx512) or 32k)"
"""Two kinds of kernels, and adapters in whole steps; `python tools/native_sanitizers.py` runs all, and whole steps."""


def sanitizer_library():
    """Path of the compiler's address sanitizer, "" where there is none."""
    try:
        command = [*find_compiler(), "-print-file-name=libasan.so"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (BuildError, OSError, subprocess.CalledProcessError):
        return ""
    return found if Path(found).is_absolute() else ""


@pytest.mark.world
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sanitizer_library(), reason="no compiler with an address sanitizer")
def test_kernels_read_and_write_only_what_is_theirs():
    command = [sys.executable, "tools/native_sanitizers.py", "address", "-k", BEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "[100%]" in done.stdout, "no test ran"
