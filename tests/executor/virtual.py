"""A model over several ranks within one process: the judge of what ranks in processes of their own compute.

Each rank is a thread with its part of the weights and of the KV; sums are taken in the order of the ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from tokenyard.executor.load import load_executor
from tokenyard.executor.parallel.shards import Shard


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

    def sum(self, part):
        parts = self.group.exchange(self.rank, part)
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        return total

    def from_first(self, tensor):
        return self.group.exchange(self.rank, tensor)[0]


class VirtualModel:
    """Rank 0's model as executors see it; the others compute each batch along."""

    def __init__(self, models):
        self.models = models
        self.threads = ThreadPoolExecutor(len(models))

    def step(self, batch):
        batches = [replace(batch, attention={}) for _ in self.models]
        jobs = [self.threads.submit(self._layers, *pair) for pair in zip(self.models[1:], batches[1:], strict=True)]
        found = self.threads.submit(self._step, self.models[0], batches[0]).result()
        for job in jobs:
            job.result()
        return found

    @torch.inference_mode()
    def _layers(self, model, batch):
        model.layers(batch)

    @torch.inference_mode()
    def _step(self, model, batch):
        return model.step(batch)

    def logits(self, first, last):
        return self.models[0].logits(first, last)

    def hidden(self, first, last):
        return self.models[0].hidden(first, last)


def load_virtual(model_path, size, **options):
    """An executor over `size` ranks that are threads. The ranks share one page table."""
    group = VirtualGroup(size)
    parts = [
        load_executor(model_path, **options, part=Shard(rank, size, group.of(rank), lambda info: info))
        for rank in range(size)
    ]
    first = parts[0]
    for other in parts[1:]:
        other.pages.tensor, other.pages._host = first.pages.tensor, first.pages._host
    first.model = VirtualModel([executor.model for executor in parts])
    return first
