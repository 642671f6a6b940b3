"""What this machine can do at most: read memory, and multiply in registers. Floors of other benchmarks come from it.

Run from the repository root: `python -m benchmarks.limits [--threads 2]`. Needs a C++ compiler. Each figure is the best
of many short rounds, since other work on the machine only ever takes away.
"""

import argparse
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from tokenyard.executor.native.build import find_compiler

SOURCE = Path(__file__).with_name("limits.cpp")
KINDS = ("float32", "bfloat16", "int8")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "limits.so"
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*find_compiler(), *flags, "-o", str(made), str(SOURCE)], check=True)
        library = ctypes.CDLL(str(made))
    library.read_rate.restype = library.product_rate.restype = ctypes.c_double
    library.read_rate.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    library.product_rate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    return library


def read_rate(threads: int, mebibytes: int = 256, rounds: int = 20) -> float:
    """Return the bytes a second that `threads` threads read of memory that each touched first."""
    return float(_library().read_rate(threads, mebibytes << 20, rounds))


def product_rate(threads: int, kind: str, rounds: int = 100) -> float:
    """Return the operations (two per multiply-add) a second of `threads` threads; 0 without instructions for `kind`."""
    return float(_library().product_rate(threads, KINDS.index(kind), 200_000, rounds))


def main() -> None:
    """Print all rates."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    for number in sorted({1, threads}):
        rates = ", ".join(f"{kind} {product_rate(number, kind) / 1e9:.0f} G operations/s" for kind in KINDS)
        print(f"{number} threads: read {read_rate(number) / 1e9:.1f} GB/s, {rates}", flush=True)


if __name__ == "__main__":
    main()
