"""A device to run steps on where there is no GPU: tensors without data (torch's `meta`), and a watch over the steps."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.executor.driver import Driver
from tokenyard.base import ExecutorInfo
from tokenyard.executor.attention.reference import GatherAttention
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.runner import ModelExecutor

GPU = torch.device("meta")
_torch_tensor = torch.tensor
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Waited(AssertionError):
    """On a GPU the host would have waited for the device, or the step would have failed."""


class Watch(TorchDispatchMode):
    """Raises Waited for copies that are not asynchronous, for those to the device that are on the stream of steps, and
    for tensors of two devices in one operation.

    What needs data on the host (item, nonzero, masks as indices) fails on `meta` anyway.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format and kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs))
        if func in COPIES:
            return self._copy(func, args, kwargs)
        # A single number may come from the host: it travels with the kernel's arguments.
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim}
        if len(devices) > 1:
            raise Waited(f"{func} mixes tensors of {devices}")
        return func(*args, **kwargs)

    def _copy(self, func, args, kwargs):
        if func is torch.ops.aten.copy_.default:
            target, source, non_blocking = args[0].device, args[1], args[2] if len(args) > 2 else False
        else:
            source, non_blocking = args[0], kwargs.get("non_blocking", False)
            target = torch.device(kwargs.get("device") or source.device)
        if source.device == target:
            return func(*args, **kwargs)
        if not non_blocking:
            raise Waited(f"a blocking copy of {tuple(source.shape)} from {source.device} to {target}")
        if target == GPU and CURRENT[-1] is not UPLOADS:
            raise Waited(f"a copy of {tuple(source.shape)} to the device that waits for the step before")
        host = source if source.device.type == "cpu" else args[0]
        if not getattr(host, "pinned", False):
            raise Waited(f"a copy of {tuple(source.shape)} to or from memory that is not pinned")
        return args[0] if target.type == "cpu" else func(*args, **kwargs)


class Stream:
    """A stream."""

    def wait_stream(self, other):
        """Nothing to wait for: nothing takes time."""


STEPS, UPLOADS = Stream(), Stream()
CURRENT = [STEPS]
"""The stream in use now is the last one."""


@contextmanager
def _on(stream):
    CURRENT.append(stream)
    try:
        yield
    finally:
        CURRENT.pop()


def _in_use(tensor, stream):
    """An upload's memory is in use on the stream of steps."""
    assert stream is STEPS


class Event:
    """An event on a stream."""

    def record(self):
        """Nothing to note: nothing takes time."""


class Weights:
    """Tensors of the right shapes."""

    def get(self, name, shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU)


def _tensor(data, *, device="cpu", **options):
    """What torch.tensor does on a GPU, which the watch cannot see."""
    if torch.device(device).type != "cpu":
        raise Waited("torch.tensor makes a blocking copy to the device")
    return _torch_tensor(data, device=device, **options)


def _pinned(tensor):
    tensor.pinned = True
    return tensor


def pretend_driver(monkeypatch, config, page_size):
    """Make a driver of an executor in bfloat16 on the pretended device; it can launch, but has nothing to collect."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(torch, "tensor", _tensor)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.timing_event", Event)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.upload_stream", lambda device: UPLOADS)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.current_stream", lambda: STEPS)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.Tensor, "record_stream", _in_use)
    info = ExecutorInfo(
        model="pretended",
        device="cuda:0",
        dtype="bfloat16",
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        eos_token_ids=config.eos_token_ids,
        page_size=page_size,
        num_pages=1024 // page_size,
        max_pool_rows=8,
        kv_bytes_per_token=2 * config.kv_values_per_token,
    )
    pool = KvPool(config, info.num_pages, page_size, GPU, torch.bfloat16)
    pages = PageTable(info.max_pool_rows, info.context_length, page_size, GPU)
    decoder = Decoder(config, Weights(), GPU, config.context_length)
    model = TorchModel(decoder, GatherAttention(pool, pages, decoder.attention_spec))
    return Driver(ModelExecutor(model, pool, pages, info, GPU))
