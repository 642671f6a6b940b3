"""Compaction items of the Responses API: a summary of a conversation, in the place of its turns.

OpenAI encrypts what is in them. Here it is the model's summary as JSON in base64, so any engine reads it and the client
may look at it.
"""

import base64
import uuid
from typing import Any

import orjson

from tokenyard.base import InvalidRequestError

MAX_SUMMARY_TOKENS = 4096

ASK_FOR_SUMMARY = (
    "Summarize this conversation for a model that continues it and sees nothing else of it but what the user wrote. Say"
    " what was asked, what was done and decided, which files and facts matter, and what is left to do."
    " Answer with the summary alone and call no tool."
)

SUMMARY_FOLLOWS = "The conversation so far was compacted. Its summary:"


def compaction_item(summary: str) -> dict[str, Any]:
    """The item that holds a summary."""
    content = base64.b64encode(orjson.dumps({"summary": summary})).decode()
    return {"type": "compaction", "id": f"cmp_{uuid.uuid4().hex}", "encrypted_content": content}


def messages_of_user(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the user among input items, as items of an output."""
    found = []
    for item in items:
        if item.get("type", "message") == "message" and item.get("role") == "user":
            content = item.get("content")
            if isinstance(content, str):
                content = [{"type": "input_text", "text": content}]
            named = {"type": "message", "id": item.get("id") or f"msg_{uuid.uuid4().hex}", "status": "completed"}
            found.append({**named, "role": "user", "content": content})
    return found


def summary_of(item: dict[str, Any], where: str) -> str:
    """The summary in an item. Raises InvalidRequestError for one that another service made."""
    try:
        summary = orjson.loads(base64.b64decode(item["encrypted_content"], validate=True))["summary"]
    except (KeyError, TypeError, ValueError):
        summary = None
    if not isinstance(summary, str):
        message = f"{where}: this compaction was not made by this server, which cannot read it; send the conversation"
        raise InvalidRequestError(message, param="input")
    return summary
