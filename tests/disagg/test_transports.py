"""Pages that move by each transport: right bytes in the right places, and no wrong ones unnoticed."""

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tokenyard.base import ConfigError, KvPieces, SamplingParams
from tokenyard.base.frames import Frames, HandshakeError
from tokenyard.disagg import process_vm
from tokenyard.disagg.handshake import EngineIdentity, Handshake, Hello, Pull, Refused, decode_opening
from tokenyard.disagg.process_vm import Probe
from tokenyard.disagg.protocol import Want
from tokenyard.disagg.tcp import Checksum, TransferError, receive_pages, send_pages
from tokenyard.kv_layout.layout import PageMap, map_pages, runs, skip_bytes, spans, total_bytes
from tokenyard.kv_layout.model_digest import model_digest


class Pool:
    """[layer, 2, page, bytes], as an executor has it."""

    def __init__(self, layers: int, pages: int, nbytes: int, seed: int = 0) -> None:
        self.data = np.random.default_rng(seed).integers(0, 256, (layers, 2, pages, nbytes), dtype=np.uint8)

    def pieces(self, pages: np.ndarray) -> KvPieces:
        planes = np.arange(2 * len(self.data)) * self.data.strides[1]
        begin = self.data.ctypes.data + planes
        return KvPieces(begin + pages.astype(np.int64)[:, None] * self.data.strides[2], self.data.shape[3], "cpu")

    @property
    def map(self) -> PageMap:
        return map_pages(self.pieces)


PAGES_FROM = np.array([4, 5, 6, 9, 2, 3, 30], np.int32)
PAGES_TO = np.array([1, 2, 3, 4, 8, 7, 20], np.int32)


def test_neighbouring_pages_are_one_stretch():
    pool = Pool(3, 40, 64)
    assert runs(PAGES_FROM).tolist() == [0, 3, 4, 6]
    assert runs(PAGES_FROM, PAGES_TO).tolist() == [0, 3, 4, 5, 6]
    found = spans(pool.map, PAGES_FROM)
    assert len(found) == 4 * 6
    assert total_bytes(found) == 7 * 6 * 64
    assert total_bytes(skip_bytes(found, 100)) == 7 * 6 * 64 - 100
    assert not len(skip_bytes(found, 7 * 6 * 64))
    assert not len(spans(pool.map, PAGES_FROM[:0]))


def test_kv_that_cannot_be_reached_is_refused():
    pool = Pool(1, 4, 8)
    with pytest.raises(ConfigError, match="host memory"):
        map_pages(lambda pages: replace(pool.pieces(pages), device="cuda:0"))


def test_tcp_moves_pages_between_pools_whose_pages_lie_elsewhere():
    here, there = Pool(3, 40, 4096, 1), Pool(3, 40, 4096, 2)
    before = here.data.copy()
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=send_pages, args=(theirs, spans(there.map, PAGES_FROM), 4096, 5.0, lambda: True))
    sender.start()
    receive_pages(ours, spans(here.map, PAGES_TO), 4096, 5.0)
    sender.join()
    assert (here.data[:, :, PAGES_TO] == there.data[:, :, PAGES_FROM]).all()
    others = np.setdiff1d(np.arange(40), PAGES_TO)
    assert (here.data[:, :, others] == before[:, :, others]).all()


@pytest.mark.parametrize("nbytes", [24, 20])
def test_a_checksum_sees_a_flipped_bit_and_pieces_that_changed_places(nbytes):
    def value(data: np.ndarray, *cuts: int) -> int:
        check = Checksum(nbytes)
        for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            check.add(np.array([[data[begin:].ctypes.data, (end - begin) * nbytes]], np.int64))
        return check.value

    data = np.random.default_rng(1).integers(0, 256, (6, nbytes), dtype=np.uint8)
    assert value(data) == value(data, 2) == value(data, 1, 5)
    for place in ((0, 0), (3, 7), (5, nbytes - 1)):
        flipped = data.copy()
        flipped[place] ^= 128
        assert value(flipped) != value(data)
    assert value(data[[0, 2, 1, 3, 4, 5]].copy()) != value(data)


