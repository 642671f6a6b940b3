"""Refuses schemas that are too large to compile, with the place in the schema."""

from collections.abc import Mapping
from typing import Any

from tokenyard.base import InvalidRequestError

MAX_OPTIONAL = 1000
"""Optional properties of one object. The work grows by the square of their number: 0.2 s and masks of 30 ms for a
thousand.
"""

MAX_DEPTH = 100
"""Levels of a schema; llguidance reads JSON down to 128."""


def check_size(schema: Any, param: str) -> None:
    """Raise InvalidRequestError for a schema that is nested too deeply or has too many optional properties."""
    left: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while left:
        value, path = left.pop()
        if len(path) > MAX_DEPTH:
            message = f"{param} is nested more than {MAX_DEPTH} levels deep at {pointer(path)}"
            raise InvalidRequestError(message, param=param)
        if isinstance(value, Mapping):
            _check_properties(value, path, param)
            left += ((inner, (*path, str(key))) for key, inner in value.items() if isinstance(inner, Mapping | list))
        elif isinstance(value, list):
            left += (
                (inner, (*path, str(place))) for place, inner in enumerate(value) if isinstance(inner, Mapping | list)
            )


def _check_properties(schema: Mapping[str, Any], path: tuple[str, ...], param: str) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or len(properties) <= MAX_OPTIONAL:
        return
    optional = len(properties) - len(required if isinstance(required, list) else ())
    if optional > MAX_OPTIONAL:
        message = f"{param} has {optional} optional properties at {pointer(path)}; at most {MAX_OPTIONAL} are taken"
        raise InvalidRequestError(message, param=param)


def pointer(path: tuple[str, ...]) -> str:
    """A JSON pointer (RFC 6901), truncated if it is long."""
    steps = "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in path[:8])
    return (steps[:200] or "/") + ("/..." if len(path) > 8 else "")
