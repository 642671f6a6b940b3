"""KV that is copied from and to a device, against the same copies in host memory."""

import math
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tokenyard.executor.kv_copies import DeviceBlocks, DeviceStates
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.state_pool import StatePool
from tokenyard.kv_layout.layout import PoolView, StateView, map_pages
from tokenyard.kv_store.store import block_buffer

PAGES, PAGE = 9, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def pool(device: str, dtype: torch.dtype, planes: int = 2) -> KvPool:
    config = SimpleNamespace(kv_layers=(0, 1, 2), kv_planes=planes, two_kv_shapes=False, kv_shape=lambda layer: (2, 4))
    made = KvPool(config, PAGES, PAGE, torch.device(device), dtype)
    made.tensor.copy_(torch.arange(made.tensor.numel()).view(made.tensor.shape) % 251)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "planes"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 1)])
def test_a_block_is_the_same_from_a_device_and_from_memory(device, dtype, planes):
    there, here = pool(device, dtype, planes), pool("cpu", dtype, planes)
    blocks, view = DeviceBlocks(there), PoolView(map_pages(here.pieces), PAGES)
    assert blocks.page_bytes == view.page_bytes
    pages = np.array([7, 2, 3, 9], np.int32)
    found, expected = block_buffer(4 * view.page_bytes), block_buffer(4 * view.page_bytes)
    blocks.gather(pages, found)
    view.gather(pages, expected)
    assert (found == expected).all()

    into = np.array([1, 8], np.int32)
    blocks.scatter(found, 4, 1, into)
    view.scatter(expected, 4, 1, into)
    blocks.scatter(found, 4, 0, into[:0])
    assert torch.equal(there.tensor.cpu(), here.tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (0,)])
def test_a_state_is_the_same_from_a_device_and_from_memory(device, shape):
    config = SimpleNamespace(layers=(0, 1, 4), kernel=4, channels=6, state_shape=shape)
    there, here = (StatePool(config, 5, torch.device(one), torch.bfloat16) for one in (device, "cpu"))
    for made in (there, here):
        for tensor in (made.conv, made.recurrent):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251)
    states, view = DeviceStates(there), StateView(map_pages(here.pieces))
    assert states.slot_bytes == view.slot_bytes == 3 * (3 * 6 * 2 + 4 * math.prod(shape))
    found, expected = block_buffer(view.slot_bytes), block_buffer(view.slot_bytes)
    states.read(2, found)
    view.read(2, expected)
    assert (found == expected).all()
    assert found.any()
    for copies in (states, view):
        copies.write(4, found)
    assert torch.equal(there.conv.cpu(), here.conv)
    assert torch.equal(there.recurrent.cpu(), here.recurrent)
    assert torch.equal(here.conv[:, 4], here.conv[:, 2])


@pytest.mark.parametrize("device", DEVICES)
def test_threads_copy_at_the_same_time(device):
    made = pool(device, torch.float32)
    blocks, expected = DeviceBlocks(made), made.tensor.cpu().clone()
    wrong = []

    def copy(page: int) -> None:
        pages, block = np.array([page, page + 1], np.int32), block_buffer(2 * blocks.page_bytes)
        blocks.gather(pages, block)
        first = block.copy()
        for _ in range(50):
            blocks.scatter(block, 2, 0, pages)
            blocks.gather(pages, block)
            if not (block == first).all():
                wrong.append(page)

    threads = [threading.Thread(target=copy, args=(page,)) for page in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(made.tensor.cpu(), expected)


def test_pinned_memory_belongs_to_the_pools_device(monkeypatch):
    """Without the guard of its own device a rank would pin memory by device 0, and create a context there."""
    current, pinned = [], []
    stream = SimpleNamespace(synchronize=lambda: None)

    @contextmanager
    def guard(chosen):
        current.append(chosen)
        yield
        current.pop()

    def allocate(*shape, pin_memory=False, **options):
        if pin_memory:
            pinned.append(list(current))
        return empty(*shape, **options)

    empty = torch.empty
    monkeypatch.setattr("tokenyard.executor.kv_copies.copy_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", guard)
    monkeypatch.setattr(torch, "empty", allocate)
    blocks = DeviceBlocks(pool("cpu", torch.float32))
    pages, block = np.array([1, 2], np.int32), block_buffer(2 * blocks.page_bytes)
    blocks.gather(pages, block)
    blocks.scatter(block, 2, 0, pages)
    assert pinned == [[stream]]
