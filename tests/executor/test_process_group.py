"""Connections between ranks, and what ends a group."""

import socket
import threading
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tokenyard.base import DeviceLostError
from tokenyard.executor.distributed import process_group, rank0, rank_process
from tokenyard.executor.distributed.process_group import Rendezvous, TorchProcessGroup
from tokenyard.executor.distributed.step_barrier import Participant, StepBarrier

SIZE = 3
WAIT_S = 60


class LazyGroup(dist.ProcessGroupGloo):
    """Connects two ranks at their first exchange, as NCCL does; afterwards the store is gone."""

    sealed = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.connected = set()

    def _exchange(self, other):
        if other not in self.connected and LazyGroup.sealed:
            raise RuntimeError(f"no store to connect rank {self.rank()} with rank {other}")
        self.connected.add(other)

    def send(self, tensors, to, tag):
        self._exchange(to)
        return super().send(tensors, to, tag)

    def recv(self, tensors, sender, tag):
        self._exchange(sender)
        return super().recv(tensors, sender, tag)


def in_threads(work):
    """Run `work(rank)` on a thread per rank and return the results by rank."""
    results, errors = [None] * SIZE, []

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not errors
    return results


@pytest.mark.parametrize("pipeline", [True, False])
def test_stages_are_connected_before_the_store_is_removed(tmp_path, monkeypatch, pipeline):
    monkeypatch.setattr(process_group.dist, "ProcessGroupGloo", LazyGroup)
    monkeypatch.setattr(LazyGroup, "sealed", False)
    groups = [TorchProcessGroup(lambda error: DeviceLostError(str(error)), pipeline=pipeline) for _ in range(SIZE)]
    in_threads(
        lambda rank: groups[rank].connect(Rendezvous(file=str(tmp_path / "store")), rank, SIZE, torch.device("cpu"))
    )
    monkeypatch.setattr(LazyGroup, "sealed", True)

    def around(rank):
        groups[rank].send(torch.full((2,), float(rank)), (rank + 1) % SIZE)
        return groups[rank].receive(torch.empty(2), (rank - 1) % SIZE).tolist()

    if pipeline:
        assert in_threads(around) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    else:
        with pytest.raises(DeviceLostError, match="no store"):
            groups[0].send(torch.zeros(2), 1)
    for group in groups:
        group.close()


@pytest.mark.parametrize("form", ["tensor", "pipeline"])
def test_ranks_that_are_stages_connect_to_their_neighbours(monkeypatch, form):
    """At rank 0 and at the others alike, as both ends of a connection make it."""

    class Found(Exception):
        """How a rank makes its group."""

    def make(failed, *, pipeline, symmetric):
        raise Found(pipeline, symmetric)

    options = {"enable_torch_symm_mem": True}
    setup = SimpleNamespace(form=form, places=2, place=1, options=options)
    for module in (rank0, rank_process):
        monkeypatch.setattr(module, "TorchProcessGroup", make)
    for name in ("SharedMemory", "RingReader", "RankSocket"):
        monkeypatch.setattr(rank_process, name, lambda *given: None)
    monkeypatch.setattr(rank_process.socket, "socket", lambda fileno: None)
    wire = SimpleNamespace(receive=lambda kind: setup)
    for begin in (
        partial(rank0.ModelRanks, "model", 2, options, form),
        partial(rank_process.RankProcess, wire, 0, 0, 0),
    ):
        with pytest.raises(Found) as found:
            begin()
        assert found.value.args == (form == "pipeline", form == "tensor")


def test_an_idle_batch_that_fails_ends_the_group():
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    names = ["rank 0", "rank 1"]
    StepBarrier([hub for _, hub in ends], names)

    def broken():
        raise ValueError("no kernel image is available")

    ranks = [
        Participant(own, idle, lambda counts: None, name, names[0])
        for (own, _), idle, name in zip(ends, (lambda: None, broken), names, strict=True)
    ]
    heard, reasons = threading.Event(), []
    ranks[1].on_lost(lambda reason: (reasons.append(reason), heard.set()))
    with suppress(DeviceLostError):  # if the group ends before rank 0 has begun
        ranks[0].begin(4)
        ranks[0].end()
    assert heard.wait(WAIT_S)
    assert "rank 1 failed in an idle batch: ValueError: no kernel image" in reasons[0]
    # Rank 0 hears which rank has gone, or finds its connection closed first.
    with pytest.raises(DeviceLostError, match="has gone"):
        ranks[0].begin(4)
