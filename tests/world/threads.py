"""The product's own threads in the world: `threading` and `queue` whose waits take virtual time.

What is created outside of the world's processes is real.
"""

import os
import queue
import random
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import starlette.concurrency

from tests.world.clock import NS, Clock
from tests.world.lockstep import LockstepThread, running
from tests.world.loop import current


class Waiters:
    """Threads that wait for something, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._threads: list[LockstepThread] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False if the time passed first."""
        thread = running.get()
        assert thread is not None, "the event loop would block"
        due_ns = None if timeout_s is None else self._clock.now_ns + max(0, round(timeout_s * NS))
        self._threads.append(thread)
        try:
            thread.wait_until(due_ns, wakes_early=True)
            return thread not in self._threads
        finally:
            if thread in self._threads:
                self._threads.remove(thread)

    def wake(self, count: int | None = None) -> None:
        """Wake the first `count`; all if None."""
        woken, self._threads = self._threads[:count], self._threads[len(self._threads[:count]) :]
        for thread in woken:
            thread.wake()


class Lock:
    """threading.Lock."""

    def __init__(self, clock: Clock) -> None:
        self._held, self._waiters = False, Waiters(clock)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._held:
            if not blocking:
                return False
            self._waiters.wait()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._waiters.wake(1)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, clock: Clock, lock: Any) -> None:
        self._lock, self._clock = lock, clock
        self._waiters = Waiters(clock)
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._waiters.wait(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_ns = None if timeout is None else self._clock.now_ns + round(timeout * NS)
        while not (found := predicate()):
            left_s = None if until_ns is None else (until_ns - self._clock.now_ns) / NS
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class Event:
    """threading.Event."""

    def __init__(self, clock: Clock) -> None:
        self._set, self._waiters = False, Waiters(clock)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self, clock: Clock) -> None:
        self._items: deque[Any] = deque()
        self._waiters, self._clock = Waiters(clock), clock

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._waiters.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until_ns = None if timeout is None else self._clock.now_ns + round(timeout * NS)
        while not self._items:
            if not block or (until_ns is not None and self._clock.now_ns >= until_ns):
                raise queue.Empty
            self._waiters.wait(None if until_ns is None else (until_ns - self._clock.now_ns) / NS)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Thread:
    """threading.Thread."""

    def __init__(self, world: Any, target: Callable[..., Any], args: Any = (), kwargs: Any = None) -> None:
        self._world, self._main = world, lambda: target(*args, **(kwargs or {}))
        self._ended = Waiters(world.clock)
        self._thread: LockstepThread | None = None

    def start(self) -> None:
        process = current.get()
        assert process is not None
        self._thread = LockstepThread(self._world.loop, self._world.clock, process, self._run)
        self._world.threads.append(self._thread)

    def _run(self) -> None:
        try:
            self._main()
        finally:
            self._ended.wake()

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else id(self._thread)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.ended

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._ended.wait(timeout)


class ThreadPoolExecutor:
    """concurrent.futures.ThreadPoolExecutor whose work returns nothing."""

    def __init__(self, world: Any, workers: int) -> None:
        self._world, self._workers = world, workers
        self._queued: deque[Callable[[], Any]] = deque()
        self._threads: list[Thread] = []

    def submit(self, work: Callable[[], Any]) -> None:
        self._queued.append(work)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < self._workers:
            self._threads.append(Thread(self._world, self._run))
            self._threads[-1].start()

    def _run(self) -> None:
        while self._queued:
            self._queued.popleft()()

    def shutdown(self, wait: bool = True) -> None:
        for thread in self._threads if wait else ():
            thread.join()


class Timer(Thread):
    """threading.Timer."""

    def __init__(self, world: Any, interval: float, function: Callable[..., Any], *given: Any) -> None:
        self._cancelled = Event(world.clock)
        super().__init__(world, lambda: self._cancelled.wait(interval) or function(*given))

    def cancel(self) -> None:
        self._cancelled.set()


class _Threading:
    """The module `threading` as the product finds it."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Thread(self, *, target: Any, args: Any = (), kwargs: Any = None, **named: Any) -> Any:
        real = current.get() is None
        return (
            threading.Thread(target=target, args=args, **named) if real else Thread(self._world, target, args, kwargs)
        )

    def Timer(self, interval: float, function: Any) -> Any:
        real = current.get() is None
        return threading.Timer(interval, function) if real else Timer(self._world, interval, function)

    def Lock(self) -> Any:
        return threading.Lock() if current.get() is None else Lock(self._world.clock)

    def Condition(self, lock: Any = None) -> Any:
        real = current.get() is None
        return threading.Condition(lock) if real else Condition(self._world.clock, lock or self.Lock())

    def Event(self) -> Any:
        return threading.Event() if current.get() is None else Event(self._world.clock)


class Secrets:
    """The module `secrets`, or a world would not be the same each time."""

    def __init__(self, rng: random.Random) -> None:
        self.token_bytes, self.randbits = rng.randbytes, rng.getrandbits

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)

    def token_hex(self, size: int) -> str:
        return self.token_bytes(size).hex()


class _QueueClass:
    """The class `queue.SimpleQueue`, also with the type of its items: `SimpleQueue[int]`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self) -> Any:
        return queue.SimpleQueue() if current.get() is None else SimpleQueue(self._clock)

    def __getitem__(self, item: Any) -> Any:
        return self


class _Queue:
    """The module `queue` as the product finds it."""

    Empty, Full = queue.Empty, queue.Full

    def __init__(self, clock: Clock) -> None:
        self.SimpleQueue = _QueueClass(clock)


async def _run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do at once what starlette does in a thread."""
    return function(*args)


def patches(world: Any) -> dict[tuple[Any, str], Any]:
    """What modules of the product find under which names while the world runs."""
    rng = random.Random(world.story.seed + 2)
    found: dict[tuple[Any, str], Any] = {
        (os, "urandom"): rng.randbytes,  # which uuid4 calls
        (starlette.concurrency.anyio.to_thread, "run_sync"): _run_sync,
    }
    fakes = {
        "threading": (threading, _Threading(world)),
        "queue": (queue, _Queue(world.clock)),
        "secrets": (secrets, Secrets(rng)),
    }
    for name, module in sorted(sys.modules.items()):
        if name.startswith("tokenyard."):
            for word, (real, fake) in fakes.items():
                if getattr(module, word, None) is real:
                    found[module, word] = fake
    return found
