"""Chat answers with tool calls and reasoning: messages, stream deltas, finish reasons and usage."""

from collections.abc import Sequence
from typing import Any

from tokenyard.server.http.generate import CompletionOutput
from tokenyard.server.parse.events import (
    ContentText,
    Event,
    ParsedMessage,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)


def chat_message(message: ParsedMessage) -> dict[str, Any]:
    """The message of a whole answer."""
    fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return fields


def chat_deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Stream deltas for parser events; adjacent events of one kind are one delta."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        match event:
            case ContentText(text):
                _join(deltas, "content", text)
            case ReasoningText(text):
                _join(deltas, "reasoning_content", text)
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            case ToolCallArguments(index, text):
                last = deltas[-1].get("tool_calls", []) if deltas else []
                if last and last[0]["index"] == index:
                    last[0]["function"]["arguments"] += text
                else:
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return deltas


def _join(deltas: list[dict[str, Any]], name: str, text: str) -> None:
    if deltas and name in deltas[-1]:
        deltas[-1][name] += text
    else:
        deltas.append({name: text})


def chat_reason(reason: str, message: ParsedMessage, *, named: bool) -> str:
    """The finish_reason of an answer.

    A truncated answer keeps its reason even if it called a tool; a call of the tool that the client named ends with
    "stop", as in OpenAI's API.
    """
    return "tool_calls" if reason == "stop" and message.calls and not named else reason


def reasoning_usage(answers: Sequence[CompletionOutput]) -> dict[str, Any]:
    """The reasoning tokens in usage.completion_tokens_details."""
    return {"reasoning_tokens": sum(map(reasoning_tokens, answers))}


def prediction_usage(answers: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Accepted and rejected prediction tokens in usage.completion_tokens_details."""
    ends = [answer.finish for answer in answers if answer.finish is not None]
    verified, accepted = sum(end.draft_tokens for end in ends), sum(end.accepted_draft_tokens for end in ends)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": verified - accepted}


def reasoning_tokens(answer: CompletionOutput) -> int:
    """The number of reasoning tokens of an answer.

    They are counted in the text, which may be cut in other tokens than the model's: never more than the answer has.
    """
    return 0 if answer.reader is None else min(answer.reader.reasoning_tokens, answer.completion_tokens)


def has_tool_calls(answer: CompletionOutput) -> bool:
    """Whether an answer calls a tool."""
    return answer.reader is not None and bool(answer.reader.message.calls)
