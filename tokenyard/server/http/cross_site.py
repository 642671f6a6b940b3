"""Refuses requests that pages of other sites have a browser send. Plain ASGI middleware."""

from collections.abc import Collection

from starlette.types import ASGIApp

from tokenyard.base.admin_paths import is_admin_path
from tokenyard.base.cross_site import why_cross_site, why_foreign_host
from tokenyard.server.http.dialects import dialect_of
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.streaming import HttpResponse, Receive, Scope, Send

READ = (b"host", b"origin", b"sec-fetch-site", b"x-forwarded-host")


class CrossSiteGuard:
    """For servers without an API key, which no page can know.

    allowed_origins: sites that may call.
    loopback_only: whether the server listens on loopback only; then admin paths and pages need a known `Host`.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: Collection[str], loopback_only: bool) -> None:
        self.app = app
        self._allowed_origins = frozenset(allowed_origins)
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 403."""
        if scope["type"] == "http" and (reason := self._why_not(scope)):
            error = HttpError("cross_site", f"{reason}; --cors-allow-origins names the sites that may")
            await HttpResponse(send, dialect=dialect_of(scope["path"])).fail(error)
            return
        await self.app(scope, receive, send)

    def _why_not(self, scope: Scope) -> str:
        given = {name: value.decode("latin-1") for name, value in scope["headers"] if name in READ}
        host, origin = given.get(b"host", ""), given.get(b"origin", "")
        hosts = {host, given.get(b"x-forwarded-host", host)}
        reason = why_cross_site(scope["method"], origin, given.get(b"sec-fetch-site", ""), hosts, self._allowed_origins)
        if not reason and self._loopback_only and (origin or is_admin_path(scope["path"])):
            reason = why_foreign_host(host, self._allowed_origins)
        return reason
