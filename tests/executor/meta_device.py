"""A device to run steps on where there is no GPU: tensors without data (torch's `meta`), a watch over the steps, and a
model of streams that work at their own speed.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
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
from tokenyard.executor.state_pool import StatePool

GPU = torch.device("meta")
_torch_tensor, _torch_numpy = torch.tensor, torch.Tensor.numpy
PINNED = set()
"""Pinned memory: weak references to storages."""
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _storage(tensor):
    """A weak reference to a tensor's memory; it keeps the name of that memory from being used again."""
    return StorageWeakRef(tensor.untyped_storage())


def is_pinned(tensor):
    """Whether a tensor lies in pinned memory."""
    return _storage(tensor) in PINNED


class Waited(AssertionError):
    """On a GPU the host would have waited for the device, or the step would have failed."""


class Watch(TorchDispatchMode):
    """Raises Waited for copies that are not asynchronous, for those to the device that are on the stream of steps, and
    for tensors of two devices in one operation.

    What needs data on the host (item, nonzero, masks as indices) fails on `meta` anyway.

    patient: whether copies to the device may wait, as those of threads beside the steps.
    """

    def __init__(self, *, patient=False):
        super().__init__()
        self._patient = patient

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        # In inference mode what is made of other operations arrives as one, copies among them.
        with self:
            found = func.decompose(*args, **kwargs)
        return self.run(func, args, kwargs) if found is NotImplemented else found

    def run(self, func, args, kwargs):
        """Run an operation that is made of no others."""
        if func is torch.ops.aten.empty.memory_format and kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs).zero_())
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
        if source.device == target or (self._patient and target == GPU and not non_blocking):
            return func(*args, **kwargs)
        if not non_blocking:
            raise Waited(f"a blocking copy of {tuple(source.shape)} from {source.device} to {target}")
        if target == GPU and CURRENT[-1] is STEPS:
            raise Waited(f"a copy of {tuple(source.shape)} to the device that waits for the step before")
        host = source if source.device.type == "cpu" else args[0]
        if not is_pinned(host):
            raise Waited(f"a copy of {tuple(source.shape)} to or from memory that is not pinned")
        return args[0] if target.type == "cpu" else func(*args, **kwargs)


class Stream:
    """A stream, or the host. seen: how much of each stream's work is done before what it does next."""

    def __init__(self, name):
        self.name, self.seen = name, {self: 0}

    def wait_stream(self, other):
        # What is freed now is freed before this.
        if ORDER[-1] is not None:
            ORDER[-1].check_freed()
        self.sees(other)

    def sees(self, other):
        for stream, done in other.seen.items():
            self.seen[stream] = max(done, self.seen.get(stream, 0))

    def synchronize(self):
        HOST.wait_stream(self)

    def has_seen(self, stream, done):
        return self.seen.get(stream, 0) >= done


STEPS, UPLOADS, RESULTS, HOST = (Stream(name) for name in ("steps", "uploads", "results", "host"))
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
    """An upload's memory is in use on the stream of steps, and a result's on that of results."""
    assert stream in (STEPS, RESULTS)
    if ORDER[-1] is not None:
        ORDER[-1].in_use(tensor, stream)


class Event:
    """An event on a stream."""

    def __init__(self):
        self._seen = SimpleNamespace(seen={})

    def record(self):
        self._seen = SimpleNamespace(seen=dict(CURRENT[-1].seen))

    def synchronize(self):
        HOST.wait_stream(self._seen)

    def elapsed_time(self, other):
        return 1.0


class Raced(AssertionError):
    """Two streams, or a stream and the host, use the same memory in no certain order."""


ORDER = [None]
"""The _StreamOrder in force is the last one."""


@contextmanager
def stream_order(*unwatched, patient=False):
    """Within, work of streams is held to an order. unwatched: tensors whose users keep apart by other means, such as a
    KV pool's by pages.
    """
    order = _StreamOrder(unwatched, patient)
    ORDER.append(order)
    try:
        with order:
            yield
        order.check_freed()
    finally:
        ORDER.pop()


