"""Reading server-sent events in tests."""

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The payloads of a stream; "[DONE]" stays a string."""
    payloads = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
