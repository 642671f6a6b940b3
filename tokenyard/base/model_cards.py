"""The answer to `GET /v1/models`, in a form that OpenAI's and Anthropic's clients both read."""

from collections.abc import Sequence
from typing import Any


def list_of_models(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one page of a list of models."""
    return {
        "object": "list",
        "data": list(cards),
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }
