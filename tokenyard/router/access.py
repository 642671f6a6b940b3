"""Who may do what at the router: keys, and pages of other sites."""

import hmac
import logging

from tokenyard.base.cross_site import is_loopback, why_cross_site, why_foreign_host
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.errors import RouterError
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.tenant_keys import TenantKeys
from tokenyard.routing.tenant_limits import KeyUsage

log = logging.getLogger(__name__)


def given_key(request: ClientRequest) -> bytes:
    """The key that a request carries, b"" for none. Anthropic's clients send it as x-api-key."""
    if not request.get(b"authorization"):
        return request.get(b"x-api-key").strip()
    scheme, _, given = request.get(b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _wrong_key() -> RouterError:
    return RouterError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def check_key(request: ClientRequest, key: str) -> None:
    """Raise RouterError (401) unless the request carries `key`; no effect if `key` is empty."""
    if key and not hmac.compare_digest(given_key(request), key.encode()):
        raise _wrong_key()


def tenant_key(request: ClientRequest, settings: RouterSettings, keys: TenantKeys, now_s: float) -> KeyUsage | None:
    """What the key of a request allows, None for the API key, which is no tenant's. `now_s`: Unix time.

    Raises RouterError (401) for an unknown key and for one that has expired, (503) for one that cannot be checked.
    """
    usage = keys.find(given_key(request))
    if usage is None:
        if not settings.api_key:
            raise _wrong_key()
        check_key(request, settings.api_key)
        return None
    if 0.0 < usage.grant.expires_s <= now_s:
        raise RouterError(401, "this API key has expired; ask the operator for another", code="expired_api_key")
    return usage


def check_site(request: ClientRequest, *, loopback_only: bool) -> None:
    """Raise RouterError (403) for a request that a page of another site has a browser send."""
    host, origin = request.get(b"host").decode("latin-1"), request.get(b"origin").decode("latin-1")
    hosts = {host, request.get(b"x-forwarded-host").decode("latin-1") or host}
    fetch_site = request.get(b"sec-fetch-site").decode("latin-1")
    reason = why_cross_site(request.method.decode(), origin, fetch_site, hosts)
    if not reason and loopback_only:
        reason = why_foreign_host(host)
    if reason:
        raise RouterError(403, f"{reason}; with --admin-api-key, who sends the key may", code="cross_site")


def check_access(request: ClientRequest, settings: RouterSettings, *, admin: bool) -> None:
    """Raise RouterError unless the request may do what it asks for. `admin`: whether that needs the admin key."""
    key = (settings.admin_api_key if admin else "") or settings.api_key
    check_key(request, key)
    if admin and not key:
        check_site(request, loopback_only=is_loopback(settings.host))


def audit(request: ClientRequest, *, admin: bool) -> None:
    """Log a line for a request that controls engines or the router."""
    if admin and request.method not in (b"GET", b"HEAD"):
        words = (request.method.decode(), request.target.decode("latin-1"), request.request_id.decode("latin-1"))
        log.info("Control: %s %s rid=%s from %s", *words, request.peer or "unknown")
