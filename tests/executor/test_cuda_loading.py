"""What a loader does on a CUDA device, in which order: fake tensors say that they are on one, and compute nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenyard.executor import layer_loader, model_loader
from tokenyard.executor.device_memory import device_memory
from tokenyard.executor.distributed import distributed_loader, dp_attention
from tokenyard.executor.distributed.rank0 import Rank0Executor
from tokenyard.executor.layer_loader import read_folder_config

GIB = 1 << 30
OPTIONS = {"device": "cuda:1", "load_format": "dummy", "attention_backend": "gather", "page_size": 16}


class FakeWeights:
    """Tensors of the right shapes."""

    def __init__(self, device, dtype, seed):
        self._device, self._dtype = device, dtype

    def get(self, name, shape):
        return torch.empty(shape, dtype=self._dtype, device=self._device)


@pytest.fixture
def events(monkeypatch):
    """What happens as a model is loaded onto the second of two devices, of which 70 of 80 GiB are free."""
    found = []

    def free(device):
        found.append("pool is sized")
        return 70 * GIB, 80 * GIB

    def make_model(choice, layers, pool, pages):
        found.append("steps")
        return SimpleNamespace(states=None)

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_capability": lambda device: (8, 0),
        "set_device": lambda device: found.append(f"device {device.index}"),
        "mem_get_info": free,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(layer_loader, "DummyWeights", lambda *given: found.append("weights") or FakeWeights(*given))
    # Without CUDA such tensors cannot be indexed, so nothing is made of them.
    monkeypatch.setattr(model_loader, "make_pool", lambda *given: found.append("pool"))
    monkeypatch.setattr(model_loader, "make_model", make_model)
    monkeypatch.setattr(model_loader, "warm_up", lambda executor: found.append("warm"))
    return found


def executor_of(model, pool, pages, info, *others):
    return SimpleNamespace(info=info)


def load(path, **options):
    with FakeTensorMode():
        return model_loader.load_executor(path, make=executor_of, **OPTIONS, **options).info


@pytest.mark.parametrize("drafting", [False, True])
def test_the_pool_takes_what_all_weights_leave_and_kernels_are_warm_at_last(folder, events, drafting):
    load(folder("llama"), **{"draft_tokens": 3, "draft_model": folder("llama")} if drafting else {})
    weights = ["weights"] * (1 + drafting)
    assert events == ["device 1", *weights, "pool is sized", "pool", "steps", "warm"]


def test_the_pool_leaves_room_for_the_largest_step(folder, events):
    small, large = (load(folder("llama"), max_step_tokens=tokens).num_pages for tokens in (1024, 65536))
    assert large < small - 1000


def test_what_a_device_holds_besides_weights_and_kv_is_counted(folder):
    config, rows = read_folder_config(Path(folder("llama"))), 64

    def need(**changes):
        sizes = {"max_step_tokens": 512, "max_pool_rows": rows, "context_length": 4096, "page_size": 16}
        return device_memory(config, torch.bfloat16, **sizes | changes)

    plain = need()
    assert plain.page_table == rows * 4096 // 16 * 4
    assert need(divided=True).libraries >= plain.libraries + (256 << 20)
    # Logits and hidden states of a captured step stay in its memory.
    captured = need(captured=(1, 64), buckets=(128,)).graphs
    assert captured > plain.graphs + 64 * 4 * config.vocab_size + 128 * 2 * config.hidden_size
    # Each draft is a token of the step with logits of its own.
    assert need(draft_tokens=4).steps > plain.steps + 4 * rows * 4 * config.vocab_size


class Ranks(SimpleNamespace):
    """Ranks that are all there."""

    def __init__(self, *given, **options):
        super().__init__(form=given[3], group=None, agree=None, connect=lambda device: None, close=lambda: None)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_ranks_of_a_divided_model_compile_before_the_first_request(monkeypatch, sizes, device):
    events, executor = [], Rank0Executor.__new__(Rank0Executor)
    executor.info, executor.capture = SimpleNamespace(device=device), lambda: events.append("captured")
    monkeypatch.setattr(distributed_loader, "ModelRanks", Ranks)
    monkeypatch.setattr(distributed_loader, "load_part", lambda *given, **options: executor)
    monkeypatch.setattr(distributed_loader, "warm_up", lambda one, finish: events.append(finish))
    assert distributed_loader.load_executor("model", **sizes) is executor
    # The last stage of a pipeline computes as it collects.
    assert events == (["captured"] if device == "cpu" else ["captured", executor.collect])


def test_ranks_of_dp_attention_compile_once_they_are_connected(monkeypatch, tmp_path):
    events, executor = [], dp_attention.DpAttentionExecutor.__new__(dp_attention.DpAttentionExecutor)
    executor.info = SimpleNamespace(device="cuda:1")
    monkeypatch.setattr(dp_attention, "load_part", lambda *given, **options: executor)
    monkeypatch.setattr(dp_attention.DpAttentionRanks, "connect", lambda *given: events.append("connected"))
    monkeypatch.setattr(dp_attention, "warm_up", lambda one: events.append("warm"))
    dp_attention.load_executor("model", meeting=str(tmp_path / "m"), rank=1, ranks=2)
    assert events == ["connected", "warm"]
