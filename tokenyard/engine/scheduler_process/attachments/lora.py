"""Reads LoRA adapters in a thread, and unloads them once no request uses them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from tokenyard.base import Cancel, ConfigError, Event, Executor, InvalidRequestError, OpenGate, Request, UnloadAdapter
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.messages import NO_REPLY, RpcRequest
from tokenyard.engine.scheduler_process.attachments.base import Attachment, DeferredReply, VerbHandler
from tokenyard.kv_layout.model_digest import adapter_digest
from tokenyard.scheduler.row_state import Gate
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

SLOW_READ_S = 1.0
"""Reading an adapter for longer is logged."""

POLL_INTERVAL_S = 0.1
"""Interval of looking for unused adapters while too many are in memory."""


class NoAdapters(Attachment):
    """Refuses requests that name an adapter. The API process knows that adapters are off, a decode engine does not."""

    name = "lora"

    def submitted(self, request: Request, now: int) -> Request:
        """Raises InvalidRequestError for a request that names an adapter."""
        if request.lora:
            raise InvalidRequestError("adapters are off here (see --enable-lora)", param="lora_path")
        return request


class LoraLoader(Attachment):
    """The adapters of one scheduler process. All but the reading happens on the event loop's thread.

    At most `max_loaded` (None for any number) are kept in memory, but for those that requests have; of the others the
    least recently used are freed first, and are read again when a request names them. A request whose adapter is being
    read waits behind `Gate.ADAPTER`. deliver: brings calls to the event loop from the reading thread.
    """

    name = "lora"

    def __init__(
        self, executor: Executor, core: Core, deliver: Callable[[RpcRequest], None], max_loaded: int | None
    ) -> None:
        self._executor = executor
        self._core = core
        self._deliver = deliver
        self._max_loaded = max_loaded
        self._folders: dict[str, str] = {}
        # In order of use, the latest last.
        self._ready: dict[str, None] = {}
        self._poll_at_s = 0.0
        self._reading: dict[str, list[DeferredReply]] = {}
        self._waiting: dict[str, list[int]] = {}
        self._unloading: dict[str, list[DeferredReply]] = {}
        self._events: list[Event] = []
        self._jobs: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def verbs(self) -> Mapping[str, VerbHandler]:
        """Load and unload adapters; the reading thread says what it has read."""
        return {"load_adapter": self._load, "unload_adapter": self._unload, "adapter_read": self._read}

    def held_reasons(self) -> Mapping[str, str]:
        """Requests wait for adapters that are being read, or are next."""
        reading = f" (reading {', '.join(self._reading)})" if self._reading else ""
        return {"adapter": f"until an adapter has been read{reading}"}

    def submitted(self, request: Request, now: int) -> Request:
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
            self._start_reading(request.lora)
        self._waiting.setdefault(request.lora, []).extend(_numbers(request))
        return replace(request, awaits_adapter=True)

    def poll(self, now: int) -> Sequence[Event]:
        """Free the adapters that are to be unloaded and that no request has any more, and those beyond the limit; let
        requests go on whose adapters were read.
        """
        events, self._events = self._events, []
        for adapter in [adapter for adapter in self._unloading if adapter not in self._reading]:
            if self._core.uses_adapter(adapter):
                continue
            events.append(UnloadAdapter(adapter))
            self._executor.unload_adapter(adapter)
            self._ready.pop(adapter, None)
            self._folders.pop(adapter, None)
            for reply in self._unloading.pop(adapter):
                reply.set_result(None)
        if self._max_loaded is not None and len(self._ready) > self._max_loaded and time.monotonic() >= self._poll_at_s:
            # All of them may be in use for long, and looking for one that is not takes time of each turn.
            self._poll_at_s = time.monotonic() + POLL_INTERVAL_S
            self._free(len(self._ready) - self._max_loaded)
        return events

    def close(self) -> None:
        """Read nothing more; what is being read is left alone."""
        self._jobs.put(None)

    def _load(self, now: int, adapter: str, folder: str, if_room: bool = False) -> DeferredReply | None:
        """Read an adapter. if_room: only while `max_loaded` allows; else a request that names it has it read."""
        if adapter in self._ready:
            return None
        self._folders[adapter] = folder
        if if_room and self._max_loaded is not None and len(self._ready) + len(self._reading) >= self._max_loaded:
            return None
        return self._start_reading(adapter)

    def _unload(self, now: int, adapter: str) -> DeferredReply:
        """Free an adapter once no request has it."""
        reply = DeferredReply()
        self._unloading.setdefault(adapter, []).append(reply)
        return reply

    def _start_reading(self, adapter: str) -> DeferredReply:
        """Have the thread read an adapter, once for all that ask for it meanwhile."""
        reply = DeferredReply()
        self._reading.setdefault(adapter, []).append(reply)
        if len(self._reading[adapter]) > 1:
            return reply
        if self._reader is None:
            self._reader = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._reader.start()
        self._jobs.put((adapter, self._folders[adapter]))
        return reply

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

    def _read(self, now: int, adapter: str, refusal: str) -> None:
        """The thread has read an adapter, or could not."""
        replies, numbers = self._reading.pop(adapter, []), self._waiting.pop(adapter, [])
        if not refusal:
            self._mark_used(adapter)
            for reply in replies:
                reply.set_result(None)
            self._events += [OpenGate(number, Gate.ADAPTER) for number in numbers]
            return
        logger.error("adapter %s: %s", adapter, refusal)
        for reply in replies:
            reply.set_exception(ConfigError(refusal))
        if numbers:
            self._events.append(Cancel(numbers, refusal, "failed"))

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


def open_lora(
    config: EngineConfig, core: Core, executor: Executor, deliver: Callable[[RpcRequest], None]
) -> LoraLoader | NoAdapters:
    """What loads the adapters, or refuses them if they are off."""
    if not config.scheduler.enable_lora:
        return NoAdapters()
    return LoraLoader(executor, core, deliver, config.max_loaded_loras)
