"""Logged request bodies of OpenAI's chat completions or completions, with a time stamp.

JSON lines with `timestamp` (Unix seconds or ISO 8601) and the body. Detected by `timestamp` with `body`, `messages` or
`prompt`. Not read: all other fields of the body (`model`, `temperature`, `tools`, ...) and the answer's text.
"""

from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.time_stamps import in_seconds, seconds_of
from tokenyard.sim.traces.trace_files import json_object, name_of, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder


def read_openai(path: Path, options: ReadOptions) -> Workload:
    """The requests, whose prompts `options.tokenize` counts.

    The body is the line itself or its field `body`: `messages` (role and text content) or `prompt`. The answer's length
    is `usage.completion_tokens` of the line, of its `response` or of the `body` of that, or `output_tokens`. A line
    without any of them is refused, because a guess would decide the result. `user` is the tenant, `priority` the
    priority; `max_completion_tokens` or `max_tokens` is the client's limit.
    """
    tokenize = options.tokenizer(path)
    builder = WorkloadBuilder(path.name)

    def take(where: str, line: str) -> None:
        record = json_object(line, where)
        body = record["body"] if isinstance(record.get("body"), dict) else record
        ids, output = tokenize(prompt_text(body, where)), _completion_tokens(record, where)
        builder.add(
            where,
            _stamp(record, where),
            len(ids),
            output,
            max_new_tokens=_asked_tokens(body, output, where),
            ids=ids,
            tenant=name_of(body, "user", where),
            priority=whole(body, "priority", where) if body.get("priority") is not None else None,
        )

    return build_workload(builder, options, read_lines(path), take)


def _stamp(record: dict[str, Any], where: str) -> float:
    stamp = record.get("timestamp")
    if isinstance(stamp, str):
        return seconds_of(stamp, where)
    return in_seconds(number(record, "timestamp", where), where)


def prompt_text(body: dict[str, Any], where: str) -> str:
    """The text of a request's prompt or messages. Raises ConfigError if there is none, or something else than text."""
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: the request body has neither messages nor a prompt of text")
    return "".join(f"<|{message.get('role')}|>\n{_message_text(message, where)}\n" for message in messages)


def _message_text(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise ConfigError(f"{where}: a message holds something else than text, whose tokens cannot be counted")
    return "".join(texts)


def _completion_tokens(record: dict[str, Any], where: str) -> int:
    if "output_tokens" in record:
        return whole(record, "output_tokens", where)
    response = _object(record, "response")
    for holder in (record, response, _object(response, "body")):
        usage = _object(holder, "usage")
        if "completion_tokens" in usage:
            return whole(usage, "completion_tokens", where)
    raise ConfigError(f"{where}: the answer's length is missing; give output_tokens or usage.completion_tokens")


def _asked_tokens(body: dict[str, Any], output: int, where: str) -> int | None:
    """The output limit in a body whose answer has `output` tokens; None if there is none."""
    for key in ("max_completion_tokens", "max_tokens"):
        if body.get(key) is not None:
            return max(whole(body, key, where), output, 1)
    return None


def _object(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


OPENAI_JSONL = TraceFormat(
    "openai-jsonl",
    read_openai,
    fields=tuple(frozenset({"timestamp", content}) for content in ("body", "messages", "prompt")),
)
