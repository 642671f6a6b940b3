"""Building the native library, with compilers that know less than ours."""

import platform

import pytest

from tokenyard.executor.native.build import X86, BuildError, build_library

COMPILER = """#!/bin/sh
case "$*" in *{refused}*) echo "error: {refused} is unknown" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes the compiler of the test: a program that refuses commands with a word in them."""

    def make(refused):
        program = tmp_path / "c++"
        program.write_text(COMPILER.format(refused=refused), encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))

    return make


@pytest.mark.skipif(platform.machine().lower() not in X86, reason="its flags are those of x86-64")
def test_a_compiler_that_lacks_instructions_builds_the_rest_and_says_so(compiler, tmp_path, caplog):
    compiler("-mavx512bf16")
    assert build_library(tmp_path / "lib").read_text(encoding="utf-8") == "built\n"
    (said,) = caplog.messages
    assert said.startswith("kernels_avx512_bf16.cpp is built without -mavx2")
    assert said.endswith("failed: error: -mavx512bf16 is unknown")


def test_a_compiler_that_fails_is_reported(compiler, tmp_path):
    compiler("model.cpp")
    with pytest.raises(BuildError, match=r"failed: error: model\.cpp is unknown"):
        build_library(tmp_path / "lib")
    assert not list((tmp_path / "lib").iterdir())
