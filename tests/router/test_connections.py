"""Connections to workers, as they are made."""

import asyncio

import pytest

from tokenyard.router.worker_connection import ConnectionPool, WorkerUrl


@pytest.mark.parametrize("steps", range(4))
def test_one_that_is_given_up_as_it_is_made_stays_given_up(monkeypatch, steps):
    async def main():
        loop, made = asyncio.get_running_loop(), asyncio.Event()

        async def connect(*_, **__):
            await made.wait()

        monkeypatch.setattr(loop, "create_connection", connect)
        pool = ConnectionPool(WorkerUrl.parse("http://127.0.0.1:1"), None, 5.0)
        task = asyncio.create_task(pool.connect())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        made.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        if not task.cancel():
            await task  # It was made before.
            return
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_one_that_takes_too_long_is_an_error(monkeypatch):
    async def main():
        async def connect(*_, **__):
            await asyncio.sleep(60)

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
        pool = ConnectionPool(WorkerUrl.parse("http://127.0.0.1:1"), None, 0.01)
        with pytest.raises(TimeoutError):
            await pool.connect()

    asyncio.run(main())
