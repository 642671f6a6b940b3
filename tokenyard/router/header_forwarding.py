"""The headers and the body that a worker gets: the client's without hop-by-hop headers, plus fields of the router.

Fields are spliced into the body if none of them replaces a field of the client; otherwise the body is serialized again.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.base.fleet_headers import AGE_HEADER as AGE_NAME
from tokenyard.base.fleet_headers import BATCH_LINE_HEADER
from tokenyard.base.fleet_headers import TENANT_HEADER as TENANT_NAME
from tokenyard.router.client_connection import ClientRequest, Headers
from tokenyard.router.http1 import HOP_BY_HOP

ROUTE_HEADER = b"x-tokenyard-route"
DEBUG_HEADER = b"x-route-debug"
RANK_HEADER = b"x-data-parallel-rank"
AGE_HEADER, TENANT_HEADER, LINE_HEADER = AGE_NAME.encode(), TENANT_NAME.encode(), BATCH_LINE_HEADER.encode()


class HeaderForwarding:
    """Selects the client headers that go to workers, and adds the router's."""

    def __init__(self, router_id: bytes, added: Headers, *, own_key: bool) -> None:
        """`added`: headers for every request. `own_key`: do not forward the client's Authorization header."""
        self._id, self._added = router_id, added
        own = {ROUTE_HEADER, b"x-request-id", RANK_HEADER, DEBUG_HEADER, AGE_HEADER, TENANT_HEADER, LINE_HEADER}
        self._skip = own | HOP_BY_HOP | ({b"authorization"} if own_key else set())

    def headers(self, request: ClientRequest) -> Headers:
        """The headers for a worker, with the ids of all routers that the request passed."""
        skip, connection = self._skip, request.get(b"connection")
        if connection and connection.lower() not in (b"keep-alive", b"close"):
            skip = skip.union(connection.lower().replace(b" ", b"").split(b","))
        headers = [header for header in request.headers if header[0] not in skip]
        before = request.get(ROUTE_HEADER)
        headers.append((b"x-request-id", request.request_id))
        headers.append((ROUTE_HEADER, before + b"," + self._id if before else self._id))
        return headers + self._added


def with_fields(body: bytes, extra: dict[str, Any], fields: Mapping[str, Any]) -> bytes:
    """`body`, whose parsed form is `fields`, with the fields of `extra` added or replaced.

    Raises InvalidRequestError if the body is not a JSON object.
    """
    if fields.keys().isdisjoint(extra):
        return splice(body, extra)
    return orjson.dumps({**fields, **extra})


def splice(body: bytes, fields: dict[str, Any]) -> bytes:
    """Insert `fields` at the start of a JSON object. Raises InvalidRequestError if `body` is not an object."""
    begin = body.find(b"{")
    if begin < 0:
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    rest = body[begin + 1 :]
    comma = b"" if rest.lstrip(b" \t\r\n").startswith(b"}") else b","
    return body[: begin + 1] + orjson.dumps(fields)[1:-1] + comma + rest
