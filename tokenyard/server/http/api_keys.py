"""Which API key opens which path. Plain ASGI middleware, so that streams pass through without a copy."""

import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp

from tokenyard.base.admin_paths import is_admin_path
from tokenyard.server.http.dialects import dialect_of
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.streaming import HttpResponse, Receive, Scope, Send
from tokenyard.ui.files import SERVER_PAGE

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/metrics/load", "/v1/transfer"})
TENANT = "tokenyard.tenant"
"""Key in a request's ASGI scope: the tenant whose API key it carries."""


class Authentication:
    """Requires the API key on every path except probes, metrics and the page's files, and the admin key on admin paths.

    With only an API key, it opens admin paths as well. With only an admin key, the other paths are open. The admin key
    opens all paths, as the router sends one key to its engines. A key of
    `tenant_keys` (by tenant) opens what the API key opens except admin paths, and names the tenant of the request.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, admin_api_key: str, tenant_keys: Mapping[str, str]) -> None:
        self.app = app
        self._api_key = api_key.encode()
        self._admin_api_key = (admin_api_key or api_key).encode()
        self._tenant_keys = [(tenant, key.encode()) for tenant, key in tenant_keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 401."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._allowed(scope):
            error = HttpError("invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
            await HttpResponse(send, dialect=dialect_of(scope["path"])).fail(error)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        """Whether the key in the request, compared in constant time, opens its path."""
        path = scope["path"]
        if path in OPEN_PATHS or path in SERVER_PAGE:
            return True
        given = _bearer_key(scope)
        if self._admin_api_key and _same(given, self._admin_api_key):
            return True
        if is_admin_path(path):
            return not self._admin_api_key
        for tenant, key in self._tenant_keys:
            if _same(given, key):
                scope[TENANT] = tenant
                return True
        if self._tenant_keys and not self._api_key:
            return False
        return _same(given, self._api_key)


def _bearer_key(scope: Scope) -> bytes:
    """The key in a request's headers, b"" for none."""
    headers = dict(scope["headers"])
    if b"authorization" not in headers:
        # Anthropic's clients send the key in this header.
        return bytes(headers.get(b"x-api-key", b"").strip())
    scheme, _, given = headers[b"authorization"].partition(b" ")
    return bytes(given.strip()) if scheme.lower() == b"bearer" else b""


def _same(given: bytes, wanted: bytes) -> bool:
    """Whether a key is the wanted one, compared in constant time. Without a wanted key, any key matches."""
    return not wanted or hmac.compare_digest(given, wanted)
