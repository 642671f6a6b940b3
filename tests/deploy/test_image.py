"""The check that the image's build runs, here on the CPU of this machine."""

import re
from pathlib import Path

import pytest
import torch

from tools import smoke_image

ROOT = Path(__file__).resolve().parents[2]
FOUND = {
    "native_kernels": "AVX2",
    "no_cuda": "",
    "triton": "installed, and its launcher can be built",
    "cuda_devices": [],
}


@pytest.fixture
def machine(monkeypatch):
    """A machine that `doctor` describes so, whose devices answer `texts`, by device."""

    def of(texts, cuda=None, **found):
        monkeypatch.setattr(smoke_image, "device", lambda: FOUND | found)
        monkeypatch.setattr(smoke_image, "answer", lambda device: texts[device])
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return of


def test_it_passes_here(capsys):
    assert smoke_image.main() == 0
    said = capsys.readouterr().out
    assert "ok: the CPU answers" in said
    assert "FAILED" not in said


@pytest.mark.parametrize(
    ("texts", "found", "said"),
    [
        ({"cpu": "a"}, {"native_kernels": "none, steps would take longer"}, "native kernels"),
        ({"cpu": "a"}, {"no_cuda": "CUDA 13 needs driver 580"}, "driver 580"),
        ({"cpu": "a"}, {"cuda": "13.0", "triton": "Triton needs a C compiler"}, "needs a C compiler"),
        ({"cpu": ""}, {}, "with nothing"),
        ({"cpu": "a", "cuda:0": "a", "cuda:1": "b"}, {"cuda_devices": [{}, {}]}, "cuda:1 answers 'b'"),
    ],
)
def test_what_is_missing_fails(machine, capsys, texts, found, said):
    machine(texts, **found)
    assert smoke_image.main() == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert said in line


def test_the_image_for_cuda_has_a_compiler():
    """In its last stage, which runs: Triton compiles a launcher at the first use of a GPU."""
    _, last = (ROOT / "Dockerfile").read_text(encoding="utf-8").rsplit("\nFROM ", 1)
    assert re.search(r"\*/cpu\) ;; \*\) apt-get update && apt-get install [^;]*\bgcc libc6-dev\b", last)


def test_the_image_has_what_it_runs():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = lines.index("COPY tools/smoke_image.py ./")
    assert lines.index("WORKDIR /home/tokenyard") < copied < lines.index("RUN python smoke_image.py")
    assert "!tools/smoke_image.py" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
