"""Log lines on standard error: as text, or as one JSON object a line and nothing else."""

import logging
import sys
import threading
from datetime import datetime
from types import TracebackType
from typing import Any

import msgspec
import setproctitle

from tokenyard.base.log_format import TextFormatter

logger = logging.getLogger("tokenyard")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON: time (ISO 8601 with its zone), level, logger, process, message, and `fields` that
        came with it.
        """
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": setproctitle.getproctitle(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error as `[date time] message`, or as JSON lines.

    Python warnings and uncaught exceptions are logged in the same form. The stacks that the interpreter prints when it
    crashes are always text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    if form == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda hook: _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
