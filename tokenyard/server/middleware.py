"""Who may call what. Pure ASGI, so that nothing stands between a stream and its socket."""

import hmac

from starlette.types import ASGIApp

from tokenyard.server.errors import HttpError
from tokenyard.server.stream import Receive, Reply, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/get_server_info",
        "/server_info",
        "/v1/scheduler",
    }
)
ADMIN_PREFIX = "/v1/requests/"
"""Whoever may change a request by its id, or read about it, may do so for everybody's."""


class Authentication:
    """Asks for the API key on every path but probes and metrics, and for the admin key on admin paths.

    With only an API key, that one opens admin paths as well; with only an admin key, the other paths are open.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, admin_api_key: str) -> None:
        self.app = app
        self._api_key = api_key.encode()
        self._admin_api_key = (admin_api_key or api_key).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer 401."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._allowed(scope):
            error = HttpError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await Reply(send).fail(error)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        """Whether the key in the request, compared in constant time, opens its path."""
        path = scope["path"]
        if path in OPEN_PATHS:
            return True
        wanted = self._admin_api_key if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX) else self._api_key
        if not wanted:
            return True
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), wanted)
