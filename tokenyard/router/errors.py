"""Errors of the router itself, in the OpenAI error envelope. They do not name workers."""

from http import HTTPStatus

import orjson

from tokenyard.base import InvalidRequestError, TokenyardError

RETRY_AFTER_S = 1
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class RouterError(TokenyardError):
    """An error of the router. status: its HTTP status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


def status_of(error: TokenyardError) -> int:
    """The HTTP status of an error: its own, 400 for an invalid request, else 500."""
    if isinstance(error, RouterError):
        return error.status
    return 400 if isinstance(error, InvalidRequestError) else 500


def error_body(error: TokenyardError) -> bytes:
    """The JSON body for `error`."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


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
