"""Reads LoRA adapters beside the event loop, and frees them once no request has them any more."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tokenyard.base import ConfigError, Executor, ForgetAdapter, InvalidRequestError, OpenGate, Request
from tokenyard.base.events import Cancel
from tokenyard.engine.processes.messages import UNASKED, Call, Reply
from tokenyard.scheduler.lifecycle import Gate
from tokenyard.tape.recorder import Core
from tokenyard.transfer.identity import adapter_digest

logger = logging.getLogger(__name__)

VERBS = ("load_adapter", "drop_adapter", "adapter_read")
"""What this does of the calls to a scheduler process. The last one is the reading thread's own."""


class AdapterLoader:
    """The adapters of one scheduler process. All but the reading happens on the event loop's thread.

    A request whose adapter is still being read waits behind `Gate.ADAPTER`: after a scheduler process was started
    again, adapters are read again while requests come. deliver: brings calls to the event loop from the reading thread;
    reply: answers calls.
    """

    def __init__(
        self, executor: Executor, core: Core, deliver: Callable[[Call], None], reply: Callable[[Reply], None]
    ) -> None:
        self._executor = executor
        self._core = core
        self._deliver = deliver
        self._reply = reply
        self._ready: set[str] = set()
        self._reading: dict[str, list[int]] = {}
        self._waiting: dict[str, list[int]] = {}
        self._leaving: dict[str, list[int]] = {}
        self._jobs: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def call(self, call: Call) -> None:
        """Begin with what a call asks for; the reply may come later."""
        adapter = str(call.arguments["adapter"])
        if call.verb == "load_adapter":
            self._load(call.call_id, adapter, str(call.arguments["folder"]))
        elif call.verb == "drop_adapter":
            self._leaving.setdefault(adapter, []).append(call.call_id)
        else:
            self._read(adapter, str(call.arguments["refusal"]))

    def submitted(self, request: Request) -> Request:
        """A request arrives; returns it as the scheduler shall see it. Raises InvalidRequestError for an adapter that
        was never loaded, or is not any more.
        """
        if not request.lora or request.lora in self._ready:
            return request
        if request.lora not in self._reading:
            raise InvalidRequestError(f"the adapter {request.lora!r} is not loaded here", param="lora_path")
        self._waiting.setdefault(request.lora, []).extend(_numbers(request))
        return replace(request, awaits_adapter=True)

    def poll(self) -> None:
        """Free the adapters that are to be dropped and that no request has any more."""
        for adapter in [adapter for adapter in self._leaving if adapter not in self._reading]:
            if self._core.uses_adapter(adapter):
                continue
            self._core.apply(ForgetAdapter(adapter), time.monotonic_ns())
            self._executor.drop_adapter(adapter)
            self._ready.discard(adapter)
            for call_id in self._leaving.pop(adapter):
                self._reply(Reply(call_id))

    def close(self) -> None:
        """Read nothing more; what is being read is left alone."""
        self._jobs.put(None)

    def _load(self, call_id: int, adapter: str, folder: str) -> None:
        if adapter in self._ready:
            self._reply(Reply(call_id))
            return
        self._reading.setdefault(adapter, []).append(call_id)
        if len(self._reading[adapter]) > 1:
            return
        if self._reader is None:
            self._reader = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._reader.start()
        self._jobs.put((adapter, folder))

    def _read(self, adapter: str, refusal: str) -> None:
        """The thread has read an adapter, or could not."""
        if not refusal:
            self._ready.add(adapter)
        for call_id in self._reading.pop(adapter, ()):
            if call_id != UNASKED:
                self._reply(Reply(call_id, refusal=refusal))
        numbers, now = self._waiting.pop(adapter, []), time.monotonic_ns()
        if refusal:
            logger.error("adapter %s: %s", adapter, refusal)
        if refusal and numbers:
            self._core.apply(Cancel(numbers, refusal, "failed"), now)
            return
        for number in numbers:
            self._core.apply(OpenGate(number, Gate.ADAPTER), now)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            adapter, folder = job
            refusal = ""
            try:
                self._executor.load_adapter(adapter, folder)
                if not adapter.endswith(f"#{adapter_digest(folder)}"):
                    self._executor.drop_adapter(adapter)
                    refusal = f"the adapter in {folder} has changed since it was loaded; unload it and load it again"
            except ConfigError as error:
                refusal = error.message
            except Exception as error:
                logger.exception("an adapter could not be read")
                refusal = f"the adapter in {folder} could not be read: {error}"
            self._deliver(Call(UNASKED, "adapter_read", {"adapter": adapter, "refusal": refusal}))


def _numbers(request: Request) -> range:
    return range(request.number, request.number + request.sampling.n)
