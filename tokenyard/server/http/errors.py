"""Errors as clients see them: `{"error": {message, type, param, code}}` with a status and headers.

`TABLE` maps the cause of an abort (`base.AbortCause`) or the code of an error to an HTTP status.
"""

from typing import NamedTuple

import orjson

from tokenyard.base import Finish, TokenyardError

RETRY_AFTER_S = 1
COMPRESSIONS = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress")
CLIENT_GONE_STATUS = 499
"""Status for clients that have disconnected; none receives it."""


class HttpOutcome(NamedTuple):
    """Status and type of an error. A `code` that is not empty replaces that of the error."""

    status: int
    type: str
    code: str = ""


_INVALID = HttpOutcome(400, "invalid_request_error")
_NOT_FOUND = HttpOutcome(404, "not_found_error")
_BUSY = HttpOutcome(503, "service_unavailable_error")

TABLE: dict[str, HttpOutcome] = {
    # Codes of the error classes. An error whose code has no row uses the row of its class.
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
    "duplicate_rid": HttpOutcome(409, "invalid_request_error"),
    "room_in_use": HttpOutcome(409, "invalid_request_error"),
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
    # Errors of the HTTP server.
    "invalid_api_key": HttpOutcome(401, "authentication_error"),
    "cross_site": HttpOutcome(403, "permission_error"),
    "not_found": _NOT_FOUND,
    "storage_full": HttpOutcome(429, "rate_limit_error"),
    "too_many_batches": HttpOutcome(429, "rate_limit_error"),
    "storage_failed": HttpOutcome(507, "server_error"),
    "model_not_found": _NOT_FOUND,
    "request_not_found": _NOT_FOUND,
    "response_not_found": _NOT_FOUND,
    "previous_response_not_found": _INVALID,
    "too_many_connections": _BUSY,
    "request_timeout": HttpOutcome(408, "invalid_request_error"),
    "method_not_allowed": HttpOutcome(405, "invalid_request_error"),
    "body_too_large": HttpOutcome(413, "invalid_request_error"),
    "unsupported_encoding": HttpOutcome(415, "invalid_request_error"),
    "headers_too_large": HttpOutcome(431, "invalid_request_error"),
}

NO_FAILURE = ("", "cancelled", "client_gone")
"""Causes that end an answer without an error: it was cancelled, or its client disconnected."""


class HttpError(TokenyardError):
    """An error of the HTTP server; its code has a row in `TABLE`."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)


def outcome_of(error: TokenyardError) -> HttpOutcome:
    """The row of `TABLE` for an error, by its code or else its class's."""
    outcome = TABLE.get(error.code) or TABLE[type(error).code]
    return outcome if outcome.code else outcome._replace(code=error.code)


def failure(finish: Finish) -> TokenyardError | None:
    """The error of an aborted request; None for one that finished, was cancelled or lost its client, or had begun when
    the engine was paused.
    """
    if finish.reason != "abort" or finish.cause in NO_FAILURE:
        return None
    if finish.cause == "paused" and finish.completion_tokens:
        return None  # the client gets what there is of the answer
    return TokenyardError(finish.message or "the request was aborted", code=finish.cause)


def error_body(error: TokenyardError) -> bytes:
    """The JSON body for `error`."""
    outcome = outcome_of(error)
    content = {"message": error.message, "type": outcome.type, "param": error.param, "code": outcome.code}
    return orjson.dumps({"error": content})


def error_headers(status: int) -> dict[str, str]:
    """Extra headers for a status: when to retry, how to authenticate."""
    if status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    return {"www-authenticate": "Bearer"} if status == 401 else {}


def internal_error() -> TokenyardError:
    """The error that a client gets for an internal error; the log has the details."""
    return TokenyardError("the server met an internal error; its log has the details")


def check_encoding(encoding: str) -> None:
    """Raise HttpError (415) for a compressed body, by its Content-Encoding."""
    if encoding.lower() in COMPRESSIONS:
        raise HttpError("unsupported_encoding", f"the body is compressed ({encoding}); send it uncompressed")
