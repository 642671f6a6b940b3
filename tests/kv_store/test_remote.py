"""A store that engines share: what goes wrong there costs a block, and nothing waits for one that is away."""

import shutil
import socket
import subprocess
import threading

import msgspec
import pytest

from tests.contract.test_stores import DIGESTS, FORM, content, holds
from tests.kv_store.fake_valkey import FakeValkey
from tokenyard.base import ConfigError
from tokenyard.kv_store import remote
from tokenyard.kv_store.remote import MAX_FAILURES, PAUSE_S, RemoteStore, StoreCircuitBreaker
from tokenyard.kv_store.resp import RespError
from tokenyard.kv_store.store import StoreFullError, block_buffer


@pytest.fixture
def valkey():
    made = FakeValkey()
    yield made
    made.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_engine_finds_what_another_has_put_there(valkey):
    RemoteStore(valkey.url, FORM).put(DIGESTS[0], content(0))
    other = RemoteStore(valkey.url, FORM)
    assert (other.count_stored(DIGESTS), other.count_maybe_stored(DIGESTS)) == (0, len(DIGESTS))
    assert other.prefetch(DIGESTS[0])
    assert not other.prefetch(DIGESTS[1])
    assert holds(other, 0)
    assert other.count_stored(DIGESTS) == 1
    foreign = RemoteStore(valkey.url, msgspec.structs.replace(FORM, model="another"))
    assert not foreign.prefetch(DIGESTS[0])


@pytest.mark.parametrize("spoil", [lambda value: value[:-1], lambda value: value[:20] + b"x" + value[21:]])
def test_a_value_that_is_damaged_is_a_miss_and_goes(valkey, spoil):
    store = RemoteStore(valkey.url, FORM)
    store.put(DIGESTS[0], content(0))
    ((key, value),) = valkey.values.items()
    valkey.values[key] = spoil(value)
    assert not holds(store, 0)
    assert (store.counters.damaged, store.blocks, valkey.values) == (1, 0, {})


def test_what_the_server_has_dropped_is_a_miss(valkey):
    store = RemoteStore(valkey.url, FORM)
    store.put(DIGESTS[0], content(0))
    valkey.values.clear()
    assert not holds(store, 0)
    assert store.count_stored(DIGESTS) == 0
    assert store.put(DIGESTS[0], content(0))
    valkey.values.clear()
    assert not store.prefetch(DIGESTS[0])
    assert store.put(DIGESTS[0], content(0)), "it is stored again"


def test_a_full_server_takes_no_more(valkey):
    valkey.answer = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    with pytest.raises(StoreFullError):
        RemoteStore(valkey.url, FORM).put(DIGESTS[0], content(0))


@pytest.mark.parametrize(
    "answer",
    [b"-ERR no\r\n", b"*1\r\n", b"$x\r\n", b"hello\r\n", b"$9999999999\r\n", b"$5000\r\nshort\r\n", b"\r\n" * 3],
)
def test_any_answer_that_is_none_is_an_error(valkey, monkeypatch, answer):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    store = RemoteStore(valkey.url, FORM)
    valkey.answer = answer
    with pytest.raises(RespError):
        store.get(DIGESTS[0], block_buffer(FORM.block_bytes))


def test_a_store_that_hangs_or_is_gone_is_left_alone_for_a_while(valkey, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.05)
    clock, go = Clock(), threading.Event()
    store = RemoteStore(valkey.url, FORM, StoreCircuitBreaker(clock))
    store.put(DIGESTS[0], content(0))
    valkey.before = lambda name: go.wait(20) and None
    for _ in range(MAX_FAILURES):
        assert not store.unavailable
        with pytest.raises(RespError):
            store.get(DIGESTS[0], block_buffer(FORM.block_bytes))
    assert store.unavailable
    asked = len(valkey.asked)
    assert not holds(store, 0)
    assert not store.prefetch(DIGESTS[0])
    assert (store.count_stored(DIGESTS), store.count_maybe_stored(DIGESTS)) == (0, 0)
    with pytest.raises(RespError, match="is away"):
        store.put(DIGESTS[1], content(1))
    assert len(valkey.asked) == asked, "the store is not asked"

    clock.now += PAUSE_S
    assert store.blocks == 0, "it may come back empty"
    valkey.close()
    with pytest.raises(RespError):
        RemoteStore(f"redis://127.0.0.1:{free_port()}", FORM).put(DIGESTS[1], content(1))
    go.set()


def test_one_failure_after_the_pause_is_enough_and_one_answer_ends_it():
    clock = Clock()
    breaker = StoreCircuitBreaker(clock)
    for _ in range(MAX_FAILURES):
        breaker.failed()
    clock.now += PAUSE_S
    assert breaker.closed
    breaker.failed()
    assert not breaker.closed
    clock.now += PAUSE_S
    breaker.succeeded()
    breaker.failed()
    assert breaker.closed


def test_a_password_opens_it(monkeypatch):
    valkey = FakeValkey(b"a secret")
    try:
        with pytest.raises(RespError, match="NOAUTH"):
            RemoteStore(valkey.url, FORM).put(DIGESTS[0], content(0))
        store = RemoteStore(valkey.url.replace("//", "//:a%20secret@") + "/3", FORM)
        assert store.put(DIGESTS[0], content(0))
        assert valkey.asked[-3:] == [b"AUTH", b"SELECT", b"SET"]
        store.close()
    finally:
        valkey.close()


@pytest.mark.parametrize("url", ["", "127.0.0.1", "http://host", "redis://", "redis://host:port", "redis://host/name"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="--hicache-storage-url"):
        RemoteStore(url, FORM)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def start(command: list[str]) -> subprocess.Popen[str]:
    """A real server, once it takes connections."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert any("eady to accept" in line for line in server.stdout)
    return server


@pytest.mark.world
def test_a_real_store(tmp_path):
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("no valkey-server or redis-server is installed")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    command += ["--requirepass", "open", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction"]
    with start(command) as server:
        try:
            store = RemoteStore(f"valkey://:open@127.0.0.1:{port}", FORM)
            for place in range(4):
                assert store.put(DIGESTS[place], content(place))
            other = RemoteStore(f"valkey://:open@127.0.0.1:{port}", FORM)
            assert all(other.prefetch(DIGESTS[place]) and holds(other, place) for place in range(4))
            other.clear()
            assert not holds(store, 0)
            assert store.put(DIGESTS[0], content(0))
            server.kill()
            server.wait()
            for _ in range(MAX_FAILURES):
                assert not store.unavailable
                with pytest.raises(RespError):
                    store.prefetch(DIGESTS[0])
            assert store.unavailable
        finally:
            server.terminate()
    with start(command) as server:
        try:
            store = RemoteStore(f"valkey://:open@127.0.0.1:{port}", FORM)
            with pytest.raises(StoreFullError):
                all(store.put(place.to_bytes(16, "big"), content(0)) for place in range(10**5))
        finally:
            server.terminate()
