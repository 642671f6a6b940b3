"""Errors of the router itself, in the form of the client's API. They do not name workers."""

from http import HTTPStatus

import orjson

from tokenyard.base import InvalidRequestError, TokenyardError
from tokenyard.routing.dispatch import (
    DEADLINE,
    MODEL_UNAVAILABLE,
    NO_WORKER,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    WORKER_FAILED,
)

RETRY_AFTER_S = 1
ANTHROPIC_PATH, RESPONSES_PATH, OLLAMA_PATH = "/v1/messages", "/v1/responses", "/api/"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "api_error"}


_REFUSALS = {
    NO_WORKER: (503, "there is no worker; try again later"),
    QUEUE_FULL: (429, "the queue is full; try again later"),
    QUEUE_TIMEOUT: (503, "the request was queued and no worker had capacity; try again later"),
    DEADLINE: (503, "the request was queued and its deadline passed; try again later"),
    MODEL_UNAVAILABLE: (503, "no healthy worker serves this model; try again later"),
    WORKER_FAILED: (502, "the worker failed in the middle of the answer"),
}
"""HTTP status and message for each cause of the dispatch machine."""


_STATUSES = {
    "not_found": 404,
    "body_too_large": 413,
    "storage_full": 429,
    "too_many_batches": 429,
    "storage_failed": 507,
}
"""HTTP status of the errors of files and batches, by their codes."""


class RouterError(TokenyardError):
    """An error of the router. status: its HTTP status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


def refusal(cause: str) -> RouterError:
    """The error for a request that the dispatch machine refused."""
    status, what = _REFUSALS[cause]
    return RouterError(status, what, code=cause)


def status_of(error: TokenyardError) -> int:
    """The HTTP status of an error: its own, that of its code, 400 for an invalid request, else 500."""
    if isinstance(error, RouterError):
        return error.status
    if error.code in _STATUSES:
        return _STATUSES[error.code]
    return 400 if isinstance(error, InvalidRequestError) else 500


def error_body(error: TokenyardError, path: str = "") -> bytes:
    """The JSON body for `error`, in the form of the API at `path`: OpenAI's, Anthropic's or Ollama's."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")
    if path.startswith(ANTHROPIC_PATH):
        kind = _ANTHROPIC_TYPES.get(status, kind)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    if path.startswith(OLLAMA_PATH):
        return orjson.dumps({"error": error.message})
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def error_event(error: TokenyardError, path: str) -> bytes:
    """`error` as the last event of a stream of the API at `path`."""
    if path.startswith(OLLAMA_PATH):
        return error_body(error, path) + b"\n"
    if path.startswith(RESPONSES_PATH):
        fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"
    name = b"event: error\n" if path.startswith(ANTHROPIC_PATH) else b""
    return name + b"data: " + error_body(error, path) + b"\n\n"


def error_headers(status: int) -> list[tuple[bytes, bytes]]:
    """Headers of an error response: Retry-After for 429 and 503, WWW-Authenticate for 401."""
    if status in (429, 503):
        return [(b"retry-after", b"%d" % RETRY_AFTER_S)]
    return [(b"www-authenticate", b"Bearer")] if status == 401 else []


def status_line(status: int) -> bytes:
    """The status line of a response of the router."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b" % (status, phrase.encode())
