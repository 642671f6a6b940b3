"""What `/v1/files` and `/v1/batches` do, for the server of an engine and for a router."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenyard.base import InvalidRequestError
from tokenyard.batch.batch_runner import Ask, BatchRunner, Room
from tokenyard.batch.batch_store import OPEN, Batch, BatchFields, BatchStore
from tokenyard.batch.file_store import Clock, FileStore, StoredFile, lock_folder
from tokenyard.batch.upload import Upload, storing

FLAG = "--file-storage-path"
MAX_FILES_A_PAGE, MAX_BATCHES_A_PAGE, BATCHES_A_PAGE = 10_000, 100, 20
"""OpenAI's limits and default of `limit`."""


class BatchApi:
    """The files and batches in a folder, which belongs to this process."""

    def __init__(self, folder: Path, max_bytes: int, ask: Ask, room: Room, clock: Clock = time.time) -> None:
        """max_bytes: what the uploads of one tenant may take. Raises ConfigError for a folder that cannot be used."""
        self._lock = lock_folder(folder, FLAG)
        self.files = FileStore(folder / "files", max_bytes, clock)
        self._store = BatchStore(folder / "batches", self.files, clock)
        self.runner = BatchRunner(self._store, ask, room, clock)

    def upload(self, tenant: str, content_type: str) -> Upload:
        """What reads the form of a new file. Raises InvalidRequestError for a body of another type."""
        return Upload(self.files, tenant, content_type)

    def list_files(
        self, tenant: str, *, purpose: str = "", limit: int = MAX_FILES_A_PAGE, after: str = "", order: str = "desc"
    ) -> dict[str, Any]:
        """A page of a tenant's files. Raises InvalidRequestError."""
        found = [file for file in self.files.of_tenant(tenant) if purpose in ("", file.purpose)]
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", param="order")
        return _page(
            [file.public() for file in (found if order == "desc" else found[::-1])], limit, MAX_FILES_A_PAGE, after
        )

    def file(self, tenant: str, name: str) -> StoredFile:
        """A tenant's file. Raises InvalidRequestError (not_found)."""
        found = self.files.find(tenant, name)
        if found is None:
            raise InvalidRequestError(f"there is no file {name[:100]!r}", param="file_id", code="not_found")
        return found

    def content(self, tenant: str, name: str) -> Path:
        """Where the content of a tenant's file is. Raises InvalidRequestError (not_found)."""
        return self.files.path(self.file(tenant, name))

    def delete_file(self, tenant: str, name: str) -> dict[str, Any]:
        """Delete a file. Raises InvalidRequestError for one that is not there and one that a batch still reads."""
        found = self.file(tenant, name)
        if any(batch.input_file_id == name for batch in self._store.open()):
            raise InvalidRequestError("a batch reads this file; cancel it first", code="file_in_use")
        self.files.delete(found)
        return {"id": name, "object": "file", "deleted": True}

    def create(self, tenant: str, fields: BatchFields, models: Iterable[str] = ()) -> dict[str, Any]:
        """Have the lines of a file answered. models: those that the lines may name; empty for all.

        Raises InvalidRequestError for wrong fields, and OverloadedError where the disk does not take it.
        """
        with storing():
            batch = self._store.create(tenant, fields, sorted(models))
        self.runner.wake()
        return batch.public()

    def list_batches(self, tenant: str, *, limit: int = BATCHES_A_PAGE, after: str = "") -> dict[str, Any]:
        """A page of a tenant's batches, the newest first. Raises InvalidRequestError."""
        found = [batch.public() for batch in self._store.of_tenant(tenant)]
        return _page(found, limit, MAX_BATCHES_A_PAGE, after)

    def batch(self, tenant: str, name: str) -> Batch:
        """A tenant's batch. Raises InvalidRequestError (not_found)."""
        found = self._store.find(tenant, name)
        if found is None:
            raise InvalidRequestError(f"there is no batch {name[:100]!r}", param="batch_id", code="not_found")
        return found

    def cancel(self, tenant: str, name: str) -> dict[str, Any]:
        """Answer no further lines of a batch; what is answered stays, in its files.

        Raises InvalidRequestError for one that is not there and one that has ended, and OverloadedError.
        """
        found = self.batch(tenant, name)
        if found.status not in OPEN:
            raise InvalidRequestError(f"the batch has ended: it is {found.status}", code="batch_ended")
        if found.status in ("validating", "in_progress"):
            with storing():
                self._store.move(found, "cancelling")
            self.runner.wake()
        return found.public()


def _page(found: list[dict[str, Any]], limit: int, most: int, after: str) -> dict[str, Any]:
    """One page of a list, as OpenAI has it. Raises InvalidRequestError for a limit out of range or an unknown id."""
    if not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must be 1 to {most}", param="limit")
    if after:
        ids = [one["id"] for one in found]
        if after not in ids:
            raise InvalidRequestError(f"there is nothing with the id {after[:100]!r}", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
