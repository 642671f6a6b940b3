"""The form by which clients upload a file (RFC 7578), read piece by piece: the file goes to disk as it arrives."""

import asyncio
import contextlib
import re
from collections.abc import Iterator

from tokenyard.base import InvalidRequestError, OverloadedError, TokenyardError
from tokenyard.batch.file_store import (
    DEFAULT_AGE_S,
    MAX_AGE_S,
    MAX_FILE_BYTES,
    MIN_AGE_S,
    FileStore,
    FileWriter,
    StoredFile,
)

PURPOSES = ("batch",)
MAX_PARTS = 64
MAX_HEAD_BYTES = 16_384
MAX_FIELD_BYTES = 65_536
MAX_FORM_BYTES = MAX_FILE_BYTES + 1_000_000
"""Most bytes of a form, with its file."""

PIECE_BYTES = 1 << 20
"""How much of a form is gathered before it is written."""

FILE, AGE = "file", "expires_after[seconds]"
PREAMBLE, HEAD, CONTENT, END = "preamble", "head", "content", "end"
"""Where in the form the next byte is."""

_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?')
_NAME = re.compile(rb'(?i)[;\s]name="([^"\r\n]*)"')
_FILENAME = re.compile(rb'(?i)[;\s]filename="([^"\r\n]*)"')


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Raise OverloadedError for an OSError: the disk does not take what a client wants kept."""
    try:
        yield
    except OSError as error:
        raise OverloadedError(f"the disk does not take it: {error.strerror}", code="storage_failed") from error


class Upload:
    """A form while it arrives: `feed` all its bytes, then `finish`; `discard` at the end in any case.

    Blocks on the disk. Used from one thread at a time.
    """

    def __init__(self, files: FileStore, tenant: str, content_type: str) -> None:
        """Raises InvalidRequestError for a body of another type."""
        match = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or match is None:
            raise InvalidRequestError("the body must be a form (multipart/form-data) with the fields file and purpose")
        self._mark = b"\r\n--" + match[1].encode("latin-1", "replace")
        self._files, self._tenant = files, tenant
        # The first mark has no line before it.
        self._buffer, self._place, self._parts = bytearray(b"\r\n"), PREAMBLE, 0
        self._fields: dict[str, bytearray] = {}
        self._name, self._filename = "", ""
        self._writer: FileWriter | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises InvalidRequestError for a malformed form or a file that is too large, and OverloadedError.
        """
        self._buffer += data
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Take one part of what is in the buffer; whether there may be another."""
        buffer, mark = self._buffer, self._mark
        if self._place == END:
            buffer.clear()
            return False
        if self._place == HEAD:
            if buffer[:2] == b"--":
                self._place = END
                return True
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > MAX_HEAD_BYTES:
                    raise InvalidRequestError("the form has a part whose headers are too long")
                return False
            self._begin_part(bytes(buffer[:end]))
            del buffer[: end + 4]
            self._place = CONTENT
            return True
        at = buffer.find(mark)
        taken = len(buffer) - len(mark) + 1 if at < 0 else at
        if taken > 0:
            if self._place == CONTENT:
                self._add(bytes(buffer[:taken]))
            del buffer[:taken]
        if at < 0:
            return False
        del buffer[: len(mark)]
        self._place = HEAD
        return True

    def _begin_part(self, head: bytes) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} fields")
        name, filename = _NAME.search(head), _FILENAME.search(head)
        self._name = name[1].decode("utf-8", "replace") if name else ""
        if self._name != FILE:
            self._fields[self._name] = bytearray()
            return
        if self._writer is not None:
            raise InvalidRequestError("the form has two files; upload one at a time", param=FILE)
        self._filename = filename[1].decode("utf-8", "replace") if filename else ""
        with storing():
            self._writer = self._files.writer(self._tenant)

    def _add(self, data: bytes) -> None:
        """Add content to the current part."""
        if self._name != FILE:
            field = self._fields[self._name]
            field += data
            if len(field) > MAX_FIELD_BYTES:
                message = f"the field is longer than {MAX_FIELD_BYTES} bytes"
                raise InvalidRequestError(message, param=self._name[:100], code="body_too_large")
            return
        assert self._writer is not None
        if self._writer.size + len(data) > MAX_FILE_BYTES:
            message = f"the file is larger than {MAX_FILE_BYTES} bytes"
            raise InvalidRequestError(message, param=FILE, code="body_too_large")
        with storing():
            self._writer.write(data)

    def finish(self) -> StoredFile:
        """All bytes are there: keep the file.

        Raises InvalidRequestError for a form that is cut off, or whose fields are wrong, and OverloadedError.
        """
        if self._place != END:
            raise InvalidRequestError("the form is cut off")
        if self._writer is None:
            raise InvalidRequestError("the form has no field file", param=FILE)
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose not in PURPOSES:
            raise InvalidRequestError("purpose must be batch; this server keeps no other files", param="purpose")
        if not self._writer.size:
            raise InvalidRequestError("the file is empty", param=FILE)
        with storing():
            return self._writer.close(self._filename or "upload.jsonl", purpose, self._age_s())

    def discard(self) -> None:
        """Give back what it holds; the file is gone unless the form was finished."""
        if self._writer is not None:
            self._writer.discard()

    def _age_s(self) -> int:
        """How long the file is kept. Raises InvalidRequestError for a time out of range."""
        if AGE not in self._fields:
            return DEFAULT_AGE_S
        text = self._fields[AGE].decode("latin-1")
        seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if not MIN_AGE_S <= seconds <= MAX_AGE_S:
            raise InvalidRequestError(f"{AGE} must be {MIN_AGE_S} to {MAX_AGE_S}", param=AGE)
        return seconds


class UploadStream:
    """Feeds an upload from an event loop, which never waits for the disk. `close` at the end in any case.

    Most clients read the response only after they have sent everything, so after an error the rest is dropped and
    `finish` raises it. Used from one task at a time.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._pieces: list[bytes] = []
        self._held = self._size = 0
        self._error: TokenyardError | None = None

    async def add(self, data: bytes) -> None:
        """Take the next bytes. Raises InvalidRequestError for so many that the rest is not worth reading."""
        self._size += len(data)
        if self._size > 2 * MAX_FORM_BYTES:
            raise InvalidRequestError(f"the file is larger than {MAX_FILE_BYTES} bytes", code="body_too_large")
        if self._error is None:
            self._pieces.append(data)
            self._held += len(data)
        if self._held >= PIECE_BYTES:
            await self._flush()

    async def finish(self) -> StoredFile:
        """All bytes are there: keep the file. Raises InvalidRequestError and OverloadedError as `Upload` does."""
        await self._flush()
        if self._error is not None:
            raise self._error
        return await asyncio.to_thread(self._upload.finish)

    async def close(self) -> None:
        """Give back what it holds; the file is gone unless it was finished."""
        await asyncio.to_thread(self._upload.discard)

    async def _flush(self) -> None:
        data, self._pieces, self._held = b"".join(self._pieces), [], 0
        try:
            await asyncio.to_thread(self._upload.feed, data)
        except TokenyardError as error:
            self._error = error
