"""Which requests of a browser come from another site, and may not use a server that was not meant for the web.

A page of any site can have its reader's browser send requests to an address that only the browser reaches, without a
preflight if it sends plain text. It can also give a name of its domain that address (DNS rebinding). Browsers say where
a request comes from in `Origin` and `Sec-Fetch-Site`, which a page cannot change (Fetch standard, Fetch Metadata).
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and a page of another site cannot read the answers."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


def why_cross_site(
    method: str, origin: str, fetch_site: str, hosts: Collection[str], allowed_origins: Collection[str] = ()
) -> str:
    """Return why a request is refused as one of another site, "" if it is not.

    method: of HTTP. origin, fetch_site: the headers `Origin` and `Sec-Fetch-Site`, "" for none.
    hosts: the `Host` header, and that which a proxy in front reports (`X-Forwarded-Host`).
    allowed_origins: sites that may call, "*" for all.
    """
    if method in SAFE_METHODS or "*" in allowed_origins or (origin and origin in allowed_origins):
        return ""
    if origin:
        own = _authority(origin)
        if own is None or all(own != _authority(f"{urlsplit(origin).scheme}://{host}") for host in hosts):
            return f"a page of {origin[:200]} may not use this server"
    elif fetch_site in ("cross-site", "same-site"):
        return "a page of another site may not use this server"
    return ""


def why_foreign_host(host: str, allowed_origins: Collection[str] = ()) -> str:
    """Return why a server that listens on loopback only refuses a `Host` header, "" if it does not.

    Clients of such a server call it localhost or by an address; another name is that of a proxy, whose site must be
    allowed, or of a page whose domain was given this machine's address.
    """
    name = urlsplit(f"http://{host}").hostname or ""
    if not host or name == "localhost" or name.endswith(".localhost") or "*" in allowed_origins:
        return ""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        if any(urlsplit(origin).hostname == name for origin in allowed_origins):
            return ""
        return f"this server listens on loopback only and is not known as {name[:200]!r}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a server that listens at `host` is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authority(url: str) -> tuple[str, int] | None:
    """Host and port of a URL; None if it has none, such as the origin "null"."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    return parts.hostname, port or _DEFAULT_PORTS.get(parts.scheme, 0)
