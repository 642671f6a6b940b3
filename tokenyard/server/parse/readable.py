"""JSON that a model has written, as values that can be written again."""

import json
from typing import Any

import orjson


def readable(text: str) -> Any:
    """The value of a JSON text: half characters (lone surrogates) become question marks, and numbers beyond 64 bits
    floats, as neither can be written again. Raises ValueError or RecursionError for what is no JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        value = json.loads(text, strict=False)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
