"""The scheduler process: one scheduler, one executor, one loop.

It runs as `python -m tokenyard.engine.processes.scheduler_process`.
"""

import gc
import importlib
import logging
import threading
from typing import cast

import zmq

from tokenyard.base import NS_PER_MS, ConfigError, Executor, InvalidRequestError
from tokenyard.engine.processes.child import (
    Inbox,
    ReportReady,
    die_with_parent,
    end_with_parent,
    run_child,
    yield_cores,
)
from tokenyard.engine.processes.config import ChildReport, ChildTask, EngineConfig
from tokenyard.engine.processes.driver import Driver
from tokenyard.engine.processes.event_loop import event_loop_normal, event_loop_overlap
from tokenyard.engine.processes.ipc import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Endpoints,
    ProtocolError,
    pull_socket,
    push_socket,
)
from tokenyard.engine.processes.messages import FromScheduler, Heartbeat, ToScheduler
from tokenyard.engine.text.tokenizer_files import load_tokenizer
from tokenyard.engine.watch.grammars import GrammarCompiler
from tokenyard.engine.watch.kv_events import open_kv_events
from tokenyard.engine.watch.liveness import HeartbeatThread, LoopState
from tokenyard.engine.watch.lookahead_client import LookaheadClient
from tokenyard.engine.watch.priority_updates import create_priority_updates
from tokenyard.engine.watch.recording import build_core, open_tape
from tokenyard.engine.watch.step_log import StepLog
from tokenyard.engine.watch.watchdog import Watchdog

logger = logging.getLogger(__name__)

EXECUTORS = {"torch": "tokenyard.executor.load", "mock": "tokenyard.executor.mock"}
"""Module of each executor; it has a function `load_executor(model_path, **options)`."""


def load_executor(config: EngineConfig) -> Executor:
    """Load the model. Raises ConfigError for an unknown executor or option, and what its loader raises."""
    module = EXECUTORS.get(config.executor)
    if module is None:
        raise ConfigError(f"no executor {config.executor!r}; there are: {', '.join(EXECUTORS)}")
    try:
        loader = importlib.import_module(module).load_executor
    except ModuleNotFoundError as error:
        raise ConfigError(f"the executor {config.executor!r} needs the package {error.name}; install it") from error
    return cast(Executor, loader(config.model_path, **config.executor_options))


class SocketPort:
    """The scheduler's messages over ZeroMQ."""

    def __init__(self, inbox: Inbox, out: zmq.Socket[bytes], source: int) -> None:
        self._inbox = inbox
        self._out = out
        self._source = source

    def receive(self, timeout_ns: int) -> list[ToScheduler] | None:
        """Return what has come, waiting up to `timeout_ns` for a first message; None means stop."""
        frames = self._inbox.wait(-(-timeout_ns // NS_PER_MS))
        if frames is None:
            return None
        messages = []
        for frame in frames:
            try:
                messages.append(TO_SCHEDULER.decode(frame)[0])
            except ProtocolError as error:
                logger.error("dropped a message: %s", error)
        return messages

    def send(self, message: FromScheduler) -> None:
        """Send one message to the text side."""
        self._out.send(FROM_SCHEDULER.encode(message, self._source))


class LockedSender:
    """Sends messages to the scheduler's own inbox from any thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()

    def send(self, message: ToScheduler) -> None:
        """Send one message."""
        with self._lock:
            self._socket.send(TO_SCHEDULER.encode(message))


def tokenizer_text(config: EngineConfig) -> str:
    """The model's tokenizer.json as it is used here. Raises InvalidRequestError where there is none."""
    if config.skip_tokenizer_init:
        raise InvalidRequestError("this server has no tokenizer, which grammars need", code="unsupported")
    return str(load_tokenizer(config.tokenizer_path or config.model_path).to_str())


def run_scheduler(task: ChildTask, report: ReportReady) -> None:
    """Load the model, say that all is ready, and run the event loop until told to stop."""
    config = task.config
    if not config.skip_tokenizer_init:
        # The device must come free even if a step hangs; the detokenizer is left to remove the sockets.
        die_with_parent()
        end_with_parent(task)
    tape, kv_events = open_tape(config, task.rank), open_kv_events(config, task.rank)
    executor = load_executor(config)
    if executor.info.device == "cpu":
        yield_cores()
    core = build_core(config, executor.info, tape)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = Endpoints(task.socket_directory)
    out_address = endpoints.api if config.skip_tokenizer_init else endpoints.detokenizer
    inbox = Inbox(pull_socket(context, endpoints.scheduler(task.source)))
    port = SocketPort(inbox, push_socket(context, out_address), task.source)
    state = LoopState()
    hook = create_priority_updates(config.priority_function, core)
    log = StepLog(config.decode_log_interval)
    lookahead = LookaheadClient(core, config.scheduler_settings(executor.info))
    own_inbox = LockedSender(push_socket(context, endpoints.scheduler(task.source)))
    grammars = GrammarCompiler(executor, own_inbox.send, lambda: tokenizer_text(config))
    driver = Driver(
        core,
        executor,
        port,
        log=log,
        state=state,
        hook=hook,
        lookahead=lookahead,
        kv_events=kv_events,
        policy_note=task.policy_note,
        rank=task.rank,
        grammars=grammars,
    )
    # Sockets belong to one thread, so the heartbeat has its own.
    beats = push_socket(context, out_address)
    watchdog = Watchdog(config.watchdog_timeout_s, core, report, tape.flush if tape is not None else lambda: None)

    def send_beat(beat: Heartbeat) -> None:
        beats.send(FROM_SCHEDULER.encode(beat, task.source))
        watchdog.check(beat)

    heartbeat = HeartbeatThread(state, send_beat, lambda: end_with_parent(task))
    # What was loaded so far lives for ever; a walk of the collector over all of it would hold up several steps.
    gc.collect()
    gc.freeze()
    report(ChildReport(info=executor.info))
    heartbeat.start()
    try:
        (event_loop_overlap if config.overlaps(executor.info) else event_loop_normal)(driver)
    finally:
        heartbeat.close()
        grammars.close()
        lookahead.close()
        if tape is not None:
            tape.close()
        executor.close()
        if kv_events is not None:
            kv_events.close()
        context.destroy(linger=200)


if __name__ == "__main__":
    run_child("scheduler", run_scheduler)
