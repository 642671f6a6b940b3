"""Converts tool call arguments to JSON: plain text by the tool's schema, and JSON text that the model wrote."""

import json
from collections.abc import Mapping
from typing import Any

import orjson


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    kind = schema.get("type")
    if isinstance(kind, str):
        found.add(kind)
    elif isinstance(kind, list):
        found.update(word for word in kind if isinstance(word, str))
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    values = schema.get("enum")
    if not found and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found.add("string")
    return found


def parameter_schema(parameters: Any, key: str) -> Any:
    """The schema of one parameter in a tool's `parameters`, None if there is none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def is_text(schema: Any) -> bool:
    """Whether a value is always a string, so that it can be streamed before its end."""
    return types_of(schema) == {"string"}


def as_json(text: str, schema: Any) -> str:
    """The JSON text of a value that was written as plain text.

    Text that is a JSON value of an allowed type is unchanged; everything else becomes a string.
    """
    types = types_of(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        word = text.strip()
        if types != {"string"} and word in ("True", "False", "None"):
            return {"True": "true", "False": "false", "None": "null"}[word]
        return json.dumps(text, ensure_ascii=False)
    if types and not types & _types_of_value(value):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _types_of_value(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return set()
        case list():
            return {"array"}
    return {"object"}


def loads_lenient(text: str) -> Any:
    """Parse JSON. Lone surrogates become question marks, and numbers beyond 64 bits become floats, because neither can
    be serialized again. Raises ValueError or RecursionError for invalid JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        value = json.loads(text, strict=False)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