class _StreamOrder(Watch):
    """A Watch that raises Raced where memory is read or written before the work that it depends on is sure to be done,
    and where memory is freed that another stream may still use. It judges all orders that waits and events allow.
    """

    def __init__(self, unwatched, patient):
        super().__init__(patient=patient)
        self._unwatched = {_storage(tensor) for tensor in unwatched}
        self._memory = {}

    def run(self, func, args, kwargs):
        read = tree_leaves((args, kwargs))
        given = [(kwargs.get(argument.name), argument) for argument in func._schema.arguments]
        given += zip(args, func._schema.arguments, strict=False)
        written = [
            leaf
            for value, argument in given
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
        ]
        found = super().run(func, args, kwargs)
        written += [leaf for leaf in tree_leaves(found) if not any(leaf is one for one in read)]
        stream = HOST
        if any(isinstance(leaf, torch.Tensor) and leaf.device == GPU for leaf in (*read, *written)):
            stream = CURRENT[-1]
            stream.sees(HOST)
        if not func.is_view:
            self.use(stream, read, written, func)
        return found

    def use(self, stream, read, written, what):
        """Note that a stream reads and writes tensors in its next work."""
        stream.seen[stream] += 1
        now = stream.seen[stream]
        for tensor, writes in (*((one, False) for one in read), *((one, True) for one in written)):
            if not isinstance(tensor, torch.Tensor) or (key := _storage(tensor)) in self._unwatched:
                continue
            if key not in self._memory:
                self._memory[key] = SimpleNamespace(
                    owner=stream, on_device=tensor.device == GPU, wrote=(stream, 0), reads={}, recorded=set()
                )
            memory = self._memory[key]
            others = [memory.wrote, *memory.reads.items()] if writes else [memory.wrote]
            for other, done in others:
                if not stream.has_seen(other, done):
                    raise Raced(f"{what} on {stream.name} of {tuple(tensor.shape)} races with {other.name}")
            if writes:
                memory.wrote = stream, now
            memory.reads[stream] = now

    def in_use(self, tensor, stream):
        """What record_stream promises."""
        self._memory[_storage(tensor)].recorded.add(stream)

    def check_freed(self):
        """Raise for memory that was freed, and so may be taken by the owner's next work, while in use elsewhere."""
        for key in [key for key in self._memory if key.expired()]:
            memory = self._memory.pop(key)
            if not memory.on_device:  # the allocator of pinned memory waits for copies
                continue
            after = Stream("after")
            after.sees(memory.owner)
            after.sees(HOST)
            for stream, done in memory.reads.items():
                if stream not in memory.recorded and not after.has_seen(stream, done):
                    raise Raced(f"memory of {memory.owner.name} is freed while {stream.name} may use it")


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
    PINNED.add(_storage(tensor))
    return tensor


def _numpy(tensor, **options):
    """The host reads and writes what it takes as an array."""
    if ORDER[-1] is not None:
        ORDER[-1].use(HOST, [tensor], [tensor], "numpy")
    return _torch_numpy(tensor, **options)


def pretend_driver(monkeypatch, config, page_size):
    """Make a driver of an executor in bfloat16 on the pretended device. What it collects are zeros."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(torch, "tensor", _tensor)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.timing_event", Event)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.upload_stream", lambda device: UPLOADS)
    monkeypatch.setattr("tokenyard.executor.cuda_streams.copy_stream", lambda device: RESULTS)
    monkeypatch.setattr("tokenyard.executor.kv_copies.copy_stream", lambda device: RESULTS)
    monkeypatch.setattr(torch.Tensor, "numpy", _numpy)
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
    states = None
    if config.recurrent is not None:
        states = StatePool(config.recurrent, info.max_pool_rows + 4, GPU, torch.bfloat16)
    return Driver(ModelExecutor(model, pool, pages, info, GPU, states=states))
