"""The wire: messages survive encoding, and anything else is refused."""

import os
import stat

import numpy as np
import pytest

from tokenyard.base import (
    Cancel,
    ConfigError,
    Finish,
    Flush,
    LogprobOptions,
    OpenGate,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SetPolicy,
    Slo,
    Started,
    StopFound,
    Submit,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
    Update,
)
from tokenyard.engine.processes.ipc import (
    FROM_SCHEDULER,
    TO_API,
    TO_DETOKENIZER,
    TO_SCHEDULER,
    ProtocolError,
    SocketDirectory,
)
from tokenyard.engine.processes.messages import Fence, Fenced, Heartbeat, RpcReply, RpcRequest, TextBatch


def int32(*values):
    return np.array(values, dtype=np.int32)


REQUEST = Request(
    7,
    "rid",
    int32(1, 2, 3),
    SamplingParams(logit_bias={3: -1.5}, stop=["é"], stop_token_ids=[4], seed=2**61),
    TextOptions(stream=True),
    LogprobOptions(output=True, top=2),
    arrival_ns=2**60,
    slo=Slo(ttft_ns=5),
    deadline_ns=3,
)
BATCH = TokenBatch(
    np.array([1, 2**40]),
    int32(5, 6),
    int32(0, 1),
    [Started(1, int32(1), TextOptions(), ["x"], [])],
    [Finish(1, "stop", matched="x"), Finish(2, "length", matched=None)],
    [TokenLogprobs(1, 0, 5, -0.5, [5], [-0.5])],
)
TEXT = TextBatch(np.array([1]), ["añ"], int32(2), int32(5, 6), int32(2), int32(0), BATCH.finished, BATCH.logprobs)
FENCED = Fenced(3, np.array([1, 2**40]), int32(2, 0), int32(5, 6))
BEAT = Heartbeat(1, "step", 2, 3, {"a": {"b": 1.5}})

MESSAGES = [
    *(
        (TO_SCHEDULER, message)
        for message in (Submit(REQUEST), Cancel([1]), Update(1, 2), Pause("retract", [3]), Resume())
    ),
    *((TO_SCHEDULER, message) for message in (StopFound(1, 2, "x"), OpenGate(1, 4), SetPolicy("lpm", {"a": 1.5}))),
    *((TO_SCHEDULER, message) for message in (Flush(), RpcRequest(1, "explain", {"number": 3}))),
    *((FROM_SCHEDULER, message) for message in (BATCH, BEAT, RpcReply(1, True), RpcReply(2, {"x": [b"y"]}))),
    *((TO_DETOKENIZER, message) for message in (BATCH, BEAT, RpcReply(1, refusal="no"), Fence(3, [1, 2**40]))),
    *((TO_API, message) for message in (TEXT, BATCH, BEAT, RpcReply(1), FENCED)),
]


def same(left, right):
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    names = getattr(left, "__struct_fields__", None) or getattr(left, "__dataclass_fields__", None)
    if names is None:
        return left == right
    return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)


@pytest.mark.parametrize(("codec", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_survive_the_wire(codec, message):
    decoded, source = codec.decode(codec.encode(message, 2**20))
    assert same(decoded, message)
    assert source == 2**20


def test_what_the_scheduler_sends_straight_to_the_api_is_understood():
    assert same(TO_API.decode(FROM_SCHEDULER.encode(BATCH))[0], BATCH)


def test_arrays_of_another_width_arrive_as_declared():
    batch = TokenBatch(np.array([1], np.int32), np.array([5]), np.array([0]))
    out, _ = FROM_SCHEDULER.decode(FROM_SCHEDULER.encode(batch))
    assert (out.numbers.dtype, out.tokens.dtype) == (np.int64, np.int32)
    assert out.tokens.tolist() == [5]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"\x00",
        bytes(4),
        b"\x00\x00\x00\x00\x00garbage",
        TO_API.encode(TEXT),
        TO_SCHEDULER.encode(Resume())[:-1],
    ],
)
def test_other_frames_are_refused(frame):
    with pytest.raises(ProtocolError):
        TO_SCHEDULER.decode(frame)


def test_messages_of_another_direction_are_not_sent():
    with pytest.raises(ProtocolError, match="TextBatch"):
        TO_SCHEDULER.encode(TEXT)


def test_the_socket_directory_is_private_and_goes_away():
    with SocketDirectory() as sockets:
        path = sockets.path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.getuid()
        ends = sockets.endpoints
        assert len({ends.scheduler(0), ends.scheduler(1), ends.detokenizer, ends.api}) == 4
        (path / "api").touch()
    assert not path.exists()


def test_a_path_too_long_for_a_socket_is_an_error(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        SocketDirectory()
    assert list(deep.iterdir()) == []
