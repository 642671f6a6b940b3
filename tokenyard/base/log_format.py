"""The text format of logs."""

import logging
from typing import Any

from typing_extensions import override


class TextFormatter(logging.Formatter):
    """`[date time] message` on one line, with control characters escaped, so client text cannot forge a log line."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with control characters as escapes."""
        return _printable(super().formatMessage(record))

    @override
    def formatException(self, ei: Any) -> str:
        """Return a trace with its lines indented."""
        return "\n".join(f"  {_printable(line)}" for line in super().formatException(ei).split("\n"))


def quoted_word(value: Any) -> str:
    """A value in a line. Text from clients is quoted, so that it cannot forge log lines."""
    plain = not isinstance(value, str) or (value.isascii() and value.isprintable() and " " not in value)
    return str(value) if plain else repr(value)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
