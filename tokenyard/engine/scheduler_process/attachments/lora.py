"""Reads LoRA adapters in a thread, and unloads them once no request uses them."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from tokenyard.base import ConfigError, Executor, InvalidRequestError, OpenGate, Request, UnloadAdapter
from tokenyard.base.events import Cancel
from tokenyard.engine.processes.messages import NO_REPLY, RpcReply, RpcRequest
from tokenyard.kv_layout.model_digest import adapter_digest
from tokenyard.scheduler.row_state import Gate
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

LORA_VERBS = ("load_adapter", "unload_adapter", "adapter_read")
"""What this does of the calls to a scheduler process. The last one is the reading thread's own."""

SLOW_READ_S = 1.0
"""Reading an adapter for longer is logged."""

POLL_INTERVAL_S = 0.1
"""Interval of looking for unused adapters while too many are in memory."""


class LoraLoader:
    """The adapters of one scheduler process. All but the reading happens on the event loop's thread.

    At most `max_loaded` (None for any number) are kept in memory, but for those that requests have; of the others the
    least recently used are freed first, and are read again when a request names them. A request whose adapter is being
    read waits behind `Gate.ADAPTER`. deliver: brings calls to the event loop from the reading thread; reply: answers
    calls.
    """

    def __init__(
        self,
        executor: Executor,
        core: Core,
        deliver: Callable[[RpcRequest], None],
        reply: Callable[[RpcReply], None],
        max_loaded: int | None,
    ) -> None:
        self._executor = executor
        self._core = core
        self._deliver = deliver
        self._reply = reply
        self._max_loaded = max_loaded
        self._folders: dict[str, str] = {}
        # In order of use, the latest last.
        self._ready: dict[str, None] = {}
        self._poll_at_s = 0.0
        self._reading: dict[str, list[int]] = {}
        self._waiting: dict[str, list[int]] = {}
        self._unloading: dict[str, list[int]] = {}
        self._jobs: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    @property
    def reading(self) -> list[str]:
        """The adapters that are being read, or are next."""
        return list(self._reading)

    def call(self, call: RpcRequest) -> None:
        """Begin with what a call asks for; the reply may come later."""
        adapter = str(call.arguments["adapter"])
        if call.verb == "load_adapter":
            self._load(call.call_id, adapter, str(call.arguments["folder"]))
        elif call.verb == "unload_adapter":
            self._unloading.setdefault(adapter, []).append(call.call_id)
        else:
            self._read(adapter, str(call.arguments["refusal"]))

    def submitted(self, request: Request) -> Request:
        """A request arrives; returns it for the scheduler. Raises InvalidRequestError for an adapter that
        was never loaded, or is not any more.
        """
        if not request.lora:
            return request
        if request.lora in self._ready:
            self._mark_used(request.lora)
            return request
        if request.lora not in self._folders:
            raise InvalidRequestError(f"the adapter {request.lora!r} is not loaded here", param="lora_path")
        if request.lora not in self._reading:
            self._start_reading(request.lora, NO_REPLY)
        self._waiting.setdefault(request.lora, []).extend(_numbers(request))
        return replace(request, awaits_adapter=True)

    def poll(self) -> None:
        """Free the adapters that are to be dropped and that no request has any more, and those beyond the limit."""
        for adapter in [adapter for adapter in self._unloading if adapter not in self._reading]:
            if self._core.uses_adapter(adapter):
                continue
            self._core.apply(UnloadAdapter(adapter), time.monotonic_ns())
            self._executor.unload_adapter(adapter)
            self._ready.pop(adapter, None)
            self._folders.pop(adapter, None)
            for call_id in self._unloading.pop(adapter):
                self._reply(RpcReply(call_id))
        if self._max_loaded is not None and len(self._ready) > self._max_loaded and time.monotonic() >= self._poll_at_s:
            # All of them may be in use for long, and looking for one that is not takes time of each turn.
            self._poll_at_s = time.monotonic() + POLL_INTERVAL_S
            self._free(len(self._ready) - self._max_loaded)

    def close(self) -> None:
        """Read nothing more; what is being read is left alone."""
        self._jobs.put(None)

    def _load(self, call_id: int, adapter: str, folder: str) -> None:
        if adapter in self._ready:
            self._reply(RpcReply(call_id))
            return
        self._folders[adapter] = folder
        if (
            call_id == NO_REPLY
            and self._max_loaded is not None
            and len(self._ready) + len(self._reading) >= self._max_loaded
        ):
            # It was loaded before, into a process that has ended; requests that name it have it read.
            return
        self._start_reading(adapter, call_id)

    def _start_reading(self, adapter: str, call_id: int) -> None:
        """Have the thread read an adapter, once for all that ask for it meanwhile."""
        self._reading.setdefault(adapter, []).append(call_id)
        if len(self._reading[adapter]) > 1:
            return
        if self._reader is None:
            self._reader = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._reader.start()
        self._jobs.put((adapter, self._folders[adapter]))

    def _mark_used(self, adapter: str) -> None:
        """Note that an adapter is used now."""
        self._ready.pop(adapter, None)
        self._ready[adapter] = None

    def _free(self, count: int) -> None:
        """Free up to `count` adapters that no request has, the least recently used first. What lies in slots and in the
        prefix cache is not theirs alone and stays.
        """
        unused = (adapter for adapter in self._ready if not self._core.uses_adapter(adapter))
        for adapter in list(islice(unused, count)):
            logger.info("adapter %s is freed (--max-loaded-loras), and read again when a request names it", adapter)
            del self._ready[adapter]
            self._executor.unload_adapter(adapter)

    def _read(self, adapter: str, refusal: str) -> None:
        """The thread has read an adapter, or could not."""
        if not refusal:
            self._mark_used(adapter)
        for call_id in self._reading.pop(adapter, ()):
            if call_id != NO_REPLY:
                self._reply(RpcReply(call_id, refusal=refusal))
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
            begin_s = time.monotonic()
            try:
                self._executor.load_adapter(adapter, folder)
                if not adapter.endswith(f"#{adapter_digest(folder)}"):
                    self._executor.unload_adapter(adapter)
                    refusal = f"the adapter in {folder} has changed since it was loaded; unload it and load it again"
            except ConfigError as error:
                refusal = error.message
            except Exception as error:
                logger.exception("an adapter could not be read")
                refusal = f"the adapter in {folder} could not be read: {error}"
            seconds = time.monotonic() - begin_s
            if seconds > SLOW_READ_S:
                logger.warning(
                    "reading adapter %s from %s took %.1f s; requests for it waited", adapter, folder, seconds
                )
            self._deliver(RpcRequest(NO_REPLY, "adapter_read", {"adapter": adapter, "refusal": refusal}))


def _numbers(request: Request) -> range:
    return range(request.number, request.number + request.sampling.n)
