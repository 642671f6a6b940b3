"""Whether a model fits the memory, answered from the headers of its files before anything is loaded."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenyard.base import ConfigError
from tokenyard.cli.main import main
from tokenyard.executor import memory_fit, model_loader
from tokenyard.executor.memory_fit import free_memory, weight_bytes
from tokenyard.executor.model_loader import load_executor, memory_need
from tokenyard.executor.native.library import load_library

OPTIONS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 256, "max_pool_rows": 2}


@pytest.fixture
def checkpoint(folder, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(folder("llama"), target)
    return target


def loaded_numbers(path):
    """Numbers of all tensors in a folder's files."""
    return sum(one.numbers for one in memory_fit.stored_tensors(path))


def test_numbers_count_in_their_dtype(checkpoint):
    numbers = loaded_numbers(checkpoint)
    assert weight_bytes(checkpoint, 4, native=False) == 4 * numbers
    assert weight_bytes(checkpoint, 2, native=False) == 2 * numbers


def test_a_tied_embedding_counts_twice_where_only_the_head_is_rounded(tmp_path):
    save_file({"model.embed_tokens.weight": torch.ones(64, 32)}, tmp_path / "model.safetensors")
    for quantization, tied, size in (("int8", True, 2 + 1), ("int8", False, 2), ("q4", True, 34 / 32)):
        found = weight_bytes(tmp_path, 2, native=True, quantization=quantization, tied=tied)
        assert found == size * 64 * 32, (quantization, tied)
    for native in (True, False):
        assert weight_bytes(tmp_path, 2, native=native, tied=True) == 2 * 64 * 32


@pytest.mark.parametrize(("quantization", "size"), [("int8", 1), ("q8", 34 / 32), ("q4", 18 / 32)])
def test_weights_that_are_quantized_on_load_count_packed(tmp_path, quantization, size):
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(64, 32)}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 2, native=True, quantization=quantization) == 64 * 32 * size


def test_matrices_that_become_int8_are_named_so(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 32), "model.embed_tokens.weight": torch.ones(64, 32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert memory_fit.describe_formats(tmp_path, "AVX2", "int8") == "1 of F32 as int8, by AVX2; 1 of F32 as numbers"


def test_matrices_of_bytes_count_as_stored_or_as_unpacked(tmp_path):
    tensors = {"a.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "b.weight": torch.ones(16, 32, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 2, native=True) == 2 * 16 * 32
    assert weight_bytes(tmp_path, 2, native=False) == 2 * 2 * 16 * 32


def test_packed_matrices_of_a_checkpoint_count_as_stored_or_as_unpacked(tmp_path):
    save_file({"a.qweight": torch.ones(16, 32, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 2, native=True) == 4 * 16 * 32
    assert weight_bytes(tmp_path, 2, native=False) == 2 * 8 * 16 * 32


def test_a_gguf_file_counts_as_stored_without_its_embedding(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    matrix, kind = np.ones((64, 32), np.float32), gguf.GGMLQuantizationType.Q8_0
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert weight_bytes(tmp_path, 2, native=True) == 64 * 34 + 2 * 32
    assert weight_bytes(tmp_path, 2, native=True, tied=True) == 2 * 64 * 34 + 2 * 32
    assert weight_bytes(tmp_path, 2, native=False) == 2 * (2 * 64 * 32 + 32)


def test_memory_that_is_too_small_is_refused_before_anything_is_loaded(checkpoint, monkeypatch):
    need, _ = memory_need(str(checkpoint), **OPTIONS)
    monkeypatch.setattr(model_loader, "free_memory", lambda: need.total)
    load_executor(str(checkpoint), **OPTIONS)
    monkeypatch.setattr(model_loader, "free_memory", lambda: need.total - 1)
    # Only the headers are left, so that loading would find the files damaged.
    for path in checkpoint.glob("*.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    with pytest.raises(ConfigError, match=r"does not fit: weights .* GB free; choose") as caught:
        load_executor(str(checkpoint), **OPTIONS)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("tokens", [1 << 42, 1 << 60])
def test_a_pool_that_no_memory_holds_is_refused(checkpoint, tokens):
    """Random weights are not counted before the pool is asked for."""
    with pytest.raises(ConfigError, match=r"a KV pool of .* GiB, more than cpu has free; lower max_total_tokens"):
        load_executor(str(checkpoint), **OPTIONS | {"max_total_tokens": tokens, "load_format": "dummy"})


def test_the_pool_counts_by_its_tokens(checkpoint):
    small, large = (memory_need(str(checkpoint), **OPTIONS | {"max_total_tokens": n})[0] for n in (256, 512))
    assert large.kv_pool == 2 * small.kv_pool > 0
    assert large.weights == small.weights > 0


def test_what_loading_refuses_is_refused_before(checkpoint):
    """`doctor` counts memory, and says of no flags that a server starts with them where it does not."""
    with pytest.raises(ConfigError, match="context_length is 1000000"):
        memory_need(str(checkpoint), **OPTIONS | {"context_length": 1_000_000})


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_fit, "CGROUP", tmp_path)
    whole = free_memory()
    (tmp_path / "memory.max").write_text("max")
    assert free_memory() > whole / 2
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900000")
    (tmp_path / "memory.stat").write_text("anon 500000\nactive_file 100000\ninactive_file 50000\n")
    assert free_memory() == 250000


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="damaged"):
        weight_bytes(tmp_path, 2, native=True)


def test_doctor_says_what_a_model_takes(checkpoint, capsys, monkeypatch):
    command = ["doctor", "--json", "--model-path", str(checkpoint), "--device", "cpu", "--skip-tokenizer-init"]
    assert main(command) == 0
    assert "GB free" in json.loads(capsys.readouterr().out)["memory"]
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 10)
    assert main(command) == 1
    assert "does not fit" in json.loads(capsys.readouterr().out)["problems"][0]


def test_doctor_says_what_multiplies_each_format(models, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, _ = models("llama", "partly")
    command = ["doctor", "--json", "--model-path", path, "--device", "cpu", "--skip-tokenizer-init"]
    reports = []
    for more in ([], ["--model-impl", "torch", "--attention-backend", "gather"]):
        main([*command, *more])
        reports.append(json.loads(capsys.readouterr().out)["weights"])
    instructions = load_library().packed_instructions()
    assert reports[0] == f"19 of Q8_0 packed, by {instructions}; 3 of TQ2_0 unpacked"
    assert reports[1] == "19 of Q8_0 unpacked; 3 of TQ2_0 unpacked"
