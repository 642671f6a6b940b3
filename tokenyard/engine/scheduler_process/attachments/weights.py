"""Weights that change while the engine runs: they are read in a thread, and put in use between two steps."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tokenyard.base import (
    ConfigError,
    Event,
    Executor,
    Pause,
    Request,
    Resume,
    WeightGroup,
    WeightSource,
    WeightsUpdated,
)
from tokenyard.base.request import weight_version, weights_key
from tokenyard.engine.processes.messages import NO_REPLY, RpcRequest
from tokenyard.engine.scheduler_process.attachments.base import Attachment, DeferredReply, VerbHandler
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)


class WeightUpdater(Attachment):
    """The weights of one scheduler process.

    They change in two phases, so that all ranks of an engine change them or none does: `prepare_weights` reads and
    checks, `use_weights` puts in use what was prepared, once no step is in flight. A process that replaces one that
    has ended gets `restore_weights`, or `await_weights` where nothing can restore them: it plans no step before the
    engine's weights are there.

    deliver: brings calls to the event loop from the reading thread.
    rank: the data-parallel rank.
    """

    name = "weights"

    def __init__(self, executor: Executor, core: Core, deliver: Callable[[RpcRequest], None], rank: int = 0) -> None:
        self._rank = rank
        self._executor = executor
        self._core = core
        self._deliver = deliver
        self._digest: str | None = None
        self._reading: DeferredReply | None = None
        self._busy = False
        self._restoring = ""
        self._awaited = False
        self._update: WeightsUpdated | None = None
        self._reply = DeferredReply()
        self._released: set[str] = set()
        self._calls = 0
        self._replies: dict[int, tuple[DeferredReply, Callable[[], None]]] = {}
        self._holding = False
        """Whether the engine is paused until the weights are in use."""

        self._held_by_engine = False
        self._drained: DeferredReply | None = None

    def verbs(self) -> Mapping[str, VerbHandler]:
        """Prepare, use, drop and restore weights; the reading thread says what it has read."""
        return {
            "prepare_weights": self._prepare,
            "weights_read": self._read,
            "use_weights": self._use,
            "drop_weights": self._drop,
            "hold_steps": self._hold_steps,
            "end_hold": self._end_engine_hold,
            "restore_weights": self._restore,
            "await_weights": self._await,
            "weight": self._weight,
            "join_weight_group": self._join_group,
            "receive_weights": self._receive,
            "leave_weight_group": self._leave_group,
            "weights_call_done": self._call_done,
            "release_memory": self._release,
            "resume_memory": self._resume_memory,
        }

    def submitted(self, request: Request, now: int) -> Request:
        """Name the weights that compute a request, before its KV is looked for anywhere."""
        weights = self._core.weights
        return replace(request, weights=weights) if request.weights != weights else request

    def poll(self, now: int) -> Sequence[Event]:
        """Put weights in use. Plans in flight end first, while no other starts."""
        waiting = self._update is not None or self._drained is not None
        if waiting and self._core.in_flight:
            return self._hold(now)
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        if self._update is None:
            return self._hold(now) if self._restoring or self._must_hold else self._end_hold()
        update, self._update, reply = self._update, None, self._reply
        events: list[Event] = [update]
        try:
            self._executor.swap_weights()
        except Exception as error:
            logger.exception("the new weights could not be used; the old ones stay")
            reply.set_exception(ConfigError(f"the new weights could not be used: {error}"))
            events = []
        else:
            self._released.discard("weights")
            self._awaited = False
            logger.info("weights of version %s are in use", weight_version(update.version))
            reply.set_result(None)
        return events if self._must_hold else events + self._end_hold()

    @property
    def _must_hold(self) -> bool:
        """Whether no step may be planned, also once an update has ended."""
        return bool(self._released or self._awaited or self._held_by_engine)

    def _hold_steps(self, now: int) -> DeferredReply:
        """Plan no step until `end_hold`; the reply comes once none is in flight."""
        self._held_by_engine, self._drained = True, DeferredReply()
        return self._drained

    def _end_engine_hold(self, now: int) -> None:
        self._held_by_engine = False

    def describe(self, now: int) -> Mapping[str, Any]:
        """The version in use."""
        return {"weight_version": weight_version(self._core.weights)} if self._core.weights else {}

    def _hold(self, now: int) -> Sequence[Event]:
        """Plan no further step, unless a client has paused the engine already."""
        if self._core.snapshot(now).paused:
            return ()  # also once a client has resumed the engine meanwhile, this is a pause of ours again
        self._holding = True
        return [Pause("in_place")]

    def _end_hold(self) -> list[Event]:
        held, self._holding = self._holding, False
        return [Resume()] if held else []

    def _prepare(
        self, now: int, folder: str, files: list[str], received: bool = False, draft_folder: str = ""
    ) -> DeferredReply:
        """Read weights; the reply is their digest. Refused while others are read."""
        if self._busy:
            raise ConfigError("other weights are being read; send these once that has ended")
        self._digest, self._reading, self._busy = None, DeferredReply(), True
        source = WeightSource(folder, tuple(files), received, draft_folder)
        threading.Thread(target=self._work, args=(source,), name="weights", daemon=True).start()
        return self._reading

    def _restore(self, now: int, folder: str, version: str, draft_folder: str = "") -> None:
        """Go on with the weights of an engine whose process has ended."""
        self._restoring = version
        self._prepare(now, folder, [], draft_folder=draft_folder)

    def _await(self, now: int) -> None:
        """Plan no step with the weights of this process; its engine has others, which a client has to send again."""
        self._awaited = True

    def _read(self, now: int, digest: str, refusal: str) -> None:
        """The thread has read weights, or could not."""
        reply, self._reading, self._busy = self._reading, None, False
        restored, self._restoring = self._restoring, ""
        # Until they are in use: what this process has are other weights than its engine's.
        self._awaited |= bool(restored)
        if reply is None:  # nobody wants them any more
            self._executor.drop_weights()
        elif refusal:
            what = "no step is planned until weights are sent again" if restored else "weights were not changed"
            logger.error("%s: %s", what, refusal)
            reply.set_exception(ConfigError(refusal))
        else:
            self._digest = digest
            reply.set_result(digest)
            if restored:
                self._use(now, restored, flush=True)

    def _use(self, now: int, version: str, flush: bool) -> DeferredReply:
        """Use what was prepared from the next step on. flush: whether KV of other weights is evicted."""
        if self._digest is None:
            raise ConfigError("no weights are ready to be used; send them again")
        self._update = WeightsUpdated(weights_key(version, self._digest), flush)
        self._digest, self._reply = None, DeferredReply()
        return self._reply

    def _drop(self, now: int) -> None:
        """Free what was prepared, unless that are the weights that this process is to go on with."""
        if self._restoring:
            return
        self._reading = self._digest = None
        self._executor.drop_weights()

    def _join_group(
        self, now: int, group: str, address: str, port: int, rank_offset: int, size: int, backend: str
    ) -> DeferredReply:
        joined = WeightGroup(group, address, port, rank_offset, self._rank, size, backend)
        return self._in_thread(partial(self._executor.join_weight_group, joined))

    def _receive(self, now: int, group: str, tensors: list[list[Any]]) -> DeferredReply:
        named = [(tensor, dtype, shape) for tensor, dtype, shape in tensors]
        return self._in_thread(partial(self._executor.receive_weights, group, named))

    def _leave_group(self, now: int, group: str) -> DeferredReply:
        return self._in_thread(partial(self._executor.leave_weight_group, group))

    def _weight(self, now: int, tensor: str, rows: int) -> DeferredReply:
        return self._in_thread(partial(self._executor.weight, tensor, rows))

    def _release(self, now: int, tags: list[str]) -> None:
        """Give memory back. No step is planned until all of it is resumed."""
        if self._core.has_work:
            raise ConfigError("requests are open; end them first, for example with /pause_generation and mode abort")
        wanted = set(tags) - self._released
        if not self._core.flush(now):
            raise ConfigError("KV is being stored or read by another engine; try again")
        self._executor.release_memory(weights="weights" in wanted, kv_cache="kv_cache" in wanted)
        self._released |= wanted

    def _resume_memory(self, now: int, tags: list[str]) -> DeferredReply | None:
        """Take memory again; the weights are read once more."""
        wanted = set(tags) & self._released
        if "weights" not in wanted:
            self._released -= wanted
            return None

        def read() -> None:
            self._executor.swap_weights()
            self._released -= wanted

        return self._in_thread(partial(self._executor.prepare_weights, WeightSource()), read)

    def _in_thread(self, work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> DeferredReply:
        """Have a thread do what may take long, and do `then` in the loop; the reply is what the thread returns."""
        number = self._calls = self._calls + 1
        reply = DeferredReply()
        self._replies[number] = reply, then

        def run() -> None:
            value, refusal = None, ""
            try:
                value = work()
            except ConfigError as error:
                refusal = error.message
            except Exception as error:
                logger.exception("a call about weights failed")
                refusal = f"{type(error).__name__}: {error}"
            done = {"number": number, "value": value, "refusal": refusal}
            self._deliver(RpcRequest(NO_REPLY, "weights_call_done", done))

        threading.Thread(target=run, name="weights", daemon=True).start()
        return reply

    def _call_done(self, now: int, number: int, value: Any, refusal: str) -> None:
        """A thread has ended."""
        reply, then = self._replies.pop(number)
        if refusal:
            reply.set_exception(ConfigError(refusal))
            return
        try:
            then()
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(value)

    def _work(self, source: WeightSource) -> None:
        digest = refusal = ""
        begin_s = time.monotonic()
        try:
            digest = self._executor.prepare_weights(source)
            logger.info("read new weights in %.1f s", time.monotonic() - begin_s)
        except ConfigError as error:
            refusal = error.message
        except Exception as error:
            logger.exception("new weights could not be read")
            refusal = f"the weights could not be read: {error}"
        self._deliver(RpcRequest(NO_REPLY, "weights_read", {"digest": digest, "refusal": refusal}))
