"""Answers the calls to a scheduler process."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from tokenyard.base import ConfigError
from tokenyard.engine.processes.messages import NO_REPLY, RpcReply, RpcRequest
from tokenyard.engine.scheduler_process.attachments.base import AttachmentError, DeferredReply, VerbHandler

logger = logging.getLogger(__name__)


class RpcHandlers:
    """The handlers of calls by verb; `send` sends replies. An exception becomes a refusal."""

    def __init__(self, handlers: Mapping[str, VerbHandler], send: Callable[[RpcReply], None]) -> None:
        self._handlers = handlers
        self._send = send

    def answer(self, call: RpcRequest, now: int) -> None:
        """Run a call and send its reply, which may be later. Raises AttachmentError."""
        reply = DeferredReply()
        try:
            if call.verb not in self._handlers:
                raise ConfigError(f"{call.verb}: the feature is off in this engine")
            result = self._handlers[call.verb](now, **call.arguments)
        except AttachmentError:
            raise
        except Exception as error:
            reply.set_exception(error)
        else:
            if isinstance(result, Future):
                reply = result
            else:
                reply.set_result(result)
        reply.add_done_callback(partial(self._reply, call))

    def _reply(self, call: RpcRequest, reply: DeferredReply) -> None:
        """Send what a call returned, or why it was refused."""
        error, refusal = reply.exception(), ""
        if isinstance(error, ConfigError):
            refusal = error.message
        elif error is not None:
            logger.error("the call %s failed", call.verb, exc_info=error)
            refusal = f"{call.verb} failed: {error}"
        if call.call_id != NO_REPLY:
            self._send(RpcReply(call.call_id, None if error is not None else reply.result(), refusal))
