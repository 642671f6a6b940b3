"""Builds the native library with the C++ compiler of the machine. Needs nothing but Python.

The package's build calls it (hatch_build.py), and so does the first use of a package that came without a library. As a
program it builds the library of this tree. The result's name says what it was built from, so that an old one is never
taken for a new one.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "src"
PACKAGED = SOURCES.parent / "lib"
"""Where the library of the package is."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-pthread")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
KERNEL_FLAGS = {
    "kernels_avx2": AVX2,
    "kernels_avx512": AVX512,
    "kernels_avx512_bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
}
ARM_KERNEL_FLAGS = {"kernels_neon": ("-march=armv8.2-a+dotprod",)}
"""What kernel files are compiled with on top of FLAGS, on x86-64 and on 64-bit Arm. A compiler that does not know them
makes an empty file of that kind; the library then has one kind of kernels less."""

FILE_FLAGS = {"formats": ("-ffp-contract=off",)}
"""What a file is compiled with beside FLAGS on every machine."""

X86 = ("x86_64", "amd64")
ARM = ("aarch64", "arm64")
BUILD_TIMEOUT_S = 900


class BuildError(Exception):
    """There is no compiler, or it failed; the message is one line."""


def library_name(machine: str = "") -> str:
    """Name of the library that these sources make for a kind of machine, "" for this one."""
    digest = hashlib.sha256(repr((FLAGS, KERNEL_FLAGS, ARM_KERNEL_FLAGS, FILE_FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"libtokenyard-{(machine or platform.machine()).lower()}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str]:
    """Return the compiler's command: $CXX, or the first of g++, clang++ and c++. Raises BuildError."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")


def build_library(
    folder: Path, extra_flags: tuple[str, ...] = (), machine: str = "", without: Collection[str] = ()
) -> Path:
    """Build the library into `folder` and return its path; it appears there whole or not at all.

    extra_flags: of all compilations and of the link, for sanitizers. machine: what the compiler makes code for, "" for
    this kind of machine. without: kernel files that are compiled as if the compiler did not know their flags. Raises
    BuildError.
    """
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(machine)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1))) as pool:
            for done in [
                pool.submit(_compile, compiler, *pair, extra_flags, machine or platform.machine(), without)
                for pair in zip(sources, objects, strict=True)
            ]:
                done.result()
        made = Path(scratch) / target.name
        link = [*compiler, *FLAGS, *extra_flags, "-shared", "-o", str(made), *map(str, objects)]
        _run(link)
        made.replace(target)
    return target


def build_packaged() -> None:
    """Build the library of the package unless it is there. Raises BuildError and OSError."""
    if not (PACKAGED / library_name()).is_file():
        for old in PACKAGED.glob("*.so"):
            old.unlink()
        build_library(PACKAGED)


def _compile(
    compiler: list[str],
    source: Path,
    target: Path,
    extra_flags: tuple[str, ...],
    machine: str,
    without: Collection[str],
) -> None:
    common = [*compiler, *FLAGS, *FILE_FLAGS.get(source.stem, ()), *extra_flags, "-c", str(source), "-o", str(target)]
    by_file = KERNEL_FLAGS if machine.lower() in X86 else ARM_KERNEL_FLAGS if machine.lower() in ARM else {}
    special = () if source.stem in without else by_file.get(source.stem, ())
    try:
        _run([*common, *special])
    except BuildError as error:
        if not special:
            raise
        logger.warning("%s is built without %s: %s", source.name, " ".join(special), error)
        _run(common)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"the C++ compiler {command[0]} failed: {lines[0].strip()}")


if __name__ == "__main__" and sys.platform == "linux":
    try:
        build_packaged()
    except (BuildError, OSError) as failure:
        sys.exit(f"no native CPU kernels: {failure}")
