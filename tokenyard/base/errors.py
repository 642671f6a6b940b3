"""Errors that a user of Tokenyard can meet, each with the HTTP status it maps to."""


class TokenyardError(Exception):
    """Base of all our errors.

    `status` is the HTTP status that the server answers with, `code` the machine-readable word in the error body
    and `param` the request field at fault, if one is.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(TokenyardError):
    """The request itself is wrong; sending it again unchanged will fail again."""

    status = 400
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer together, can never fit the context or the KV pool."""

    code = "context_length_exceeded"


class ConfigError(TokenyardError):
    """A setting, a flag or a checkpoint is wrong; the command line prints one line and exits with 2."""

    status = 400
    code = "invalid_config"


class OverloadedError(TokenyardError):
    """The server is full or draining; trying again later may work."""

    status = 503
    code = "overloaded"


class EngineDeadError(TokenyardError):
    """A process of the engine has gone; open requests end with this."""

    status = 503
    code = "engine_dead"
