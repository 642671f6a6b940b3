"""Durations of `keep_alive`."""

import pytest

from tokenyard.base import InvalidRequestError
from tokenyard.base.durations import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), (1.5, 1.5), ("0", 0), ("90", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), (1e30, 1e9), ("0s", 0)],
)
def test_seconds_and_units(value, seconds):
    assert parse_keep_alive(value) == seconds * 1e9


@pytest.mark.parametrize("value", [-1, "-1", "-1m", -0.5, float("-inf")])
def test_negative_is_for_ever(value):
    assert parse_keep_alive(value) is None


@pytest.mark.parametrize("value", [True, None, [], {}, "", "soon", "1d", "m", "1 h", "--1", "٣", float("nan")])
def test_anything_else_is_refused(value):
    with pytest.raises(InvalidRequestError, match="keep_alive"):
        parse_keep_alive(value)
