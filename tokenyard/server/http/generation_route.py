"""The ASGI endpoint of all generating routes."""

import logging
from collections.abc import Awaitable, Callable

from tokenyard.base import InvalidRequestError, TokenyardError
from tokenyard.base.fleet_headers import AGE_HEADER, TENANT_HEADER, read_age_ns
from tokenyard.server.http.api_keys import TENANT
from tokenyard.server.http.dialects import dialect_of
from tokenyard.server.http.errors import check_encoding, internal_error
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.http.streaming import (
    DIRECT,
    ClientGoneError,
    HttpResponse,
    Receive,
    Scope,
    Send,
    read_body,
    while_connected,
)
from tokenyard.server.http.turns import end_turn
from tokenyard.server.state import ServerState

log = logging.getLogger(__name__)

Handler = Callable[[RequestContext], Awaitable[None]]


class GenerationRoute:
    """Reads the body, runs the handler, and cancels it when the client disconnects."""

    def __init__(self, state: ServerState, handler: Handler) -> None:
        self._state = state
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id")
        same_id = {"x-request-id": request_id} if request_id else None
        reply = HttpResponse(send, same_id, dialect_of(scope["path"]), scope.get(DIRECT))
        try:
            check_encoding(headers.get("content-encoding", ""))
            body = await read_body(receive, self._state.options.max_body_bytes)
            manager = self._state.admit()
        except ClientGoneError:
            return
        except TokenyardError as error:
            await reply.fail(error)
            return
        tenant, age_ns = scope.get(TENANT, ""), 0
        if not tenant:
            # A request with a tenant's key comes from a client, whose word on this does not count.
            tenant, age_ns = headers.get(TENANT_HEADER, ""), read_age_ns(headers.get(AGE_HEADER, ""))
        call = RequestContext(self._state, manager, body, headers, reply, tenant, age_ns=age_ns)
        await while_connected(receive, self._run(call))

    async def _run(self, call: RequestContext) -> None:
        """Run the handler and answer with an error if it fails."""
        try:
            await self._handler(call)
        except TokenyardError as error:
            await call.reply.fail(error)
        except RecursionError:
            await call.reply.fail(InvalidRequestError("a value in the body is nested too deeply"))
        except Exception:
            log.exception("a request failed with an internal error")
            await call.reply.fail(internal_error())
        finally:
            end_turn(call)
