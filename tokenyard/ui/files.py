"""The files of the pages, and the paths at which a server or router serves them."""

from functools import cache

SCRIPT, STYLE, PAGE = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "text/html; charset=utf-8"
SHARED = {
    "/ui/uplot.js": ("vendor/uPlot.iife.min.js", SCRIPT),
    "/ui/uplot.css": ("vendor/uPlot.min.css", STYLE),
    "/ui/uplot-license": ("vendor/LICENSE", "text/plain; charset=utf-8"),
    "/ui/theme.css": ("theme.css", STYLE),
    "/ui/charts.js": ("charts.js", SCRIPT),
}
SERVER_PAGE = {
    **SHARED,
    "/": ("server.html", PAGE),
    "/ui/server.css": ("server.css", STYLE),
    "/ui/chat.js": ("chat.js", SCRIPT),
    "/ui/request.js": ("request.js", SCRIPT),
    "/ui/server.js": ("server.js", SCRIPT),
}
"""Path -> file and content type of a server's page."""

ROUTER_PAGE = {
    **SHARED,
    "/": ("router.html", PAGE),
    "/ui/router.css": ("router.css", STYLE),
    "/ui/router.js": ("router.js", SCRIPT),
}
"""Path -> file and content type of a router's page."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Sent with each file: a page runs only its own scripts and contacts no other host."""


@cache
def read_file(name: str) -> bytes:
    """The bytes of a file of this folder, read once. Raises FileNotFoundError for a missing one."""
    # Imported here, as a start reads no file.
    from importlib.resources import files

    return files("tokenyard.ui").joinpath(name).read_bytes()
