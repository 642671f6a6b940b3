"""What is found out about CUDA before a model is loaded, with pretended drivers, devices and compilers."""

import pytest
import torch

from tests.executor.meta_device import GPU, Watch
from tokenyard.base import ConfigError
from tokenyard.cli.doctor import find_problems, triton_kernels
from tokenyard.config import Settings
from tokenyard.executor import cuda_devices
from tokenyard.executor.attention.triton import available
from tokenyard.executor.cuda_devices import choose_device, prepare_cuda, why_no_cuda
from tokenyard.executor.grammar import VocabMasks

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2\n"


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    """A driver that torch's build for CUDA 13 cannot use."""
    version, node = tmp_path / "version", tmp_path / "nvidiactl"
    version.write_text(DRIVER)
    node.touch()
    monkeypatch.setattr(cuda_devices, "DRIVER_VERSION", version)
    monkeypatch.setattr(cuda_devices, "DRIVER_NODE", node)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return node


def test_a_driver_that_is_too_old_is_an_error_and_not_the_cpu(old_driver):
    with pytest.raises(ConfigError, match=r"550\.54\.15.*driver 580 or newer.*--device cpu"):
        choose_device("auto")
    with pytest.raises(ConfigError, match=r"'cuda' is not there; an NVIDIA driver \(550"):
        choose_device("cuda")
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("case", ["hidden", "container", "cpu build", "no driver"])
def test_no_device_on_purpose_is_the_cpu(old_driver, monkeypatch, tmp_path, case):
    if case == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif case == "container":
        old_driver.unlink()
    elif case == "cpu build":
        monkeypatch.setattr("torch.version.cuda", None)
    else:
        monkeypatch.setattr(cuda_devices, "DRIVER_VERSION", tmp_path / "none")
    assert why_no_cuda() == ""
    assert choose_device("auto").type == "cpu"


def test_doctor_reports_the_driver():
    report = {"device": {"torch": "2", "cuda_devices": [], "no_cuda": "an NVIDIA driver (550) is loaded"}}
    assert any("driver (550)" in problem for problem in find_problems(Settings(), report))
    assert not any("driver" in problem for problem in find_problems(Settings(device="cpu"), report))


def test_rocm_is_not_taken_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    with pytest.raises(ConfigError, match=r"built for ROCm.*--device cpu"):
        prepare_cuda(GPU)


def test_devices_before_ampere_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4.*7\.5.*needs 8\.0"):
        prepare_cuda(torch.device("cuda:0"))


@pytest.fixture
def triton_installed(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(available, "installed", lambda: True)
    available.why_no_launcher.cache_clear()
    yield
    available.why_no_launcher.cache_clear()


def test_without_a_compiler_triton_says_what_to_install(triton_installed, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "apt install gcc" in available.why_not(torch.device("cuda:0"), 64)
    assert "apt install gcc" in triton_kernels()


def test_a_compiler_that_fails_is_quoted(triton_installed, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    reason = available.why_not(torch.device("cuda:0"), 64)
    assert "Python.h" in reason
    assert "python3-dev" in reason


def test_a_compiler_that_works_is_enough(triton_installed, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert available.why_not(torch.device("cuda:0"), 64) == ""


def test_a_mask_of_a_grammar_does_not_wait_for_the_device(monkeypatch):
    logits = torch.empty(3, 8, device=GPU)
    masks = VocabMasks(torch.arange(2).numpy(), torch.empty(2, 8, device=GPU))
    monkeypatch.setattr(
        "tokenyard.executor.grammar.to_device", lambda places, device: torch.empty(2, dtype=torch.int64, device=GPU)
    )
    with Watch():
        masks.apply(logits)


def test_a_row_without_a_token_left_keeps_its_mask_only():
    inf = float("inf")
    logits = torch.tensor([[-inf, 1.0, 2.0], [3.0, 1.0, 2.0]])
    masks = VocabMasks(torch.arange(2).numpy(), torch.tensor([[0.0, -inf, -inf], [0.0, -inf, 0.0]]))
    masks.apply(logits)
    assert logits.tolist() == [[0.0, -inf, -inf], [3.0, -inf, 2.0]]
