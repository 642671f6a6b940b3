"""Runs the tests of the AVX-512 kernels on an x86-64 CPU without AVX-512, where their instructions are functions in C++
(avx512_emulated.h). It takes minutes. What it cannot show: what a compiler makes of the instructions, and their speed.

Run from the repository root, with GCC: `python tools/native_avx512.py [pytest's arguments]`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenyard.executor.native import build  # noqa: E402
from tokenyard.executor.native.library import LIBRARY_VARIABLE  # noqa: E402

HEADER = Path(__file__).resolve().parent / "avx512_emulated.h"
NAMES = ("test_native_kernels", "test_native_experts", "test_formats", "test_kv_bytes", "test_native_states")
TESTS = tuple(f"tests/executor/{name}.py" for name in NAMES)


def main() -> int:
    """Build, test and return pytest's exit status."""
    emulated = (*build.AVX2, "-DEMULATED_AVX512")
    build.KERNEL_FLAGS.update(kernels_avx512=emulated, kernels_avx512_bf16=(*emulated, "-DEMULATED_BF16"))
    with tempfile.TemporaryDirectory() as folder:
        library = build.build_library(Path(folder), ("-O1", "-Wno-psabi", "-include", str(HEADER)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", LIBRARY_VARIABLE: str(library)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS)]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
