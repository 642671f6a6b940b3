"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.base.sessions import split_user
from tokenyard.engine.text.chat_messages import alternating
from tokenyard.server.anthropic.client_tools import CLIENT_TOOLS
from tokenyard.server.http.dialects import named_event
from tokenyard.server.http.generate import AddDetails, CompletionOutput, add_cached_tokens_details
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.openai.chat_output import has_tool_calls
from tokenyard.server.openai.completions import prepare_chat, write_answer
from tokenyard.server.parse.argument_types import loads_lenient
from tokenyard.server.parse.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tokenyard.server.prompts import chat_prompt, check_chat_body
from tokenyard.server.protocol import ChatRequest, ContinuationFields, parse_body

BILLING_LINE = "x-anthropic-billing-header"
"""Claude Code writes a line with a number of the request at the very front, which no two prompts would share."""

Block = dict[str, Any]


@dataclass(kw_only=True)
class CountRequest:
    """`POST /v1/messages/count_tokens`, and what it shares with messages."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None


@dataclass(kw_only=True)
class MessagesRequest(CountRequest, ContinuationFields):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


async def messages(call: RequestContext) -> None:
    """Answer a request of Anthropic's Messages API."""
    check_chat_body(call)
    body = await parse_body(call.body, MessagesRequest)
    chat = _chat(body)
    chat.max_tokens, chat.stream = body.max_tokens, bool(body.stream)
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    user = (body.metadata or {}).get("user_id")
    # Without the session that Claude Code has in it: tenants are users, and a session belongs to its tenant.
    chat.user = split_user(user)[0][:256] if isinstance(user, str) else None
    chat.output_ids, chat.return_token_ids = body.output_ids, body.return_token_ids
    job = await prepare_chat(call, chat)
    writer = MessageWriter(job.head["model"], partial(add_cached_tokens_details, call))
    answer = await write_answer(call, job, writer)
    if not body.stream:
        await call.reply.whole(orjson.dumps(writer.whole(answer)))


async def count_tokens(call: RequestContext) -> None:
    """Count the tokens of a prompt with system text and tools, as `/v1/messages` would see it."""
    check_chat_body(call)
    body = await parse_body(call.body, CountRequest)
    call.state.check_model(body.model)
    text = await chat_prompt(call.manager, _chat(body), call.state.style)
    ids = await call.manager.tokenize(text, False, allow_too_long=True)
    await call.reply.whole(orjson.dumps({"input_tokens": len(ids)}))


def _chat(body: CountRequest) -> ChatRequest:
    """The conversation as a chat body."""
    if body.mcp_servers:
        reason = "mcp_servers: this server connects to none; connect them in the client, which sends their tools"
        raise InvalidRequestError(reason, param="mcp_servers", code="unsupported")
    conversation = _system(body.system)
    for place, message in enumerate(body.messages):
        conversation += _converted(message, f"messages[{place}]")
    conversation = alternating(conversation)
    chat = ChatRequest(messages=conversation, model=body.model)
    config = body.output_config or {}
    chat.response_format = _response_format(config.get("format") or body.output_format)
    effort = config.get("effort")
    chat.reasoning_effort = effort if isinstance(effort, str) else None
    continues = bool(conversation) and conversation[-1]["role"] == "assistant"
    if continues and not conversation[-1].get("tool_calls"):
        chat.continue_final_message = True
    chat.tools = [_tool(tool, place) for place, tool in enumerate(body.tools or ())] or None
    chat.tool_choice = _choice(body.tool_choice)
    if (body.tool_choice or {}).get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False
    kind = (body.thinking or {}).get("type")
    if kind is not None:
        chat.chat_template_kwargs = {"enable_thinking": kind != "disabled"}
    return chat


def _response_format(form: Any) -> dict[str, Any] | None:
    """`output_config.format` (`output_format` of the beta) as OpenAI's response_format."""
    match form:
        case None:
            return None
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    raise InvalidRequestError("output_config.format must be of type json_schema, with a schema", param="output_config")


def _system(system: str | list[Block] | None) -> list[dict[str, Any]]:
    """The system message, without the line that differs in each request and would prevent prefix hits."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    texts = [_text(block, "system") for block in blocks]
    lines = [line for text in texts for line in text.split("\n") if not line.startswith(BILLING_LINE)]
    joined = "\n".join(lines).strip("\n")
    return [{"role": "system", "content": joined}] if joined else []


def _converted(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as one or several of a chat: tool results become separate messages."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{where}.role must be user or assistant", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequestError(f"{where}.content must be a string or a list of blocks", param="messages")
    if role == "assistant":
        return [_assistant(content, where)]
    results = [_result(block, where) for block in content if block.get("type") == "tool_result"]
    texts = [_text(block, where) for block in content if block.get("type") != "tool_result"]
    return results + ([{"role": role, "content": "\n".join(texts)}] if texts else [])


def _assistant(content: list[Block], where: str) -> dict[str, Any]:
    """An assistant's message: text, reasoning and calls."""
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for block in content:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _result(block: Block, where: str) -> dict[str, Any]:
    """The result of a tool, as a message."""
    content = block.get("content", "")
    text = "\n".join(_text(part, where) for part in content) if isinstance(content, list) else str(content or "")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": text}


