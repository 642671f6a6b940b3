"""An asyncio event loop in virtual time whose connections go over the world's network.

The code above runs unchanged: tasks, timers, protocols and transports. Each callback belongs to the process in whose
context it was scheduled; those of a process that has ended are dropped, as nothing runs after a kill -9.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import socket
from typing import Any

from tests.world.clock import NS, Clock
from tests.world.network import Network, Process

current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _Call:
    """Something that is called now or later, in a process; None for what belongs to no process. A handle of asyncio's,
    without what worlds do not need, as they make thousands for each second that they simulate.
    """

    __slots__ = ("_args", "_callback", "_context", "_loop", "_when", "is_cancelled", "process")

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: contextvars.Context | None) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = contextvars.copy_context() if context is None else context
        self.is_cancelled = False
        self.process = self._context.get(current)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        """Call it; what it raises goes to the loop's handler."""
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            message = f"Exception in callback {self._callback!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})


class WorldLoop(asyncio.BaseEventLoop):
    """The event loop of all processes of a world."""

    def __init__(self, clock: Clock, network: Network) -> None:
        super().__init__()
        self._clock = clock
        self._network = network
        self._due: list[tuple[int, int, _Call]] = []
        self._order = itertools.count()
        self.failures: list[str] = []
        self.preemption: Any = None
        """Where threads lose the processor besides waits (`lockstep.Preemption`); None for nowhere."""

        self.over = False
        """Whether the world has ended: what is scheduled then never runs."""

        self.tasks: dict[asyncio.Task[Any], Process | None] = {}
        """All that are not done, with their processes, so that those of an ended process are not collected, which would
        run their `finally` blocks. What is done is let go at once: parts of the server count what is still referenced.
        """

        self._no_process = contextvars.Context()
        self.set_exception_handler(self._failed)
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        return self._clock.now_ns / NS

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.over:
            return
        error = context.get("exception")
        self.failures.append(f"{context['message']}: {error!r}" if error else context["message"])

    def _new_task(self, loop: Any, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **named)
        context = named.get("context")
        self.tasks[task] = current.get() if context is None else context.get(current)
        task.add_done_callback(lambda done: self.tasks.pop(done, None), context=self._no_process)
        return task

    def end(self) -> None:
        """End the world: close what waits, without running anything more."""
        self.over = True
        for task in list(self.tasks):
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
        self.tasks.clear()

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, time passes."""
        ready, due = self._ready, self._due
        if not ready:
            while due and due[0][2].is_cancelled:
                heapq.heappop(due)
            if not due:
                raise AssertionError("the world is stuck: nothing is scheduled")
            self._clock.advance_to(due[0][0])
        now_ns = self._clock.now_ns
        while due and due[0][0] <= now_ns:
            ready.append(heapq.heappop(due)[2])
        for _ in range(len(ready)):
            call = ready.popleft()
            process = call.process
            if call.is_cancelled or not (process is None or process.alive or process.stopped):
                continue
            if process is not None and process.stopped:
                process.held.append(call)
            else:
                call.run()

    def resume(self, process: Process) -> None:
        """SIGCONT: what was to run while the process was stopped runs now."""
        process.stopped = False
        self._ready.extend(process.held)
        process.held.clear()

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> _Call:
        call = _Call(0.0, callback, args, self, context)
        if not self.over:
            self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> _Call:
        call = _Call(when, callback, args, self, context)
        if not self.over:
            due = math.ceil(when * NS)
            # Or a float that is rounded up would have its owner wait for it again, at the same time.
            heapq.heappush(self._due, (due if due / NS >= when else due + 1, next(self._order), call))
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> _Call:
        return self.call_at(self._clock.now_ns / NS + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run the work at once: threads of a pool would depend on real time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 0, "", (host, port))]

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        process = current.get()
        assert process is not None
        process.signals[sig] = lambda: self.call_soon(callback, *args)

    async def create_server(self, protocol_factory: Any, *unused: Any, sock: Any = None, **options: Any) -> Any:
        process = current.get()
        assert process is not None
        return self._network.listen(process, sock.getsockname()[1], protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        process = current.get()
        assert process is not None
        return await self._network.connect(process, (host, port), protocol_factory)
