"""Which backend is chosen where Triton is asked for, and what is said where it cannot serve."""

from pathlib import Path

import pytest
import torch

from tokenyard.base import ConfigError
from tokenyard.executor import backend_choice
from tokenyard.executor.attention.triton import available
from tokenyard.executor.layer_loader import read_folder_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def choose(folder, model_impl, attention_backend, device, kv_cache_dtype="auto"):
    config = read_folder_config(Path(folder("llama")))
    return backend_choice.choose_backends(
        model_impl, attention_backend, "none", config, torch.float32, device, 1, kv_cache_dtype=kv_cache_dtype
    )


@pytest.fixture
def installed(monkeypatch):
    """As if the package were there, and not in its interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(available, "installed", lambda: True)


def test_a_gpu_takes_triton_by_itself(folder, installed):
    for model_impl in ("auto", "torch"):
        choice = choose(folder, model_impl, "auto", CUDA)
        assert (choice.triton, choice.engine) == (True, None)
    assert not choose(folder, "auto", "gather", CUDA).triton


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kv_of_one_byte_is_read_by_triton(folder, installed, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend_choice, "flashinfer_why_not", lambda *given: "")
    assert choose(folder, "auto", "auto", CUDA).flashinfer == (capability == backend_choice.HOPPER)
    choice = choose(folder, "auto", "auto", CUDA, "fp8_e5m2")
    assert (choice.triton, choice.flashinfer, choice.kv_dtype) == (True, False, torch.float8_e5m2)
    if capability < backend_choice.E4M3_FROM:
        with pytest.raises(ConfigError, match=r"fp8_e4m3 needs compute capability 8\.9 .* take fp8_e5m2 or int8"):
            choose(folder, "auto", "auto", CUDA, "fp8_e4m3")
    else:
        assert choose(folder, "auto", "auto", CUDA, "fp8_e4m3").triton
    for backend in ("gather", "flashinfer"):
        with pytest.raises(ConfigError, match="attention by Triton on a GPU; this one's steps are computed by torch"):
            choose(folder, "auto", backend, CUDA, "int8")


def test_a_cpu_does_not(folder, installed):
    assert not choose(folder, "torch", "auto", CPU).triton
    with pytest.raises(ConfigError, match="need a CUDA device, not cpu"):
        choose(folder, "torch", "triton", CPU)


def test_a_gpu_without_the_package_gathers_and_says_why(folder, monkeypatch, caplog):
    monkeypatch.setattr(available, "installed", lambda: False)
    choice = choose(folder, "auto", "auto", CUDA)
    assert not choice.triton
    assert "triton is not installed" in choice.kernels
    assert "triton is not installed" in caplog.text
    with pytest.raises(ConfigError, match="pip install triton"):
        choose(folder, "auto", "triton", CUDA)


def test_a_native_model_attends_by_itself(folder, installed):
    with pytest.raises(ConfigError, match="needs model_impl torch"):
        choose(folder, "native", "triton", CUDA)


def test_heads_too_large_are_refused(installed):
    assert not available.why_not(CUDA, 256)
    assert "at most 256" in available.why_not(CUDA, 264)
