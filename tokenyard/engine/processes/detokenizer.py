"""The detokenizer process: token ids in, text out (`python -m tokenyard.engine.processes.detokenizer`)."""

import logging

import zmq

from tokenyard.base import TokenBatch
from tokenyard.engine.processes.child import Inbox, ReportReady, run_child
from tokenyard.engine.processes.config import ChildReport, ChildTask
from tokenyard.engine.processes.ipc import FROM_SCHEDULER, TO_API, TO_SCHEDULER, ProtocolError, pull_socket, push_socket
from tokenyard.engine.processes.messages import FromScheduler
from tokenyard.engine.text.text_side import TextAssembler
from tokenyard.engine.text.tokenizer_files import load_tokenizer

logger = logging.getLogger(__name__)

WAIT_MS = 60_000


def run_detokenizer(task: ChildTask, report: ReportReady) -> None:
    """Turn the scheduler's messages into the API's until told to stop."""
    assembler = TextAssembler(load_tokenizer(task.config.tokenizer_path or task.config.model_path))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Inbox(pull_socket(context, task.detokenizer))
    to_api, to_scheduler = push_socket(context, task.api), push_socket(context, task.scheduler)
    report(ChildReport())
    while (frames := inbox.wait(WAIT_MS)) is not None:
        for frame in frames:
            try:
                _pass_on(FROM_SCHEDULER.decode(frame), assembler, to_api, to_scheduler)
            except ProtocolError as error:
                logger.error("dropped a message: %s", error)
    context.destroy(linger=200)


def _pass_on(
    message: FromScheduler,
    assembler: TextAssembler,
    to_api: zmq.Socket[bytes],
    to_scheduler: zmq.Socket[bytes],
) -> None:
    if not isinstance(message, TokenBatch):
        to_api.send(TO_API.encode(message))
        return
    batch, stops = assembler.step(message)
    for stop in stops:
        to_scheduler.send(TO_SCHEDULER.encode(stop))
    if not batch.empty:
        to_api.send(TO_API.encode(batch))


if __name__ == "__main__":
    run_child("detokenizer", run_detokenizer)
