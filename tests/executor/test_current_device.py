"""The current device belongs to a thread: each that launches work chooses its executor's first."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.executor.meta_device import GPU
from tokenyard.base import WeightSource
from tokenyard.executor.distributed.dp_attention import DpAttentionExecutor
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.weight_group import WeightGroup

CALLS = {
    "an idle batch": lambda executor: DpAttentionExecutor.idle(executor),
    "weights that are read": lambda executor: ModelExecutor.prepare_weights(executor, WeightSource()),
    "weights that are received": lambda executor: ModelExecutor.receive_weights(executor, "g", []),
    "a group that is joined": lambda executor: ModelExecutor.join_weight_group(
        executor, WeightGroup("g", "localhost", 1, 1, 0, 2, "nccl")
    ),
}


class Launches(TorchDispatchMode):
    """Refuses work of threads that have chosen no device."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen, self.seen = chosen, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert getattr(self.chosen, "device", None) == GPU, f"{func} is launched on device 0"
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    chosen = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(chosen, "device", device))
    return Launches(chosen)


def work(*_):
    torch.zeros(2, device=GPU)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_thread_beside_the_steps_chooses_its_device(launches, monkeypatch, call):
    monkeypatch.setattr(TorchModel, "idle", work)
    updates = SimpleNamespace(prepare=work, receive=work, join=work)
    model = TorchModel.__new__(TorchModel)
    executor = SimpleNamespace(_device=GPU, _updates=updates, model=model)

    def begin():
        with launches:
            call(executor)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(begin).result()
    assert launches.seen == 1


def test_a_thread_without_one_is_seen(launches):
    with launches, pytest.raises(AssertionError, match="on device 0"):
        work()
