"""The one table from causes and codes to what a client sees."""

from typing import get_args

import pytest

from tests.server.fake import finish
from tokenyard.base import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from tokenyard.base.timings import AbortCause
from tokenyard.server.http.errors import NO_FAILURE, failure, outcome_of

STATUSES = {
    "invalid": 400,
    "too_long": 400,
    "no_memory": 400,
    "room_in_use": 409,
    "tenant_limit": 429,
    "queue_full": 503,
    "displaced": 503,
    "queue_timeout": 503,
    "overdue": 503,
    "paused": 503,
    "slow_reader": 503,
    "draining": 503,
    "run_timeout": 504,
    "failed": 500,
}


def test_every_cause_has_a_status_or_is_no_failure():
    assert {*STATUSES, *NO_FAILURE} == set(get_args(AbortCause))
    for cause, status in STATUSES.items():
        error = failure(finish("abort", cause=cause, message="why"))
        assert (outcome_of(error).status, error.message) == (status, "why")
    for cause in NO_FAILURE:
        assert failure(finish("abort", cause=cause)) is None
    assert failure(finish("length")) is None


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("x"), 400, "invalid_request"),
        (InvalidRequestError("x", code="unsupported"), 400, "unsupported"),
        (ContextLengthError("x"), 400, "context_length_exceeded"),
        (ConfigError("x"), 400, "invalid_config"),
        (OverloadedError("x", code="loading"), 503, "loading"),
        (EngineDeadError("x"), 503, "engine_dead"),
    ],
)
def test_an_error_has_the_status_of_its_code_or_else_of_its_class(error, status, code):
    outcome = outcome_of(error)
    assert (outcome.status, outcome.code) == (status, code)
