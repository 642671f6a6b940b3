"""Handles closed standard files, limited encodings and narrow terminals."""

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

MIN_COLUMNS = 40
"""The least width that help and tables are laid out for; a narrower terminal wraps the lines."""

STDERR = 2
WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO)


def prepare_terminal() -> None:
    """Open closed standard files, escape what the encoding cannot represent, and set a minimum layout width."""
    fill_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if (columns := shutil.get_terminal_size().columns) < MIN_COLUMNS or "COLUMNS" in os.environ:
        os.environ["COLUMNS"] = str(max(columns, MIN_COLUMNS))


def fill_standard_files() -> None:
    """Open the null device for closed standard files, so that no socket gets one of their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)


def flush_output() -> None:
    """Flush the standard output. Raises OSError if it cannot be written, for example on a full disk."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_output() -> None:
    """Send the rest of the standard output to the null device, so that the interpreter's last flush cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def is_write_error(error: OSError) -> bool:
    """Whether standard output was lost: its reader left, or its disk is full."""
    return error.errno in WRITE_ERRORS and error.filename is None


def command_line(secret: Sequence[str] = ()) -> str:
    """The running command as a user would type it; dots replace the values of `secret` flags."""
    words = ["tokenyard", *sys.argv[1:]]
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in secret and equals:
            words[place] = f"{flag}=..."
        elif flag in secret and place + 1 < len(words):
            words[place + 1] = "..."
    return shlex.join(words)
