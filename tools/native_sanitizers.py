"""Runs the native kernels' own tests under the compiler's sanitizers. Not part of `make test`: it takes minutes.

Run from the repository root, with GCC: `python tools/native_sanitizers.py [address|thread] [pytest's arguments]`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenyard.executor.native.build import KERNEL_FLAGS, build_library, find_compiler  # noqa: E402
from tokenyard.executor.native.library import LEVELS, LIBRARY_VARIABLE, load_library  # noqa: E402

KINDS = {
    "address": (("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"), ("libasan.so", "libubsan.so")),
    "thread": (("-fsanitize=thread",), ("libtsan.so",)),
}
NAMES = ("test_native_kernels", "test_native_experts", "test_native_model", "test_native_lora", "test_sampler")
TESTS = tuple(f"tests/executor/{name}.py" for name in NAMES)


def main() -> int:
    """Build, test and return pytest's exit status."""
    arguments = sys.argv[1:]
    kind = arguments.pop(0) if arguments and arguments[0] in KINDS else "address"
    flags, libraries = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        idle = kernels_that_cannot_run()
        if idle:
            print("left out, as this CPU cannot run them: " + ", ".join(idle), flush=True)
        library = build_library(Path(folder), (*flags, "-O1", "-g", "-fno-omit-frame-pointer"), without=idle)
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(preloaded(name) for name in libraries),
            # Python does not free all memory at exit, and the libraries it loads have races.
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": f"suppressions={suppressions(Path(folder))} ignore_noninstrumented_modules=1",
            "OMP_NUM_THREADS": "1",
            LIBRARY_VARIABLE: str(library),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def kernels_that_cannot_run() -> list[str]:
    """Kernel files whose instructions this CPU lacks: with sanitizers each takes a minute or more to compile."""
    runs = {"kernels_" + LEVELS[level].replace("-", "_") for level in load_library().levels()}
    return sorted(KERNEL_FLAGS.keys() - runs)


def preloaded(name: str) -> str:
    """Path of one of the compiler's runtime libraries."""
    command = [*find_compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def suppressions(folder: Path) -> Path:
    """A file that leaves out what is not ours."""
    path = folder / "suppressions"
    path.write_text("called_from_lib:libtorch\ncalled_from_lib:libgomp\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
