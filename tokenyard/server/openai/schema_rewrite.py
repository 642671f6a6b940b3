"""Rewrites JSON schemas into equal ones that the grammar compiler takes.

Schemas of pydantic, zod and MCP servers use keywords that the compiler refuses. Most have an equal form, or are
annotations by the standard. `uniqueItems` is dropped: no grammar can hold an answer to it.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
BACK_REFERENCE = re.compile(r"(?<!\\)(\\\\)*\\([1-9]|k<)")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")

Schema = dict[str, Any]


def rewritten(schema: Mapping[str, Any], *, lenient: bool) -> Schema:
    """Return an equal schema that the compiler takes, as far as there is one.

    A `format` that is not enforced and `uniqueItems` are dropped. With `lenient` so is what else cannot be used:
    patterns with look-around, unknown types and references that lead nowhere.
    """
    found: Schema = _Rewriter(schema, lenient=lenient).of(schema)
    return found


class _Rewriter:
    """Rewrites one schema. `root` resolves references."""

    def __init__(self, root: Mapping[str, Any], *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient

    def of(self, schema: Any) -> Any:
        """Return a subschema rewritten; anything but an object is returned as it is."""
        if not isinstance(schema, Mapping):
            return schema
        found: Schema = {key: self._inner(key, value) for key, value in schema.items()}
        found.pop("uniqueItems", None)
        if found.get("format") not in ENFORCED_FORMATS:
            found.pop("format", None)
        if isinstance(found.get("pattern"), str):
            self._rewrite_pattern(found)
        if "propertyNames" in found:
            _rewrite_names(found)
        if self._lenient:
            self._drop_invalid(found)
        return found

    def _inner(self, key: str, value: Any) -> Any:
        if key in MAPS and isinstance(value, Mapping):
            return {name: self.of(part) for name, part in value.items()}
        if isinstance(value, list) and (key in LISTS or key == "items"):
            return [self.of(part) for part in value]
        return self.of(value) if key in SINGLE else value

    def _rewrite_pattern(self, schema: Schema) -> None:
        """Take look-around out of a pattern, if the format says the same (as in zod's e-mail) or with `lenient`."""
        pattern = schema["pattern"]
        special = LOOK_AROUND.search(pattern) or BACK_REFERENCE.search(pattern)
        if special and (self._lenient or "format" in schema):
            plain = _without_look_around(pattern)
            schema["pattern"] = plain
            if BACK_REFERENCE.search(plain) or not _compiles(plain):
                del schema["pattern"]
        elif self._lenient and not _compiles(pattern):
            del schema["pattern"]

    def _drop_invalid(self, schema: Schema) -> None:
        """Drop what is no JSON schema. Schemas of tools are often written by hand."""
        kinds = schema.get("type")
        named = kinds if isinstance(kinds, list) else [kinds]
        known = [kind for kind in named if isinstance(kind, str) and kind in TYPES]
        if "type" in schema and not known:
            del schema["type"]
        elif isinstance(kinds, list):
            schema["type"] = known
        if not isinstance(schema.get("required", []), list):
            del schema["required"]
        if schema.get("enum") == []:
            del schema["enum"]
        if "$ref" in schema and not self._resolves(schema["$ref"]):
            del schema["$ref"]

    def _resolves(self, reference: Any) -> bool:
        """Whether a reference leads to a place in the schema. Anchors count as if they did."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return False
        part: Any = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and step.isdigit() and int(step) < len(part):
                part = part[int(step)]
            elif isinstance(part, Mapping) and step in part:
                part = part[step]
            else:
                return False
        return True


def _rewrite_names(schema: Schema) -> None:
    """Express `propertyNames` by other keywords: zod's records have it. It stays where it has no equal form."""
    names = schema["propertyNames"]
    if _is_any_string(names):
        del schema["propertyNames"]
        return
    if not isinstance(names, Mapping) or schema.get("patternProperties"):
        return
    value = schema.get("additionalProperties", True)
    own = schema.get("properties") or {}
    stated = {key for key in names if key not in ANNOTATIONS and key != "type"}
    listed = names.get("enum") if stated == {"enum"} else [names.get("const")] if stated == {"const"} else None
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        schema["properties"] = {name: own.get(name, value) for name in listed}
        schema["additionalProperties"] = False
    elif stated == {"pattern"} and not own and not LOOK_AROUND.search(names["pattern"]):
        schema["patternProperties"] = {names["pattern"]: value}
        schema["additionalProperties"] = False
    elif stated and stated <= {"minLength", "maxLength"} and not own:
        bounds = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        schema["patternProperties"] = {rf"^[\s\S]{{{bounds}}}$": value}
        schema["additionalProperties"] = False
    else:
        return
    del schema["propertyNames"]


def _is_any_string(names: Any) -> bool:
    """Whether a schema of names takes every name."""
    if not isinstance(names, Mapping):
        return names is True
    kinds = names.get("type", "string")
    stated = {key for key in names if key not in ANNOTATIONS and key != "type"}
    if stated == {"anyOf"} and isinstance(names["anyOf"], list):
        return any(_is_any_string(option) for option in names["anyOf"])
    return not stated and ("string" in kinds if isinstance(kinds, list) else kinds == "string")


def _without_look_around(pattern: str) -> str:
    """A pattern without its groups of look-around: it matches all that the pattern does, and more."""
    out, place = [], 0
    while place < len(pattern):
        if LOOK_AROUND.match(pattern, place):
            place = _group_end(pattern, place)
        elif pattern[place] == "\\":
            out.append(pattern[place : place + 2])
            place += 2
        elif pattern[place] == "[":
            end = _class_end(pattern, place)
            out.append(pattern[place:end])
            place = end
        else:
            out.append(pattern[place])
            place += 1
    return "".join(out)


def _group_end(pattern: str, place: int) -> int:
    """Where the group that begins at `place` ends."""
    depth = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "[":
            place = _class_end(pattern, place)
            continue
        depth += (char == "(") - (char == ")")
        place += 2 if char == "\\" else 1
        if not depth:
            break
    return place


def _class_end(pattern: str, place: int) -> int:
    """Where the character class that begins at `place` ends."""
    place += 1
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def _compiles(pattern: str) -> bool:
    """Whether a pattern is a regular expression. Compiling it for a grammar would take too long for hostile ones."""
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(re.sub(r"\\[pP](\{\^?\w+\}|\w)", "a", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True
