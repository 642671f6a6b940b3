"""A model over several ranks within one process: the reference for ranks in separate processes.

Each rank is a thread with its part of the weights and of the KV; sums are taken in the order of the ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from tests.executor.call_tape import as_one_call
from tokenyard.executor.distributed.tensor_parallel import TensorParallelShard
from tokenyard.executor.model_loader import load_executor


class VirtualGroup:
    """The ranks of one process. Each calls from its own thread."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size)

    def of(self, rank):
        return VirtualMember(self, rank)

    def exchange(self, rank, tensor):
        self.parts[rank] = tensor
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


class VirtualMember:
    def __init__(self, group, rank):
        self.group, self.rank = group, rank
        self.all_reduce = as_one_call(self._all_reduce)

    def _all_reduce(self, part):
        parts = self.group.exchange(self.rank, part)
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        return total

    def broadcast_from_rank0(self, tensor):
        return self.group.exchange(self.rank, tensor)[0]

    def gather_to_rank0(self, part):
        # Its owner may change it as soon as it has been sent.
        parts = self.group.exchange(self.rank, part.clone())
        return [] if self.rank else parts


class VirtualModel:
    """Rank 0's model as executors see it; the others compute each batch along."""

    def __init__(self, models):
        self.models = models
        self.threads = ThreadPoolExecutor(len(models))

    def step(self, batch):
        return self._together(lambda model: model.step(replace(batch, attention={})))

    def capture(self, captured, executors):
        """Replace each rank's model by what `captured` makes of its executor, at the same time."""
        jobs = [self.threads.submit(torch.inference_mode()(captured), executor) for executor in executors]
        self.models = [job.result() for job in jobs]

    def _together(self, work):
        """Let each rank work in its thread; returns what rank 0 found."""
        jobs = [self.threads.submit(torch.inference_mode()(work), model) for model in self.models]
        found = [job.result() for job in jobs]
        return found[0]

    def logits(self, first, last):
        return self._together(lambda model: model.logits(first, last))

    def hidden(self, first, last):
        return self.models[0].hidden(first, last)


def load_virtual(model_path, size, captured=None, members=None, **options):
    """An executor over `size` ranks that are threads. The ranks share one page table. captured: see VirtualModel.
    members: the group as each rank sees it, for another than VirtualGroup.
    """
    group = VirtualGroup(size)
    members = members or [group.of(rank) for rank in range(size)]
    parts = [
        load_executor(model_path, **options, part=TensorParallelShard(rank, size, member, lambda info: info))
        for rank, member in enumerate(members)
    ]
    first = parts[0]
    for other in parts[1:]:
        other.pages.tensor, other.pages.host = first.pages.tensor, first.pages.host
    model = VirtualModel([executor.model for executor in parts])
    if captured is not None:
        model.capture(captured, parts)
    first.model = model
    return first
