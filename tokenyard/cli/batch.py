"""OpenAI's batch files: one request per input line and one answer per output line, matched by `custom_id`."""

import asyncio
import json
import sys
import uuid
from collections.abc import Sequence
from typing import Any, TextIO

from tokenyard.base import ConfigError
from tokenyard.base.admin_paths import is_admin_path
from tokenyard.cli.answer_file import AnswerFile
from tokenyard.local import LocalApi
from tokenyard.offline import LLM

AT_ONCE = 1024
"""Requests open at the same time; the scheduler decides how many of them run."""

BatchLine = dict[str, Any]


def is_batch_line(content: Any) -> bool:
    """Whether a JSON line is a request of a batch file."""
    return isinstance(content, dict) and "body" in content and "url" in content


def check_batch_line(content: BatchLine, where: str) -> BatchLine:
    """Return the line unchanged. Raises ConfigError if it is not a valid request."""
    if not isinstance(content.get("custom_id"), str):
        raise ConfigError(f"{where}: custom_id must be a string, by which its answer is found")
    if content.get("method", "POST") != "POST" or not isinstance(content["url"], str):
        raise ConfigError(f"{where}: method must be POST and url a path such as /v1/chat/completions")
    if not isinstance(content["body"], dict) or content["body"].get("stream"):
        raise ConfigError(f"{where}: body must be an object, without stream")
    path = _path(content["url"])
    if is_admin_path(path):
        # A line that pauses the engine would block the whole file.
        raise ConfigError(f"{where}: {path} steers a server; a batch asks for answers only")
    return content


def check_ids(lines: Sequence[BatchLine]) -> None:
    """Raise ConfigError if two lines have the same id."""
    seen: set[str] = set()
    for line in lines:
        if line["custom_id"] in seen:
            raise ConfigError(f"the custom_id {line['custom_id']!r} stands on two lines")
        seen.add(line["custom_id"])


def _path(url: str) -> str:
    """The path of a URL. A bare path is returned unchanged."""
    return "/" + url.split("://", 1)[1].partition("/")[2] if "://" in url else url


def answer_batch(llm: LLM, lines: Sequence[BatchLine], output: AnswerFile | TextIO) -> int:
    """Answer the lines without an answer and write each when it completes; returns how many failed."""
    places = output.missing if isinstance(output, AnswerFile) else list(range(len(lines)))
    failed = asyncio.run(_answer_all(LocalApi(llm), lines, places, output))
    if isinstance(output, AnswerFile):
        output.finish()
    print(f"{len(places) - failed} requests answered, {failed} failed", file=sys.stderr)
    return failed


async def _answer_all(
    api: LocalApi, lines: Sequence[BatchLine], places: Sequence[int], output: AnswerFile | TextIO
) -> int:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(place: int) -> bool:
        line = lines[place]
        async with room:
            status, body = await api.whole("POST", _path(line["url"]), line["body"])
        response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": json.loads(body)}
        answer = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line["custom_id"], "response": response}
        record = {**answer, "error": None}
        if isinstance(output, AnswerFile):
            output.add(place, record)
        else:
            output.write(json.dumps(record, ensure_ascii=False) + "\n")
            output.flush()
        return status >= 400

    return sum(await asyncio.gather(*(one(place) for place in places)))
