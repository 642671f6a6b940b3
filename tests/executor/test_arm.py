"""The library for 64-bit Arm, by a cross compiler and an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenyard.executor.native.build import BUILD_TIMEOUT_S, SOURCES, build_library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROOT = "/usr/aarch64-linux-gnu"
PROGRAM = Path(__file__).parent / "arm" / "products.cpp"

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S)  # the library is built, which takes minutes on a busy machine


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The library and a program that is linked to it."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        library = build_library(folder, machine="aarch64")
    target = folder / "products"
    command = [COMPILER, "-std=c++17", "-O1", f"-I{SOURCES}", str(PROGRAM), str(library), f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


@pytest.mark.world
@pytest.mark.parametrize(
    ("cpu", "said"),
    [
        ("max", "2 kinds of kernels, the best with NEON dot products"),
        ("cortex-a53", "1 kinds of kernels, the best with C++"),
    ],
)
def test_products_of_packed_weights(program, cpu, said):
    command = [EMULATOR, "-L", ROOT, "-cpu", cpu, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, said)
