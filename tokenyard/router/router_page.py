"""`GET /`: the router's page. Its files are open to all; what it shows it asks of `/metrics` and `/workers`."""

from tokenyard.router.client_connection import ClientConnection, ClientRequest
from tokenyard.ui.files import HEADERS, ROUTER_PAGE, read_file

_FIELDS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def is_page(request: ClientRequest) -> bool:
    """Whether a request is for a file of the page."""
    return request.path in ROUTER_PAGE and request.method in (b"GET", b"HEAD")


def answer_page(front: ClientConnection, request: ClientRequest) -> None:
    """Answer it."""
    name, content_type = ROUTER_PAGE[request.path]
    front.answer(200, read_file(name), [(b"content-type", content_type.encode()), *_FIELDS])
