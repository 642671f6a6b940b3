"""`tokenyard cache-check`: says where the prompt of a request leaves that of the one before it, without a server."""

import argparse
import json
from pathlib import Path
from typing import Any

import orjson

from tokenyard.base import ConfigError
from tokenyard.base.prompt_parts import Difference, compare, parts_of_body
from tokenyard.base.sessions import named_session


def cache_check(namespace: argparse.Namespace) -> int:
    """Print the first difference of two bodies. Returns 0 if the later one continues the earlier one, else 1."""
    before, after = _body(namespace.before), _body(namespace.after)
    found = compare(before, after)
    if namespace.json:
        print(json.dumps(_numbers(before, after, found), indent=2))
        return int(found is not None)
    for line in _lines(before, after, found):
        print(line)
    return int(found is not None)


def _body(path: Path) -> dict[str, Any]:
    """A request body. Raises ConfigError for a file that holds none."""
    try:
        fields = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict) or not parts_of_body(fields):
        raise ConfigError(f"{path} holds no request with messages (or input) as a list")
    return fields


def _numbers(before: dict[str, Any], after: dict[str, Any], found: Difference | None) -> dict[str, Any]:
    old, new = parts_of_body(before), parts_of_body(after)
    same = len(old) if found is None else next((at for at, (name, _) in enumerate(old) if name == found.part), 0)
    return {
        "continues": found is None,
        "parts_before": len(old),
        "parts_after": len(new),
        "same_parts": same,
        "same_bytes": sum(len(content) for _, content in old[:same]),
        "bytes_before": sum(len(content) for _, content in old),
        "part": found and found.part,
        "how": found and found.how,
        "before": found and found.before,
        "after": found and found.after,
    }


def _lines(before: dict[str, Any], after: dict[str, Any], found: Difference | None) -> list[str]:
    numbers = _numbers(before, after, found)
    sessions = [named_session(fields, lambda _: None) for fields in (before, after)]
    notes = (
        [] if sessions[0] == sessions[1] else [f"The bodies name two sessions: {sessions[0]!r} and {sessions[1]!r}."]
    )
    if found is None:
        return [
            f"The later prompt continues the earlier one: all {numbers['parts_before']} parts are the same.",
            *notes,
        ]
    share = numbers["same_bytes"] / max(numbers["bytes_before"], 1)
    parts = f"{numbers['same_parts']} of {numbers['parts_before']} parts"
    lines = [
        f"The prompts differ from {found.part} on ({found.how}).",
        f"{parts} are equal, {share:.0%} of the earlier prompt's bytes.",
    ]
    if found.before or found.after:
        lines += [f"  before: {found.before!r}", f"  after:  {found.after!r}"]
    return [*lines, *notes]
