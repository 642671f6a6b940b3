"""The text log: a client cannot inject a line into it."""

import logging

from tokenyard.base.log_format import TextFormatter


def line(message, *arguments, error=None):
    info = (type(error), error, None) if error else None
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, message, arguments, info)
    return TextFormatter().format(record)


def test_control_characters_of_clients_are_escapes():
    text = line("ignored unknown request fields: %s", "a\n[2026-01-01 00:00:00] forged\x1b[2J\u202e\x85é")
    assert "\n" not in text
    assert text.endswith(r"fields: a\n[2026-01-01 00:00:00] forged\x1b[2J\u202e\x85é")


def test_a_trace_cannot_look_like_another_line():
    first, *rest = line("a request failed", error=ValueError("bad\n[2026-01-01 00:00:00] forged\x07")).split("\n")
    assert first.endswith("a request failed")
    assert all(part.startswith("  ") for part in rest)
    assert r"forged\x07" in rest[-1]
