"""The order in which results leave for the host, on streams that only keep a list (test_stream_order.py judges it)."""

from contextlib import contextmanager

import torch

from tokenyard.executor import cuda_streams


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append(("waits for", other))


def test_results_are_copied_on_a_separate_stream_after_the_step(monkeypatch):
    log = []
    own = Stream(log)

    @contextmanager
    def on(stream):
        log.append(("on", stream))
        yield
        log.append(("off", stream))

    monkeypatch.setattr(cuda_streams, "copy_stream", lambda device: own)
    monkeypatch.setattr(cuda_streams, "current_stream", lambda: "the step's")
    monkeypatch.setattr(torch.cuda, "stream", on)
    with cuda_streams.HostCopies(torch.device("cuda:0")).after_step():
        log.append("copies")
    assert log == [("waits for", "the step's"), ("on", own), "copies", ("off", own)]


def test_inputs_are_copied_on_a_separate_stream_before_the_step(monkeypatch):
    log = []
    uploads, steps = Stream(log), Stream(log)

    @contextmanager
    def on(stream):
        log.append(("on", stream))
        yield
        log.append(("off", stream))

    monkeypatch.setattr(cuda_streams, "upload_stream", lambda device: uploads)
    monkeypatch.setattr(cuda_streams, "current_stream", lambda: steps)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(("in use on", stream)))
    assert cuda_streams.uploaded(torch.ones(2), torch.device("meta")).device.type == "meta"
    assert log == [("on", uploads), ("off", uploads), ("waits for", uploads), ("in use on", steps)]


def test_on_a_cpu_nothing_is_copied():
    copies, tensor = cuda_streams.HostCopies(torch.device("cpu")), torch.zeros(3)
    with copies.after_step():
        assert copies.to_host(tensor) is tensor
