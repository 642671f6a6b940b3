"""Batches on disk: a record of each, and its answers, one line each, as they come.

A server that is killed goes on where it was: a line with an answer is not asked again, and an answer that was cut off
is none.
"""

import os
import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.batch.file_store import OUTPUT, Clock, FileStore, StoredFile, lines_of, sync_folder, write_whole

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_OPEN_BATCHES = 100
"""Batches of a tenant that have not ended: the lines of each are checked in memory."""
MAX_ENDED_BATCHES = 1000
"""Batches of a tenant that have ended and are still known; the oldest are forgotten first. Their files stay."""
MAX_LINES = 50_000
MAX_ERRORS = 100
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""OpenAI's limits."""

WINDOW = re.compile(r"(\d{1,4})([mhd])")
UNIT_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 14 * 86400
KEEP_INPUT_S = 86400
"""How long an input is kept at least after the window of its batch."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
CANCELLED = {"code": "batch_cancelled", "message": "This request was not executed, as the batch was cancelled."}


class TooManyBatchesError(InvalidRequestError):
    """A tenant has as many open batches as it may."""

    code = "too_many_batches"


@dataclass(kw_only=True)
class BatchFields:
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None
    output_expires_after: dict[str, Any] | None = None


class BatchError(msgspec.Struct):
    """What is wrong with a line of the input; `line` counts from 1, None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct):
    """A batch. Times are Unix times, 0 for what has not happened.

    models: those that its lines may name; empty for all.
    completed, failed: answered lines with and without success.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    models: list[str] = []
    errors: list[BatchError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0

    def public(self) -> dict[str, Any]:
        """The batch object of the API."""
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = {"object": "list", "data": [msgspec.to_builtins(error) for error in self.errors]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": getattr(self, f"{name}_at") or None for name in times},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Answer(msgspec.Struct, array_like=True):
    """The answer to a line: its place in the input, whether it succeeded, and its line of the output."""

    place: int
    succeeded: bool
    line: dict[str, Any]


def window_s(text: object) -> int:
    """The seconds of a completion window such as `24h`. Raises InvalidRequestError."""
    match = WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        message = "completion_window must be a time such as 24h, 90m or 2d, up to 14d"
        raise InvalidRequestError(message, param="completion_window")
    return seconds


def check_line(line: bytes, endpoint: str, seen: set[str]) -> dict[str, Any]:
    """The request of an input line. seen: ids of earlier lines. Raises InvalidRequestError, with the field at fault."""
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the line is not valid JSON: {error}", code="invalid_json_line") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the line must be a JSON object", code="invalid_json_line")
    name = content.get("custom_id")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("custom_id must be a string, by which the answer is found", param="custom_id")
    if name in seen:
        raise InvalidRequestError(
            f"the custom_id {name[:100]!r} is that of an earlier line", param="custom_id", code="duplicate_custom_id"
        )
    if content.get("method") != "POST":
        raise InvalidRequestError("method must be POST", param="method", code="invalid_method")
    if content.get("url") != endpoint:
        message = f"url must be the endpoint of the batch, {endpoint}"
        raise InvalidRequestError(message, param="url", code="mismatched_url")
    body = content.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be an object", param="body")
    if body.get("stream"):
        raise InvalidRequestError("an answer in a batch cannot be streamed; leave stream out", param="body.stream")
    seen.add(name)
    return content


class BatchStore:
    """The batches in a folder, with their files. Lines that end together add their answers from several threads."""

    def __init__(self, folder: Path, files: FileStore, clock: Clock = time.time) -> None:
        self._folder, self._files, self._clock = folder, files, clock
        self._batches: dict[str, Batch] = {}
        self._adding = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("batch_*.json")):
            try:
                batch = msgspec.json.decode(path.read_bytes(), type=Batch)
            except (OSError, msgspec.MsgspecError):
                continue
            self._batches[batch.id] = batch

    def create(self, tenant: str, fields: BatchFields, models: Sequence[str] = ()) -> Batch:
        """Keep a new batch, whose lines are not checked yet. models: those that they may name; empty for all.

        Raises InvalidRequestError for wrong fields, and TooManyBatchesError beyond `MAX_OPEN_BATCHES` of the tenant.
        """
        endpoint = fields.endpoint
        if endpoint not in ENDPOINTS:
            raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        seconds = window_s(fields.completion_window)
        file = self._files.find(tenant, fields.input_file_id)
        if file is None:
            message = f"there is no file {fields.input_file_id[:100]!r}; upload it with POST /v1/files"
            raise InvalidRequestError(message, param="input_file_id")
        if file.purpose != "batch":
            raise InvalidRequestError("the purpose of the file must be batch", param="input_file_id")
        metadata = _checked_metadata(fields.metadata)
        if sum(one.tenant == tenant for one in self.open()) >= MAX_OPEN_BATCHES:
            raise TooManyBatchesError(f"{MAX_OPEN_BATCHES} batches are open, which is the limit; wait, or cancel some")
        now = int(self._clock())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=fields.completion_window,
            created_at=now,
            expires_at=now + seconds,
            metadata=metadata,
            models=list(models),
        )
        # A batch still reads its input when it expires, to name the lines that have no answer.
        self._files.keep_until(file, batch.expires_at + KEEP_INPUT_S)
        self.save(batch)
        self._batches[batch.id] = batch
        self._forget(tenant)
        return batch

    def _forget(self, tenant: str) -> None:
        """Remove the records of a tenant's oldest batches beyond `MAX_ENDED_BATCHES`."""
        ended = [batch for batch in self.of_tenant(tenant) if batch.status not in OPEN]
        for batch in ended[MAX_ENDED_BATCHES:]:
            del self._batches[batch.id]
            self._record(batch).unlink(missing_ok=True)

    def find(self, tenant: str, name: str) -> Batch | None:
        """A tenant's batch; None if there is none of this id."""
        batch = self._batches.get(name)
        return batch if batch is not None and batch.tenant == tenant else None

    def of_tenant(self, tenant: str) -> list[Batch]:
        """A tenant's batches, the newest first."""
        own = [batch for batch in self._batches.values() if batch.tenant == tenant]
        return sorted(own, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def open(self) -> list[Batch]:
        """All batches that have not ended, the one with the nearest deadline first."""
        return sorted((one for one in self._batches.values() if one.status in OPEN), key=lambda one: one.expires_at)

    def input_of(self, batch: Batch) -> Path | None:
        """The file with a batch's lines; None if it was deleted."""
        file = self._files.find(batch.tenant, batch.input_file_id)
        return None if file is None else self._files.path(file)

    def move(self, batch: Batch, status: Status) -> None:
        """Change the status of a batch, and keep it."""
        batch.status = status
        if status != "validating":
            setattr(batch, f"{status}_at", int(self._clock()))
        self.save(batch)

    def save(self, batch: Batch) -> None:
        """Keep the record of a batch."""
        write_whole(self._record(batch), msgspec.json.encode(batch))

    def validate(self, batch: Batch) -> list[int]:
        """Check all lines of a batch; returns where each begins. `batch.errors` has what is wrong, if anything is."""
        path, seen, offsets = self.input_of(batch), set[str](), list[int]()
        if path is None:
            batch.errors.append(BatchError("input_file_missing", "the input file was deleted"))
            return []
        for number, (offset, line) in enumerate(lines_of(path), 1):
            if number > MAX_LINES:
                # The rest is not read: lines of two bytes would take gigabytes here.
                batch.errors.append(BatchError("too_many_requests", f"the input file has more than {MAX_LINES} lines"))
                return offsets
            offsets.append(offset)
            try:
                check_line(line, batch.endpoint, seen)
            except InvalidRequestError as error:
                if len(batch.errors) < MAX_ERRORS:
                    batch.errors.append(BatchError(error.code, error.message, number, error.param))
        if not offsets:
            batch.errors.append(BatchError("empty_file", "the input file has no lines"))
        return offsets

    def answers(self, batch: Batch) -> dict[int, Answer]:
        """The answers that are kept of a batch, by place; what a crash has cut off is removed."""
        path, found, whole = self._answers(batch), dict[int, Answer](), 0
        if not path.exists():
            return found
        data = path.read_bytes()
        for line in data.splitlines(keepends=True):
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except msgspec.MsgspecError:
                break
            if not line.endswith(b"\n"):
                break
            found.setdefault(answer.place, answer)
            whole += len(line)
        if whole < len(data):
            with path.open("rb+") as file:
                file.truncate(whole)
        return found

    def add(self, batch: Batch, answers: Sequence[Answer]) -> None:
        """Keep answers."""
        data = memoryview(b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers))
        with self._adding, self._answers(batch).open("ab", buffering=0) as file:
            begin = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
                if not begin:
                    sync_folder(self._folder)
            except OSError:
                # Half a line would hide all that come after it.
                file.truncate(begin)
                raise

    def finish(self, batch: Batch, status: Status, rest: dict[int, dict[str, Any]]) -> None:
        """Write the files of a batch, and end it. rest: error lines of requests without an answer, by place."""
        answers = self.answers(batch)
        good = [orjson.dumps(answers[place].line) for place in sorted(answers) if answers[place].succeeded]
        bad = {place: answer.line for place, answer in answers.items() if not answer.succeeded} | rest
        # A disk that is full for a moment must not make it write the first file again and again.
        if batch.output_file_id is None:
            batch.output_file_id = self._write(batch, "output", good)
        if batch.error_file_id is None:
            batch.error_file_id = self._write(batch, "error", [orjson.dumps(bad[place]) for place in sorted(bad)])
        self.move(batch, status)
        self._answers(batch).unlink(missing_ok=True)

    def _write(self, batch: Batch, kind: str, lines: Sequence[bytes]) -> str | None:
        if not lines:
            return None
        data = b"".join(line + b"\n" for line in lines)
        name = f"{batch.id}_{kind}.jsonl"
        file: StoredFile = self._files.new_file(batch.tenant, name, OUTPUT, data)
        return file.id

    def _record(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.json"

    def _answers(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.answers"


def _checked_metadata(metadata: object) -> dict[str, str] | None:
    """`metadata` within OpenAI's limits. Raises InvalidRequestError beyond."""
    if metadata is None:
        return None
    fits = isinstance(metadata, dict) and len(metadata) <= MAX_METADATA
    if not fits or not isinstance(metadata, dict):
        raise InvalidRequestError(f"metadata must be an object with up to {MAX_METADATA} strings", param="metadata")
    for name, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_CHARS or len(name) > MAX_METADATA_KEY_CHARS:
            message = f"metadata has names of up to {MAX_METADATA_KEY_CHARS} and strings of up to {MAX_METADATA_CHARS}"
            raise InvalidRequestError(f"{message} characters", param="metadata")
    return metadata
