"""Finds which schema of a grammar is refused, and where in it: a client may have sent dozens of tools.

The server adds a comment to each `%json` rule that names its source.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

RULE = re.compile(r"[^\n:]*: %json (\{.*\}) // ([^\n]*)")
MAX_TRIES = 200
"""The most parts that are compiled separately to find the refused one."""

ErrorOf = Callable[[str], str]
"""What is wrong with a grammar, "" for nothing."""


def explain_refusal(text: str, reason: str, error_of: ErrorOf) -> str:
    """Return the error and place of the first schema in `text` that is refused by itself, else `reason`."""
    for found in RULE.finditer(text):
        try:
            schema = json.loads(found[1])
        except (ValueError, RecursionError):  # in a grammar that a client wrote itself
            continue
        own = error_of(_grammar(schema))
        if own:
            pointer = _pointer(schema, own, error_of)
            said = f"{found[2]}{f' at {pointer}' if pointer else ''}: {in_words_of_the_schema(own)}"
            return said + _cure(found[2], schema, own, error_of)
    return reason


def in_words_of_the_schema(reason: str) -> str:
    """A reason of the library in words of JSON Schema."""
    if found := re.search(r"Unimplemented keys: (\[.*\])", reason):
        names = [json.dumps(name) for name in json.loads(found[1])]
        one = len(names) == 1
        return f"the keyword{'' if one else 's'} {' and '.join(names)} {'is' if one else 'are'} not supported"
    if found := re.match(r"regex parse error:\n *(.*)\n(?:.*\n)*error: (.*)", reason):
        return f"pattern {json.dumps(found[1])}: {found[2]}"
    if "oneOf constraints are not supported" in reason:
        return "the options of oneOf are not known to exclude each other; anyOf takes them"
    if found := re.match(r"(?:Resource|Pointer) '([^']*)'", reason):
        return f"the reference {json.dumps(found[1])} cannot be resolved"
    return reason


def _cure(source: str, schema: dict[str, Any], reason: str, error_of: ErrorOf) -> str:
    """What the client may change so that the schema is taken, "" if nothing is known."""
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    if options.get("lenient"):
        return ""
    dropped = any(word in reason for word in ("look-around", "backreferences"))
    if not dropped and error_of(_grammar({**schema, "x-guidance": {**options, "lenient": True}})):
        return ""
    if source.startswith(("response_format", "tools", "text", "output")):
        return '; with "strict": false it is not enforced'
    return "" if dropped else '; with "x-guidance": {"lenient": true} in the schema it is not enforced'


def _grammar(schema: Any) -> str:
    return "start: %json " + json.dumps(schema, ensure_ascii=False)


def _pointer(root: dict[str, Any], reason: str, error_of: ErrorOf) -> str:
    """The JSON pointer of the deepest part of a schema that is refused for the same reason, "" for all of it."""
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    tries = iter(range(MAX_TRIES))

    def fails(part: dict[str, Any]) -> bool:
        return next(tries, None) is not None and error_of(_grammar({**shared, **part})) == reason

    schema, pointer = root, ""
    while found := next(((step, part) for step, part in _parts(schema) if fails(part)), None):
        pointer, schema = pointer + found[0], found[1]
    return pointer


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (step of the pointer, schema) of the direct subschemas."""
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        inner = schema.get(name)
        for key, part in inner.items() if isinstance(inner, dict) else ():
            if isinstance(part, dict):
                yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in ("items", "additionalProperties", "not"):
        part = schema.get(name)
        if isinstance(part, dict):
            yield f"/{name}", part
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        for place, part in enumerate(inner if isinstance(inner, list) else ()):
            if isinstance(part, dict):
                yield f"/{name}/{place}", part