@pytest.mark.parametrize("fault", ["flip", "cut", "lease", "silence"])
def test_pages_that_come_wrong_or_not_at_all_are_noticed(fault):
    here, there = Pool(2, 40, 4096, 1), Pool(2, 40, 4096, 2)
    ours, wire_in = socket.socketpair()
    wire_out, theirs = socket.socketpair()

    def relay() -> None:
        passed = 0
        while data := bytearray(wire_out.recv(1 << 16)):
            if fault == "flip" and passed == 0:
                data[1000] ^= 4
            passed += len(data)
            if fault in ("cut", "silence") and passed > 20_000:
                break
            wire_in.sendall(data)
        if fault != "silence":
            wire_in.close()

    def send() -> None:
        try:
            send_pages(theirs, spans(there.map, PAGES_FROM), 4096, 0.3, lambda: fault != "lease")
        except (OSError, TransferError):
            pass
        finally:
            theirs.close()

    threads = [threading.Thread(target=target) for target in (relay, send)]
    for thread in threads:
        thread.start()
    with pytest.raises((TransferError, OSError)):
        receive_pages(ours, spans(here.map, PAGES_TO), 4096, 0.3)
    ours.close()
    wire_out.close()
    for thread in threads:
        thread.join()
    wire_in.close()


OTHER = """
import sys
import numpy as np
from tests.disagg.test_transports import Pool
from tokenyard.disagg.process_vm import Probe, allow
pool, probe = Pool(3, 40, 4096, 2), Probe()
allow(int(sys.argv[1]))
print(probe.address, probe.value.hex(), *pool.map.origins, *pool.map.strides, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process_vm_readv is Linux's")
def test_process_vm_reads_the_pages_of_another_process():
    root = os.getcwd()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    assert other.stdout is not None
    address, value, *columns = other.stdout.readline().split()
    numbers = np.array(columns, np.int64)
    theirs = PageMap(numbers[:6], numbers[6:], 4096)
    if not process_vm.can_read(other.pid, int(address), bytes.fromhex(value)):
        other.kill()
        other.wait()
        pytest.skip("this kernel lets no process read another")
    assert not process_vm.can_read(other.pid, int(address), b"x" * 32)
    here, there = Pool(3, 40, 4096, 1), Pool(3, 40, 4096, 2)
    assert process_vm.read_pages(other.pid, theirs, PAGES_FROM, here.map, PAGES_TO) == 7 * 6 * 4096
    assert (here.data[:, :, PAGES_TO] == there.data[:, :, PAGES_FROM]).all()
    other.kill()
    other.wait()
    with pytest.raises(OSError):
        process_vm.read_pages(other.pid, theirs, PAGES_FROM, here.map, PAGES_TO)


def identity(secret: bytes = b"s", **changes) -> EngineIdentity:
    facts = {"boot_id": os.urandom(4).hex(), "model": "m", "dtype": "float32", "page_size": 16} | changes
    pages = Pool(2, 4, 64).map
    return EngineIdentity(Hello(version=1, nonce=b"", pieces=4, piece_bytes=64, **facts), pages, secret, Probe())


def shake(one: EngineIdentity, other: EngineIdentity, change=lambda body: body) -> tuple[Handshake, Handshake]:
    """Both sides of a handshake; `change` sees each frame of the side that dialled."""
    a, b = Handshake(one, dialled=True), Handshake(other, dialled=False)
    while a.to_send or b.to_send:
        for side, peer in ((a, b), (b, a)):
            frames = Frames()
            while side.to_send:
                frames.feed(side.to_send.pop(0))
            while (body := frames.next()) is not None:
                peer.received(change(body) if side is a else body)
    return a, b


def body_of(data: bytes) -> bytes:
    frames = Frames()
    frames.feed(data)
    body = frames.next()
    assert body is not None
    return body


def test_engines_that_share_model_and_secret_shake_hands():
    a, b = shake(identity(), identity())
    assert a.done
    assert b.done
    assert a.memory().nbytes == 64


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "n"}, "another model: m there, n here"),
        ({"page_size": 1}, "another --page-size"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"secret": b"t"}, "secret"),
    ],
)
def test_engines_that_differ_refuse_each_other_and_say_why(change, complaint):
    with pytest.raises(HandshakeError, match=complaint):
        shake(identity(), identity(**change))


def test_an_echo_proves_nothing():
    a = Handshake(identity(), dialled=True)
    a.received(body_of(Handshake(identity(), dialled=False).to_send[0]))
    with pytest.raises(HandshakeError, match="secret"):
        a.received(body_of(a.to_send[-1]))


def test_nothing_but_a_hello_is_sent_to_who_has_proved_nothing():
    answering, dialling = Handshake(identity(), dialled=False), Handshake(identity(b"other"), dialled=True)
    assert len(answering.to_send) == 1
    answering.received(body_of(dialling.to_send[0]))
    assert len(answering.to_send) == 1
    dialling.received(body_of(answering.to_send[0]))
    assert len(dialling.to_send) == 2
    with pytest.raises(HandshakeError, match="secret"):
        answering.received(body_of(dialling.to_send[1]))
    assert isinstance(decode_opening(body_of(answering.to_send[-1])), Refused)


WANT = Want("key", b"\1\0\0\0\2\0\0\0", SamplingParams())


@pytest.mark.parametrize("where", range(0, 60, 7))
def test_one_flipped_bit_in_a_message_is_noticed(where):
    a, b = shake(identity(), identity())
    body = bytearray(body_of(a.seal(WANT)))
    assert where < len(body)
    body[where] ^= 1
    with pytest.raises(HandshakeError, match="signature"):
        b.open(bytes(body))


def test_messages_arrive_in_order_and_once():
    a, b = shake(identity(), identity())
    first, second = body_of(a.seal(WANT)), body_of(a.seal(WANT))
    assert b.open(first) == WANT
    with pytest.raises(HandshakeError, match="signature"):
        b.open(first)
    a, b = shake(identity(), identity())
    first, second = body_of(a.seal(WANT)), body_of(a.seal(WANT))
    with pytest.raises(HandshakeError, match="signature"):
        b.open(second)
    assert body_of(b.seal(WANT)) not in (first, second)


@pytest.mark.parametrize("kind", range(3))
def test_one_flipped_bit_in_a_handshake_is_noticed(kind):
    seen = []

    def change(body):
        seen.append(body)
        return body if len(seen) - 1 != kind else body[:-1] + bytes([body[-1] ^ 1])

    with pytest.raises(HandshakeError):
        shake(identity(), identity(), change)


def test_a_request_for_pages_is_signed():
    pull = Pull("key", b"ticket", 3, 4).signed(b"s")
    assert pull.is_signed(b"s")
    assert not pull.is_signed(b"t")
    assert not Pull("key", b"ticket", 3, 4).is_signed(b"s")
    for changed in ({"first": 2}, {"count": 5}, {"key": "keys"}, {"ticket": b"other"}):
        assert not msgspec.structs.replace(pull, **changed).is_signed(b"s")


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x00"])
def test_what_is_no_frame_of_a_handshake_is_refused(data):
    frames = Frames()
    frames.feed(data)
    with pytest.raises(HandshakeError):
        decode_opening(frames.next())


def test_a_digest_distinguishes_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * 5000)
    first = model_digest(str(tmp_path))
    assert first == model_digest(str(tmp_path))
    assert first != model_digest(str(tmp_path), "seed 1")
    (tmp_path / "model.safetensors").write_bytes(b"a" * 4999 + b"b")
    assert first != model_digest(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    digests = set()
    for last in (b"a", b"b"):
        (tmp_path / "model.gguf").write_bytes(b"a" * 4999 + last)
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2
