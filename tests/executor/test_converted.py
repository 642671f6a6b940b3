"""Converted weights: the same logits as without, and no file that does not fit is used."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from tests.executor.packed_models import all_logits, load, save_plain
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError, WeightSource
from tokenyard.cli.main import main
from tokenyard.executor.formats import converted
from tokenyard.executor.layer_loader import convert_weights
from tokenyard.executor.native.library import NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

PROMPT = prompt_of(20, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def own(models, tmp_path):
    """A copy of a packed model, which tests may change."""

    def make(case, kind):
        found = Path(models(case, kind)[0])
        target = tmp_path / "model"
        if found.is_dir():
            shutil.copytree(found, target)
            return str(target)
        target.mkdir()
        return shutil.copy2(found, target)

    return make


def convert(path, quantization="none"):
    return str(convert_weights(path, "float32", quantization, 1)[0])


@pytest.mark.parametrize(
    ("case", "kind", "quantization"),
    [
        ("llama", "Q4_K_M", "none"),
        ("moe", "Q8_0", "none"),
        ("windows", "partly", "none"),
        ("llama", "gptq-order", "none"),
        ("llama", "awq", "q8"),
        ("llama", "partly", "int8"),
    ],
)
def test_logits_are_the_same_bits(own, caplog, case, kind, quantization):
    path = own(case, kind)
    options = {"quantization": quantization}
    expected = all_logits(load(path, **options), PROMPT)
    file = convert(path, quantization=quantization)
    assert Path(file).parent == Path(path).parent or Path(file).parent == Path(path)
    with caplog.at_level("INFO"):
        assert torch.equal(all_logits(load(path, **options), PROMPT), expected)
    assert f"weights are mapped from {file}" in caplog.text


def test_a_plain_checkpoint_is_converted_as_it_is_quantized(tmp_path, capsys):
    save_plain(LlamaConfig, {"attention_bias": True}, tmp_path)
    expected = all_logits(load(str(tmp_path), quantization="q4"), PROMPT)
    assert main(["convert", str(tmp_path), "--quantization", "q4", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/model.packed: 0.00 GB in ")
    assert torch.equal(all_logits(load(str(tmp_path), quantization="q4"), PROMPT), expected)


def test_a_mapped_start_does_not_report_the_matrices_as_unused(tmp_path, caplog):
    save_plain(LlamaConfig, {}, tmp_path)
    convert(str(tmp_path))
    with caplog.at_level("INFO"):
        load(str(tmp_path))
    assert "weights are mapped from" in caplog.text
    assert "are not used" not in caplog.text


def test_the_file_is_as_private_as_the_weights(own):
    path = own("llama", "Q4_0")
    assert Path(convert(path)).stat().st_mode & 0o777 == Path(path).stat().st_mode & 0o644
    Path(path).chmod(0o600)
    assert Path(convert(path)).stat().st_mode & 0o777 == 0o600


def test_memory_that_is_resumed_maps_the_file_again(own, caplog):
    path = own("llama", "Q4_0")
    convert(path)
    executor = load(path)
    executor.release_memory(weights=True, kv_cache=False)
    caplog.clear()
    with caplog.at_level("INFO"):
        executor.prepare_weights(WeightSource())
    executor.swap_weights()
    assert "weights are mapped from" in caplog.text
    assert torch.equal(all_logits(executor, PROMPT), all_logits(load(path), PROMPT))


def test_memory_of_random_weights_gets_the_same_numbers_again(tmp_path):
    save_plain(LlamaConfig, {}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    expected = all_logits(load(str(tmp_path), load_format="dummy"), PROMPT)
    executor = load(str(tmp_path), load_format="dummy")
    executor.release_memory(weights=True, kv_cache=False)
    executor.prepare_weights(WeightSource())
    executor.swap_weights()
    assert torch.equal(all_logits(executor, PROMPT), expected)


def touched(path):
    os.utime(path, ns=(1, 1))


def another_number(path):
    data = bytearray(Path(path).read_bytes())
    data[-100] ^= 1
    Path(path).write_bytes(data)


def library_of_another_version(monkeypatch):
    monkeypatch.setattr("tokenyard.executor.layer_loader.library_name", lambda: "another")


def another_release(monkeypatch):
    monkeypatch.setattr("tokenyard.executor.layer_loader.__version__", "another")


def other_instructions(monkeypatch):
    if len(LIBRARY.levels()) < 2:
        pytest.skip("this CPU has one kind of kernels")
    monkeypatch.setattr(LIBRARY, "level", next(level for level in LIBRARY.levels() if level != LIBRARY.level))


MISFITS = {
    "content": (another_number, None, {}, "was made from other weights"),
    "dtype": (None, None, {"dtype": "bfloat16"}, "was made for --dtype float32, and this is bfloat16"),
    "quantization": (None, None, {"quantization": "q8"}, "was made with --quantization none, and this is q8"),
    "version": (None, library_of_another_version, {}, "was made by another version of tokenyard"),
    "release": (None, another_release, {}, "was made by another version of tokenyard"),
    "instructions": (None, other_instructions, {}, "kernels, and this machine uses"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_ignored(own, caplog, monkeypatch, case):
    path = own("llama", "Q4_0")
    file = convert(path)
    change, machine, options, message = MISFITS[case]
    if change:
        change(path)
    if machine:
        machine(monkeypatch)
    found = all_logits(load(path, **options), PROMPT)
    line = next(record.getMessage() for record in caplog.records if "is ignored" in record.getMessage())
    assert line.startswith(f"{file} was made ")
    assert message in line
    assert line.endswith("; run `tokenyard convert` again; it is ignored")
    Path(file).unlink()
    assert torch.equal(found, all_logits(load(path, **options), PROMPT))


def test_a_copy_with_another_time_is_the_same_content(own, caplog):
    path = own("llama", "Q4_0")
    convert(path)
    touched(path)
    with caplog.at_level("INFO"):
        load(path)
    assert "weights are mapped from" in caplog.text


def test_a_file_that_cannot_be_written_leaves_nothing(own, monkeypatch):
    path = own("llama", "Q4_0")

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converted.os, "posix_fallocate", full)
    before = set(Path(path).parent.iterdir())
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        convert(path)
    assert set(Path(path).parent.iterdir()) == before


def test_what_a_killed_convert_left_is_removed_and_what_another_writes_is_not(own):
    path = own("llama", "Q4_0")
    folder, name = Path(path).parent, Path(path).name
    dead, alive, gone = (folder / f".{name}.packed.{end}" for end in ("dead", "alive", "gone"))
    dead.write_bytes(b"half")
    gone.symlink_to("nowhere")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        convert(path)
    assert not dead.exists()
    assert alive.exists()


def test_a_foreign_header_that_is_nested_too_deeply_is_refused(tmp_path):
    text, path = b"[" * 200_000, tmp_path / "model.packed"
    path.write_bytes(converted.HEAD.pack(converted.MAGIC, len(text), converted.header_digest(text)) + text)
    with pytest.raises(converted.UnusableFileError, match="damaged or no converted file"):
        converted.ConvertedFile(path, {}, tmp_path)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """A model, its converted file and the logits."""
    path = models("llama", "Q4_K_M")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        path = str(shutil.copy2(path, tmp_path_factory.mktemp("own")))
        file = convert(path)
        return path, file, Path(file).read_bytes(), all_logits(load(path), PROMPT)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused(whole, data):
    """A flipped bit, a cut, zeros or other bytes anywhere: the file is ignored, or nothing that matters was changed."""
    path, file, original, expected = whole
    changed = bytearray(original)
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "more", "head"]))
    place = data.draw(st.one_of(st.integers(0, len(changed) - 1), st.integers(0, 4096)))
    if kind == "flip":
        changed[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del changed[place:]
    elif kind == "zeros":
        changed[place : place + 5000] = bytes(len(changed[place : place + 5000]))
    elif kind == "more":
        changed += data.draw(st.binary(min_size=1, max_size=9))
    else:
        changed[: place % 300] = data.draw(st.binary(min_size=place % 300, max_size=place % 300))
    Path(file).unlink()
    Path(file).write_bytes(changed)
    assert torch.equal(all_logits(load(path), PROMPT), expected)
