"""Stored responses, for `previous_response_id` and for GET and DELETE by id.

The store is in memory and bounded in number, bytes and age. A client that cannot depend on it sends its whole input
with each request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request

from tokenyard.server.http.api_keys import TENANT
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.routes import Routes

MAX_RESPONSES = 10_000
MAX_STORE_BYTES = 256_000_000
MAX_AGE_S = 3600.0

routes = Routes("/v1/responses")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response.

    tenant: its owner.
    until_s: when it expires, in seconds of the store's clock.
    response: the response as JSON.
    items: its input items as JSON.
    session: the session that it is a turn of, "" for none.
    """

    tenant: str
    until_s: float
    response: bytes
    items: bytes
    session: str = ""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """The latest responses by id. A response is visible only to its tenant."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_STORE_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses, self._max_bytes, self._max_age_s, self._clock = max_responses, max_bytes, max_age_s, clock
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, response: dict[str, Any], items: list[dict[str, Any]], tenant: str, session: str = "") -> None:
        """Store a response and its input items; the oldest responses are evicted. A response that continues elsewhere
        has the id that its client says: it may be here already, and must not take the place of another tenant's.
        """
        before = self._kept.get(response["id"])
        if before is not None:
            if before.tenant != tenant:
                return
            self._drop(response["id"])
        until_s = self._clock() + self._max_age_s
        kept = StoredResponse(tenant, until_s, orjson.dumps(response), orjson.dumps(items), session)
        self._kept[response["id"]] = kept
        self._bytes += kept.size
        while self._kept and (
            len(self._kept) > self._max_responses
            or self._bytes > self._max_bytes
            or next(iter(self._kept.values())).until_s < self._clock()
        ):
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, tenant: str) -> StoredResponse:
        """A response. Raises HttpError (404) if it is unknown, expired or another tenant's."""
        kept = self._find(response_id, tenant)
        if kept is None:
            raise HttpError("response_not_found", f"Response with id {response_id[:80]!r} not found.")
        return kept

    def previous(self, response_id: str, tenant: str) -> StoredResponse:
        """The response that a request continues. Raises HttpError (400), in OpenAI's words, where `get` raises."""
        kept = self._find(response_id, tenant)
        if kept is None:
            message = (
                f"Previous response with id {response_id[:80]!r} not found. Responses are kept in memory for"
                f" {self._max_age_s / 60:g} minutes, and dropped sooner where there are many: send the whole input"
            )
            raise HttpError("previous_response_not_found", message, param="previous_response_id")
        return kept

    def _find(self, response_id: str, tenant: str) -> StoredResponse | None:
        kept = self._kept.get(response_id)
        if kept is not None and kept.until_s < self._clock():
            self._drop(response_id)
            kept = None
        return kept if kept is not None and kept.tenant == tenant else None

    def session_of(self, response_id: str, tenant: str) -> str:
        """The session that a response of this tenant is a turn of. One that began with it, or that is not known, has
        the response's id as its name.
        """
        kept = self._kept.get(response_id)
        return kept.session or response_id if kept is not None and kept.tenant == tenant else response_id

    def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response. Raises HttpError (404) if there is none."""
        self.get(response_id, tenant)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._bytes -= self._kept.pop(response_id).size


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.server.responses
    return store


def _tenant(request: Request) -> str:
    return str(request.scope.get(TENANT, ""))


@routes.get("/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    """Return a stored response."""
    found: dict[str, Any] = orjson.loads(_store(request).get(response_id, _tenant(request)).response)
    return found


@routes.get("/{response_id}/input_items")
async def get_input_items(request: Request, response_id: str) -> dict[str, Any]:
    """Return the input items of a stored response, latest first."""
    items = orjson.loads(_store(request).get(response_id, _tenant(request)).items)[::-1]
    named = [{"id": f"{response_id}-{len(items) - place}", **item} for place, item in enumerate(items)]
    ends = {"first_id": named[0]["id"], "last_id": named[-1]["id"]} if named else {"first_id": None, "last_id": None}
    return {"object": "list", "data": named, "has_more": False, **ends}


@routes.on("DELETE", "/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a response."""
    _store(request).delete(response_id, _tenant(request))
    return {"id": response_id, "object": "response", "deleted": True}