def _text(block: Any, where: str) -> str:
    """The text of a block, or of a document or search result that consists of text, behind its title."""
    match block:
        case {"type": "document" | "search_result", "citations": {"enabled": True}}:
            raise InvalidRequestError(f"{where}: citations are not supported here", param="messages")
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return _titled(block, text)
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return _titled(block, text)
        case {"type": "document", "source": {"type": "content", "content": list(parts)}}:
            return _titled(block, *(_plain(part, where) for part in parts))
        case {"type": "search_result", "content": list(parts)}:
            return _titled(block, *(_plain(part, where) for part in parts))
    return _plain(block, where)


def _plain(block: Any, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    raise InvalidRequestError(f"{where}: only text is supported here, not {kind!r}", param="messages")


def _titled(block: Block, *texts: str) -> str:
    """The texts, one to a line, behind the block's title, source and context."""
    head = (block.get(name) for name in ("title", "source", "context"))
    return "\n".join([*(one for one in head if isinstance(one, str) and one), *texts])


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    """A tool in OpenAI's shape: one of the client's own, or one that Anthropic defines and the client runs."""
    kind = str(tool.get("type") or "custom")
    description, parameters = tool.get("description", ""), tool.get("input_schema")
    defined = CLIENT_TOOLS.get(re.sub(r"_\d{8}$", "", kind))
    if defined is not None:
        description, parameters = description or defined[0], parameters or defined[1]
    elif kind not in ("custom", "function"):
        message = (
            f"tools[{place}]: {kind!r} is not supported: this server runs no tools; offer one that the client runs"
        )
        raise InvalidRequestError(message, param="tools")
    function = {"name": tool.get("name"), "description": description}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """tool_choice in OpenAI's words."""
    match choice:
        case None:
            return None
        case {"type": "auto" | "none" as kind}:
            return str(kind)
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequestError("tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice")


class MessageWriter:
    """Writes one answer: as events of a stream, and as the message that these events add up to.

    details: adds to the usage of an answer that has ended.
    """

    def __init__(self, model: str, details: AddDetails) -> None:
        self._details = details
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._started = False
        self._arguments = ""

    def pieces(self, answer: CompletionOutput, events: Sequence[Event]) -> bytes:
        """The events of a stream for what has come."""
        out = []
        if not self._started:
            self._started = True
            start = {**self.message, "usage": {**_usage(answer), "output_tokens": 0}}
            out.append(named_event("message_start", {"type": "message_start", "message": start}))
        for event in events:
            match event:
                case ContentText(text):
                    out += self._add("text", "text", "text_delta", text)
                case ReasoningText(text):
                    out += self._add("thinking", "thinking", "thinking_delta", text)
                case ToolCallStart(_, name, call_id):
                    out += [*self._close(), self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})]
                case ToolCallArguments(_, text):
                    self._arguments += text
                    out.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case ToolCallEnd():
                    out += self._close()
        if answer.finish is not None:
            out += self._end(answer)
        return b"".join(out)

    def replay(self, answer: CompletionOutput, events: Sequence[Event]) -> None:
        """Take output that the client already has."""
        self.pieces(answer, events)

    def whole(self, answer: CompletionOutput) -> dict[str, Any]:
        """The message, once its answer has ended."""
        return {**self.message, "usage": self._usage(answer)}

    def _usage(self, answer: CompletionOutput) -> dict[str, Any]:
        usage = _usage(answer)
        self._details(usage, answer)
        return usage

    @property
    def _block(self) -> Block | None:
        content = self.message["content"]
        return content[-1] if content and not content[-1].get("_closed") else None

    def _add(self, kind: str, name: str, delta: str, text: str) -> list[bytes]:
        out = []
        if self._block is None or self._block["type"] != kind:
            block = {"type": kind, name: ""} | ({"signature": ""} if kind == "thinking" else {})
            out = [*self._close(), self._open(block)]
        block = self.message["content"][-1]
        block[name] += text
        return [*out, self._delta({"type": delta, name: text})]

    def _open(self, block: Block) -> bytes:
        content = self.message["content"]
        content.append(block)
        self._arguments = ""
        event = {"type": "content_block_start", "index": len(content) - 1, "content_block": block}
        return named_event("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}
        return named_event("content_block_delta", event)

    def _close(self) -> list[bytes]:
        """End the block that is open, if one is."""
        block = self._block
        if block is None:
            return []
        out = []
        if block["type"] == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": ""}))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        block["_closed"] = True
        index = len(self.message["content"]) - 1
        return [*out, named_event("content_block_stop", {"type": "content_block_stop", "index": index})]

    def _end(self, answer: CompletionOutput) -> list[bytes]:
        out = self._close()
        for block in self.message["content"]:
            block.pop("_closed", None)
        reason, sequence = _stop_reason(answer)
        self.message["stop_reason"], self.message["stop_sequence"] = reason, sequence
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage(answer)
        out.append(named_event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage}))
        out.append(named_event("message_stop", {"type": "message_stop"}))
        return out


def _object(text: str) -> Any:
    """Arguments as an object; what a cut-off answer left of them is none."""
    try:
        value = loads_lenient(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stop_reason(answer: CompletionOutput) -> tuple[str, str | None]:
    finish = answer.finish
    assert finish is not None
    if finish.reason == "length":
        return "max_tokens", None
    if isinstance(finish.matched, str):
        return "stop_sequence", finish.matched
    return ("tool_use" if has_tool_calls(answer) else "end_turn"), None


def _usage(answer: CompletionOutput) -> dict[str, Any]:
    """Token counts; prefix cache hits are counted separately."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }
