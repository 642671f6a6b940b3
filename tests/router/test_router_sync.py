"""Several routers that share state through a store, and work without it."""

import asyncio
import contextlib
import shutil
import socket
import subprocess

import msgspec
import pytest

from tests.router.fakes import FakeWorker, routing
from tokenyard.base import ConfigError
from tokenyard.router.router_sync import RouterSync, SharedUpdate, command, read_reply


class Store:
    """As much of Valkey as routers use."""

    def __init__(self, password=b""):
        self.subscribers, self.password, self.port = set(), password, 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self):
        self._server.close()
        for writer in list(self.subscribers):
            writer.transport.abort()

    async def _serve(self, reader, writer):
        allowed = not self.password
        self.subscribers.discard(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while words := await read_reply(reader):
                name, *rest = words
                if name == b"AUTH":
                    allowed = rest[-1] == self.password
                    writer.write(b"+OK\r\n" if allowed else b"-WRONGPASS\r\n")
                elif not allowed:
                    writer.write(b"-NOAUTH Authentication required.\r\n")
                elif name == b"SUBSCRIBE":
                    self.subscribers.add(writer)
                    writer.write(b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n" % (len(rest[0]), rest[0]))
                elif name == b"PUBLISH":
                    for other in self.subscribers:
                        other.write(command(b"message", *rest))
                    writer.write(b":%d\r\n" % len(self.subscribers))
        self.subscribers.discard(writer)
        writer.close()


async def _until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def sharing(router):
    task = asyncio.create_task(router.shared.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_routers_share_what_they_sent():
    async def main():
        store = Store(b"secret word")
        await store.start()
        url = f"redis://:secret%20word@127.0.0.1:{store.port}"
        async with (
            FakeWorker("a") as a,
            FakeWorker("b") as b,
            routing(a, b, shared_url=url) as (one, first),
            routing(b, a, shared_url=url) as (two, second),
            sharing(one),
            sharing(two),
        ):
            await _until(lambda: len(store.subscribers) == 2 and one.shared.connected and two.shared.connected)
            for i in range(6):
                prompt, headers = f"{i} " * 800, [f"X-Session-Id: s{i}"]
                home = (await first.complete(prompt, headers)).json["worker"]
                held = len(one.index.held)
                name = str((a if home == "a" else b).url)
                await _until(lambda name=name: two.index.blocks_of(name) == one.index.blocks_of(name))
                assert (await second.complete(prompt)).json["worker"] == home
                assert (await second.complete("something else", headers)).json["worker"] == home
                assert held >= 1
        store.stop()

    asyncio.run(main())


class RealStore:
    """A real Valkey or Redis, with a password."""

    def __init__(self):
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [program, "--port", str(self.port), "--requirepass", "word", "--save", "", "--daemonize", "no"]

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.mark.world
def test_two_routers_share_a_real_store_and_work_without_it_when_it_dies():
    async def sent_to(first, numbers):
        homes = []
        for i in numbers:
            prompt = f"{i} " * 800
            home = (await first.complete(prompt, [f"X-Session-Id: s{i}"])).json["worker"]
            homes.append((prompt, f"X-Session-Id: s{i}", home))
        return homes

    async def main():
        store = RealStore()
        store.start()
        url = f"redis://:word@127.0.0.1:{store.port}"
        async with (
            FakeWorker("a") as a,
            FakeWorker("b") as b,
            routing(a, b, shared_url=url) as (one, first),
            routing(b, a, shared_url=url) as (two, second),
            sharing(one),
            sharing(two),
        ):
            try:
                names = [str(worker.url) for worker in (a, b)]
                for turn in range(2):
                    await _until(lambda: one.shared.connected and two.shared.connected)
                    homes = await sent_to(first, range(10 * turn, 10 * turn + 8))
                    await _until(lambda: all(two.index.blocks_of(n) >= one.index.blocks_of(n) for n in names))
                    for prompt, session, home in homes:
                        assert (await second.complete(prompt)).json["worker"] == home
                        assert (await second.complete("else", [session])).json["worker"] == home
                    store.kill()
                    for prompt, session, home in homes:
                        assert (await second.complete(prompt, [session])).json["worker"] == home
                        assert (await first.complete("new " * 900)).status == 200
                    await _until(lambda: not one.shared.connected and not two.shared.connected)
                    store.start()
            finally:
                store.kill()

    asyncio.run(main())


def test_a_store_that_is_away_costs_nothing_and_is_found_again():
    async def main():
        store = Store()
        await store.start()
        url = f"redis://127.0.0.1:{store.port}"
        async with FakeWorker() as worker, routing(worker, shared_url=url) as (router, client), sharing(router):
            await _until(lambda: router.shared.connected)
            store.stop()
            for _ in range(3):
                assert (await client.complete("x " * 900)).status == 200
            await _until(lambda: not router.shared.connected)
            await store.start()
            await _until(lambda: router.shared.connected)

    asyncio.run(main())


def test_a_wrong_password_costs_nothing():
    async def main():
        store = Store(b"right")
        await store.start()
        url = f"redis://:wrong@127.0.0.1:{store.port}"
        async with FakeWorker() as worker, routing(worker, shared_url=url) as (router, client), sharing(router):
            await asyncio.sleep(0.1)
            assert (await client.complete()).status == 200
            assert not router.shared.connected
        store.stop()

    asyncio.run(main())


def test_only_updates_of_others_about_known_targets_count():
    async def main():
        async with FakeWorker() as worker, routing(worker, shared_url="redis://127.0.0.1:1") as (router, _):
            shared, name = router.shared, str(router.workers.find("w0").url)
            for junk in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode(["r", [["t", 5]], []])):
                shared.take(junk)
            shared.take(msgspec.msgpack.encode(SharedUpdate(router.id, [(name, [b"mine"])], [])))
            shared.take(
                msgspec.msgpack.encode(
                    SharedUpdate("other", [("http://unknown:1", [b"x"])], [("s", "http://unknown:1")])
                )
            )
            assert router.index.bytes == 0
            shared.take(msgspec.msgpack.encode(SharedUpdate("other", [(name, [b"theirs"])], [])))
            assert router.index.blocks_of(name) == 1
            for wrong in ("http://x", "redis://", "x"):
                with pytest.raises(ConfigError, match="--shared-url"):
                    RouterSync(wrong, "r", router.workers, router.index, router.policy)

    asyncio.run(main())


@pytest.mark.parametrize(
    "data", [b"", b"?\r\n", b"$x\r\n", b"-ERR no\r\n", b"$99999999999\r\n", b"+OK", b"*1\r\n", b"*1\r\n" * 2000]
)
def test_a_store_that_does_not_speak_resp_is_refused(data):
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(ConnectionError):
            await read_reply(reader)

    asyncio.run(main())
