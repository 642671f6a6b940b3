"""Errors that users of Tokenyard can see. `server/http/errors.py` maps them to HTTP statuses by their codes."""


class TokenyardError(Exception):
    """Base of all our errors.

    `code` is a machine-readable word, that of the class unless one is given; `param` is the request field at fault,
    if one is.
    """

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(TokenyardError):
    """The request itself is wrong; sending it again unchanged will fail again."""

    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer together, can never fit the context or the KV pool.

    prompt_tokens, answer_tokens, most: what was asked for and what fits, if known; for a prompt that is too long by
    itself `answer_tokens` is None and `most` is for the prompt alone.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.most = most


class ConfigError(TokenyardError):
    """A setting, a flag or a checkpoint is wrong; the command line prints one line and exits with 2."""

    code = "invalid_config"


class OverloadedError(TokenyardError):
    """The server is full or draining; trying again later may work."""

    code = "overloaded"


class DeviceLostError(TokenyardError):
    """Part of the device has gone: nothing more can be computed by this process."""

    code = "device_lost"


class EngineDeadError(TokenyardError):
    """A process of the engine has ended; open requests fail with this."""

    code = "engine_dead"
