"""Detects the format of a trace by its first lines, if none is given."""

from itertools import islice
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.traces.csv_formats import AZURE, BURSTGPT, VIDUR, csv_values
from tokenyard.sim.traces.trace_files import json_object, read_lines, read_members

LINES_CHECKED = 50
SESSION_HEAD_BYTES = 4096
"""The fields of a session of kv-cache-tester come before its requests."""
_JSON_FIELDS = (
    ("mooncake-sessions", {"session_id", "input_length", "output_length", "hash_ids"}),
    ("llmservingsim", {"arrival_time_ns", "sub_requests"}),
    ("genai-spans", {"resourceSpans"}),
    ("bailian", {"chat_id", "input_length", "output_length", "hash_ids"}),
    ("mooncake", {"input_length", "output_length", "hash_ids"}),
    ("vllm-measured", {"input_tok_ids", "output_toks"}),
    ("lmcache-agent", {"input", "output", "session_id"}),
    ("tokenyard-log", {"logger", "message"}),
    ("tokenyard", {"arrival_s", "output_tokens"}),
    ("openai-jsonl", {"timestamp", "body"}),
    ("openai-jsonl", {"timestamp", "messages"}),
    ("openai-jsonl", {"timestamp", "prompt"}),
)
_COLUMNS = (("azure", AZURE), ("burstgpt", BURSTGPT), ("vidur", VIDUR))


def detect_format(path: Path) -> str:
    """The name of the format. Raises ConfigError if the file cannot be read or its first lines fit none."""
    found, array = _of_members(path), False
    if not found and not path.is_dir():
        for place, (where, line) in enumerate(islice(read_lines(path), LINES_CHECKED)):
            array = array or (place == 0 and line.startswith("["))
            found = _of_json(where, line) if line.lstrip().startswith("{") else ""
            if found or (place == 0 and (found := _of_table(where, line))):
                break
    if not found and array:
        raise ConfigError(f"{path} is one JSON array; write one object a line instead (jq -c '.[]')")
    if not found:
        raise ConfigError(f"the format of {path} is not clear from its first lines; say which it is by --trace-format")
    return found


def _of_members(path: Path) -> str:
    """The format of a folder or archive with client models or sessions, "" for anything else."""
    if not (path.is_dir() or ".tar" in path.suffixes or path.suffix == ".tgz"):
        return ""
    if next(read_members(path, "-trace.csv"), None):
        return "servegen"
    name, raw = next(read_members(path, ".json"), ("", b""))
    if b'"hash_id_scope"' in raw[:SESSION_HEAD_BYTES]:
        return "kv-cache-tester"
    name, raw = next(read_members(path, ".jsonl"), ("", b""))
    found = _of_json(name, raw.partition(b"\n")[0].decode("utf-8-sig", "replace"))
    return found if found == "lmcache-agent" else ""


def _of_json(where: str, line: str) -> str:
    try:
        record: dict[str, Any] = json_object(line, where)
    except ConfigError:
        return ""
    return next((name for name, fields in _JSON_FIELDS if record.keys() >= fields), "")


def _of_table(where: str, line: str) -> str:
    try:
        header = {value.strip().lower() for value in csv_values(where, line)}
    except ConfigError:
        return ""
    return next((name for name, columns in _COLUMNS if header >= {column.lower() for column in columns}), "")
