"""`tokenyard batch`: has a server or a router answer the lines of a file, and waits for the answers."""

import argparse
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import orjson

from tokenyard.base import ConfigError, TokenyardError
from tokenyard.cli.explain import DIRECT, error_message

POLL_S = 1.0
TIMEOUT_S = 60.0
PIECE_BYTES = 1 << 20
ENDED = ("completed", "failed", "cancelled", "expired")
KEY_VARIABLE = "TOKENYARD_API_KEY"


class UnreachableError(TokenyardError):
    """Nothing answers at the address, or a server that does not work now."""

    code = "unreachable"


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `tokenyard batch`."""
    parser.add_argument("file", nargs="?", help="lines of OpenAI's batch format: custom_id, method, url, body")
    parser.add_argument("--id", metavar="BATCH", help="wait for a batch that was submitted before, instead of a file")
    parser.add_argument("--output", metavar="FILE", required=True, help="write the answers to this file as .jsonl")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="server or router [http://127.0.0.1:30000]")
    parser.add_argument("--key", help=f"API key; safer in {KEY_VARIABLE}")
    parser.add_argument("--completion-window", default="24h", metavar="TIME", help="deadline: 90m, 24h or 2d [24h]")


def batch(namespace: argparse.Namespace) -> int:
    """Submit a batch, wait for it and write its answers, failed ones to OUTPUT.errors. Returns 1 if any failed."""
    if bool(namespace.file) == bool(namespace.id):
        raise ConfigError("give a file of lines, or --id of a batch that was submitted before")
    api = _Api(namespace.url.rstrip("/"), namespace.key or os.environ.get(KEY_VARIABLE, ""))
    name = namespace.id or _submit(api, Path(namespace.file), namespace.completion_window)
    try:
        found = _wait(api, name)
    except KeyboardInterrupt:
        print(f"\nthe batch goes on; wait for it with: tokenyard batch --id {name} ...", file=sys.stderr)
        raise
    for error in (found.get("errors") or {}).get("data", []):
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"{where}{error['message']}", file=sys.stderr)
    output = Path(namespace.output)
    errors = output.with_name(output.name + ".errors")
    for file_id, path in ((found["output_file_id"], output), (found["error_file_id"], errors)):
        if file_id:
            api.download(file_id, path)
    counts = found["request_counts"]
    what = f"{name} is {found['status']}: {counts['completed']} of {counts['total']} lines answered"
    print(what + (f", the others are in {errors}" if found["error_file_id"] else ""), file=sys.stderr)
    return 0 if found["status"] == "completed" and not counts["failed"] else 1


def _submit(api: "_Api", path: Path, window: str) -> str:
    """Upload a file and have it answered; returns the id of the batch. Raises TokenyardError."""
    try:
        with path.open("rb") as file:
            first = orjson.loads(next((line for line in file if line.strip()), b"null"))
        endpoint = first["url"]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError(f"{path}, line 1 is no request: it needs custom_id, method, url and body") from None
    uploaded = api.upload(path)
    fields = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    name: str = api.call("POST", "/v1/batches", orjson.dumps(fields))["id"]
    print(f"submitted {name}", file=sys.stderr)
    return name


def _wait(api: "_Api", name: str) -> dict[str, Any]:
    """The batch once it has ended. A server that cannot be reached is asked again: it goes on where it was."""
    shown, gone = "", False
    while True:
        try:
            found = api.call("GET", f"/v1/batches/{name}")
            gone = False
        except UnreachableError as error:
            if not gone:
                print(f"{error.message}; still trying", file=sys.stderr)
            gone = True
            time.sleep(POLL_S)
            continue
        counts = found["request_counts"]
        text = f"{found['status']}: {counts['completed']} of {counts['total']} answered, {counts['failed']} failed"
        if text != shown and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            shown = text
        if found["status"] in ENDED:
            if shown:
                print(file=sys.stderr)
            return found
        time.sleep(POLL_S)


class _Api:
    """OpenAI's API of files and batches, at one address."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """The JSON of an answer. Raises TokenyardError with the server's message."""
        headers = self._headers | ({"content-type": "application/json"} if body else {})
        with self._open(method, path, body, headers) as answer:
            content: dict[str, Any] = orjson.loads(answer.read())
            return content

    def upload(self, path: Path) -> dict[str, Any]:
        """Upload a file piece by piece; returns its file object. Raises TokenyardError."""
        mark = uuid.uuid4().hex
        head = (
            f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{mark}.jsonl"\r\n\r\n'
        ).encode()
        end = f"\r\n--{mark}--\r\n".encode()

        def body() -> Iterator[bytes]:
            yield head
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
            yield end

        size = len(head) + path.stat().st_size + len(end)
        headers = {"content-type": f"multipart/form-data; boundary={mark}", "content-length": str(size)}
        with self._open("POST", "/v1/files", body(), self._headers | headers) as answer:
            content: dict[str, Any] = orjson.loads(answer.read())
            return content

    def download(self, file_id: str, path: Path) -> None:
        """Write the content of a file to `path`. Raises TokenyardError."""
        scratch = path.with_name(f"{path.name}.part")
        with self._open("GET", f"/v1/files/{file_id}/content", None, self._headers) as answer:
            try:
                with scratch.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                    size = file.tell()
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
        # A connection that breaks looks like the end of the file.
        if size != int(answer.headers.get("content-length", size)):
            raise UnreachableError(f"{self._url}: the connection broke before the end of {file_id}")
        scratch.replace(path)

    def _open(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            return DIRECT.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            kind = UnreachableError if error.code >= 500 else TokenyardError
            raise kind(f"{self._url}: {error_message(error)}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"{self._url} cannot be reached: {reason}") from None
