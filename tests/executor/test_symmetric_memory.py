"""Sums of ranks in symmetric memory: what GPUs run over threads with pretended buffers, and torch's signatures."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.executor.driver import Driver
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import greedy, prompt_of
from tokenyard.base import DeviceLostError
from tokenyard.executor.distributed import symmetric_memory
from tokenyard.executor.distributed.process_group import Rendezvous, TorchProcessGroup
from tokenyard.executor.distributed.symmetric_memory import ALIGNMENT, MAX_BYTES
from tokenyard.executor.layer_loader import read_folder_config

SIZE, TOKENS = 2, 2
WAIT_S = 60
CPU = torch.device("cpu")


class Memory:
    """Buffers that all ranks read, each of which is a thread. broken: ranks that cannot have one."""

    def __init__(self, monkeypatch, broken=(), wrong=False):
        self.here, self.ready = threading.local(), threading.Barrier(SIZE, timeout=WAIT_S)
        self.buffers, self.calls = [None] * SIZE, [[] for _ in range(SIZE)]
        self.names, self.broken, self.wrong = set(), broken, wrong
        for name in ("register_group", "allocate", "share", "one_shot_sum"):
            monkeypatch.setattr(symmetric_memory, name, getattr(self, name))
        monkeypatch.setattr(symmetric_memory, "why_not", lambda device, size: "")

    def register_group(self, store, name, rank, size):
        self.here.rank = rank
        self.names.add(name)
        assert size == SIZE
        return object()

    def allocate(self, size, device, name):
        if self.here.rank in self.broken:
            raise RuntimeError("CUDA driver error: operation not supported\nsome more lines")
        self.buffers[self.here.rank] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.buffers[self.here.rank]

    def share(self, buffer, name):
        self.calls[self.here.rank].append("share")
        self.ready.wait()

    def one_shot_sum(self, buffer, part, name):
        [rank] = [rank for rank, own in enumerate(self.buffers) if own.data_ptr() == buffer.data_ptr()]
        assert (buffer.shape, buffer.dtype) == (part.shape, part.dtype)
        assert part.is_contiguous()
        assert part.data_ptr() % ALIGNMENT == part.nbytes % ALIGNMENT == 0
        self.calls[rank].append((tuple(part.shape), part.dtype))
        buffer.copy_(part)
        self.ready.wait()
        parts = [own[: part.nbytes].view(part.dtype).view(part.shape) for own in self.buffers]
        total = sum(parts[1:], parts[0].clone())
        self.ready.wait()
        return total + 1 if self.wrong else total


def connected(tmp_path, threads, *, symmetric=True, **meeting):
    groups = [TorchProcessGroup(lambda error: DeviceLostError(str(error)), symmetric=symmetric) for _ in range(SIZE)]
    place = Rendezvous(file=str(tmp_path / "store"))
    jobs = [threads[rank].submit(groups[rank].connect, place, rank, SIZE, CPU) for rank in range(SIZE)]
    for job in jobs:
        job.result(WAIT_S)
    return groups


@pytest.fixture
def threads():
    """A thread for each rank."""
    own = [ThreadPoolExecutor(1) for _ in range(SIZE)]
    yield own
    for one in own:
        one.shutdown()


def summed(threads, groups, parts):
    jobs = [threads[rank].submit(groups[rank].all_reduce, parts[rank].clone()) for rank in range(SIZE)]
    return [job.result(WAIT_S) for job in jobs]


def test_small_sums_are_made_there_and_others_by_the_group(tmp_path, threads, monkeypatch):
    memory = Memory(monkeypatch)
    groups = connected(tmp_path, threads)
    assert len(memory.names) == 1
    own = ["share", ((ALIGNMENT,), torch.float32)]
    assert memory.calls == [own, own]
    torch.manual_seed(0)
    small = [torch.randn(SIZE, 3, 64), torch.randn(SIZE, 1, 64).bfloat16(), torch.randn(SIZE, MAX_BYTES // 256, 64)]
    large = [
        torch.randn(SIZE, MAX_BYTES // 256 + 1, 64),
        torch.randn(SIZE, 64).double(),
        torch.ones(SIZE, 64, dtype=torch.int64),
        torch.randn(SIZE, 3),
        torch.randn(SIZE, 0, 64),
    ]
    for parts in small + large:
        first, second = summed(threads, groups, parts)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, parts[0] + parts[1])
    wanted = own + [(tuple(parts.shape[1:]), parts.dtype) for parts in small]
    assert memory.calls == [wanted, wanted]
    for group in groups:
        group.close()


def test_a_model_answers_as_with_the_sums_of_a_group(tmp_path, threads, monkeypatch, folder):
    """Its prompt and its decodes: all sums of a step of a small model are small."""
    memory, path, options = Memory(monkeypatch), folder("llama"), {"device": "cpu", "dtype": "float32", "threads": 1}
    options |= {"attention_backend": "gather", "max_total_tokens": 128, "max_pool_rows": 4}
    groups = connected(tmp_path, threads)
    prompt = prompt_of(20, seed=3)
    driver = Driver(load_virtual(path, SIZE, members=groups, **options))
    found = driver.generate(driver.start(prompt), TOKENS)
    assert found == greedy("llama", prompt, TOKENS, found)
    # Of each step those of the embedding, and of attention and MLP of each layer; the first is the trial's.
    layers = read_folder_config(Path(path)).num_layers
    assert len(memory.calls[0]) == len(memory.calls[1]) == 2 + TOKENS * (1 + 2 * layers)


def test_parts_that_lie_elsewhere_are_copied_first(tmp_path, threads, monkeypatch):
    """The same kind of sum at all ranks, whatever their parts look like in memory."""
    memory = Memory(monkeypatch)
    groups = connected(tmp_path, threads)
    numbers = torch.randn(65)
    jobs = [
        threads[0].submit(groups[0].all_reduce, numbers[1:].view(8, 8)),
        threads[1].submit(groups[1].all_reduce, numbers[:64].view(8, 8).T),
    ]
    found = [job.result(WAIT_S) for job in jobs]
    assert torch.equal(found[0], numbers[1:].view(8, 8) + numbers[:64].view(8, 8).T)
    assert torch.equal(*found)
    assert memory.calls[0][-1] == memory.calls[1][-1] == ((8, 8), torch.float32)


@pytest.mark.parametrize(("broken", "wrong"), [((1,), False), ((0, 1), False), ((), True)])
def test_all_ranks_go_on_without_where_one_cannot(tmp_path, threads, monkeypatch, caplog, broken, wrong):
    memory = Memory(monkeypatch, broken, wrong)
    groups = connected(tmp_path, threads)
    calls = [list(own) for own in memory.calls]
    parts = torch.randn(SIZE, 3, 64)
    first, second = summed(threads, groups, parts)
    assert torch.equal(first, parts[0] + parts[1])
    assert torch.equal(first, second)
    assert memory.calls == calls, "a sum was made there after all"
    # Each rank logs once; those beside rank 0 are processes that do not log.
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == SIZE
    reason = "a sum of 3.0 was 4.0" if wrong else "operation not supported"
    assert any(line.endswith(reason) for line in lines)


def test_devices_that_are_not_cuda_keep_their_sums(tmp_path, threads, caplog):
    groups = connected(tmp_path, threads)
    assert torch.equal(summed(threads, groups, torch.ones(SIZE, 8))[0], torch.full((8,), 2.0))
    assert "it needs CUDA devices, not cpu" in caplog.text


def test_nothing_is_asked_of_it_unless_it_is_chosen(tmp_path, threads, monkeypatch):
    def never(*given):
        raise AssertionError("symmetric memory was used")

    for name in ("register_group", "allocate", "share", "one_shot_sum", "why_not", "connect_sums"):
        monkeypatch.setattr(symmetric_memory, name, never)
    groups = connected(tmp_path, threads, symmetric=False)
    assert torch.equal(summed(threads, groups, torch.ones(SIZE, 8))[1], torch.full((8,), 2.0))


def test_torch_knows_what_is_called(tmp_path):
    """The installed torch: its operation takes these arguments (a kernel without data runs), and so do the functions
    that allocate and connect, which say that they have nothing for CPUs.
    """
    assert "CUDA" in symmetric_memory.why_not(CPU, SIZE)
    assert symmetric_memory.why_not(torch.device("cuda"), SIZE) == ""
    assert "not 3" in symmetric_memory.why_not(torch.device("cuda"), 3)
    part = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    buffer = torch.empty(MAX_BYTES, dtype=torch.uint8, device="meta")[: part.nbytes].view(part.dtype).view(part.shape)
    found = symmetric_memory.one_shot_sum(buffer, part, "ranks")
    assert (found.shape, found.dtype) == (part.shape, part.dtype)
    for call in (
        lambda: symmetric_memory.allocate(MAX_BYTES, CPU, "ranks"),
        lambda: symmetric_memory.share(torch.empty(8), "ranks"),
    ):
        with pytest.raises(RuntimeError, match="does not support device type cpu"):
            call()


def test_a_group_is_registered_without_one_of_the_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    group = symmetric_memory.register_group(store, "ranks of a test", 0, 1)
    with pytest.raises(RuntimeError, match="already registered"):
        symmetric_memory.register_group(store, "ranks of a test", 0, 1)
    assert group.size() == 1
    assert not dist.is_initialized()
