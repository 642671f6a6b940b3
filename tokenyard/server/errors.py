"""The error envelope: `{"error": {message, type, param, code}}` with the right status and Retry-After."""

import orjson

from tokenyard.base import TokenyardError

RETRY_AFTER_S = 1
COMPRESSIONS = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class HttpError(TokenyardError):
    """An error that the HTTP side itself finds, with its own status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


def error_type(status: int) -> str:
    """The `type` word that goes with an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")


def error_body(error: TokenyardError) -> bytes:
    """The JSON body for `error`."""
    content = {"message": error.message, "type": error_type(error.status), "param": error.param, "code": error.code}
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
        raise HttpError(415, f"the body is compressed ({encoding}); send it as it is", code="unsupported_encoding")
