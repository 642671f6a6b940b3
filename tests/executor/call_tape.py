"""Work as a CUDA graph keeps it: a tape of calls on memory, without what the host does between them."""

import threading
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tokenyard.executor.attention.triton.available import installed

RECORDING = threading.local()
"""`calls` of the tape that this thread records."""


def memory(tensor):
    # Weights as oneDNN lays them out have no storage.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class CallTape:
    """Calls of work, made again on the same memory by `play`.

    calls: what is called, its arguments, and what it returned.
    """

    def __init__(self, work):
        """Make the calls and record them."""
        self.calls = RECORDING.calls = []
        try:
            with _recorded_launches(self.calls), _Recorder(self.calls):
                work()
        finally:
            RECORDING.calls = None

    def play(self):
        """Make the calls again."""
        for func, args, kwargs, found in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(found), tensors(again), strict=True):
                if old is not new:
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # In inference mode what is made of other operations arrives as one.
        with self:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = func(*args, **kwargs)
        given = {memory(tensor) for tensor in tensors((args, kwargs))}
        # A view is a place in memory, as is what is empty, and no work.
        if func.overloadpacket is torch.ops.aten.empty:
            return found
        if func._schema.is_mutable or any(memory(tensor) not in given for tensor in tensors(found)):
            self._calls.append((func, args, kwargs, found))
        return found


@contextmanager
def _recorded_launches(calls):
    """Within, launches of Triton's kernels, interpreted or compiled, are recorded as calls."""
    if not installed():
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kinds = {kind: kind.run for kind in (InterpretedFunction, JITFunction)}
    for kind, run in kinds.items():
        kind.run = _recorded(run, calls)
    try:
        yield
    finally:
        for kind, run in kinds.items():
            kind.run = run


def _recorded(run, calls):
    def launch(kernel, *args, **options):
        def again(*args):
            with _disable_current_modes():
                run(kernel, *args, **options)

        again(*args)
        calls.append((again, args, {}, None))

    return launch


def as_one_call(func):
    """Make a function one call of a tape, as an exchange between ranks is in a CUDA graph."""

    def call(*args):
        with _disable_current_modes():
            found = func(*args)
        if (calls := getattr(RECORDING, "calls", None)) is not None:
            calls.append((func, args, {}, found))
        return found

    return call


def capture(work):
    """A GraphCapturer."""
    work()
    return CallTape(work).play
