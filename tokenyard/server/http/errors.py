"""What clients are told of errors: `{"error": {message, type, param, code}}` with a status and its headers.

`TABLE` is the one place that knows HTTP statuses: it maps the cause of an abort (`base.AbortCause`) and the code of an
error to them.
"""

from typing import NamedTuple

import orjson

from tokenyard.base import Finish, TokenyardError

RETRY_AFTER_S = 1
COMPRESSIONS = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress")
CLIENT_GONE_STATUS = 499
"""For answers to clients that have disconnected; no client sees it."""


class HttpOutcome(NamedTuple):
    """How an error looks to a client. `code` replaces that of the error where it is not empty."""

    status: int
    type: str
    code: str = ""


_INVALID = HttpOutcome(400, "invalid_request_error")
_NOT_FOUND = HttpOutcome(404, "not_found_error")
_BUSY = HttpOutcome(503, "service_unavailable_error")

TABLE: dict[str, HttpOutcome] = {
    # Codes of the error classes. A code of an error that has no row of its own has that of its class.
    "internal_error": HttpOutcome(500, "server_error"),
    "invalid_request": _INVALID,
    "invalid_config": _INVALID,
    "context_length_exceeded": _INVALID,
    "overloaded": _BUSY,
    "engine_dead": _BUSY,
    # Causes of an abort.
    "invalid": _INVALID._replace(code="invalid_request"),
    "too_long": _INVALID._replace(code="context_length_exceeded"),
    "no_memory": _INVALID,
    "tenant_limit": HttpOutcome(429, "rate_limit_error"),
    "queue_full": _BUSY,
    "displaced": _BUSY,
    "queue_timeout": _BUSY,
    "overdue": _BUSY,
    "paused": _BUSY,
    "slow_reader": _BUSY,
    "draining": _BUSY,
    "run_timeout": HttpOutcome(504, "server_error"),
    "failed": HttpOutcome(500, "server_error"),
    # What the HTTP side finds.
    "invalid_api_key": HttpOutcome(401, "authentication_error"),
    "not_found": _NOT_FOUND,
    "model_not_found": _NOT_FOUND,
    "request_not_found": _NOT_FOUND,
    "response_not_found": _NOT_FOUND,
    "too_many_connections": _BUSY,
    "request_timeout": HttpOutcome(408, "invalid_request_error"),
    "method_not_allowed": HttpOutcome(405, "invalid_request_error"),
    "body_too_large": HttpOutcome(413, "invalid_request_error"),
    "unsupported_encoding": HttpOutcome(415, "invalid_request_error"),
    "headers_too_large": HttpOutcome(431, "invalid_request_error"),
}

NO_FAILURE = ("", "cancelled", "client_gone")
"""Causes that end an answer with what it has so far: it was asked for, or its client has gone."""


class HttpError(TokenyardError):
    """An error that the HTTP side finds; its code has a row in `TABLE`."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)


def outcome_of(error: TokenyardError) -> HttpOutcome:
    """How `error` looks to a client, by its code or else by that of its class."""
    outcome = TABLE.get(error.code) or TABLE[type(error).code]
    return outcome if outcome.code else outcome._replace(code=error.code)


def failure(finish: Finish) -> TokenyardError | None:
    """The error that an aborted request ends with; None for one that finished or was ended on request."""
    if finish.reason != "abort" or finish.cause in NO_FAILURE:
        return None
    return TokenyardError(finish.message or "the request was aborted", code=finish.cause)


def error_body(error: TokenyardError) -> bytes:
    """The JSON body for `error`."""
    outcome = outcome_of(error)
    content = {"message": error.message, "type": outcome.type, "param": error.param, "code": outcome.code}
    return orjson.dumps({"error": content})


def error_headers(status: int) -> dict[str, str]:
    """Extra headers for an error with this status: when to try again, how to authenticate."""
    if status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    return {"www-authenticate": "Bearer"} if status == 401 else {}


def internal_error() -> TokenyardError:
    """What a client is told of a fault of ours; the log has the rest."""
    return TokenyardError("the server met an internal error; its log says more")


def check_encoding(encoding: str) -> None:
    """Raise HttpError (415) for a body that is compressed, by its header Content-Encoding."""
    if encoding.lower() in COMPRESSIONS:
        raise HttpError("unsupported_encoding", f"the body is compressed ({encoding}); send it as it is")
