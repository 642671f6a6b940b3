"""OpenAI's Responses API: `/v1/responses`."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from tokenyard.base import ContextLengthError, InvalidRequestError
from tokenyard.base.response_ids import new_response_id
from tokenyard.server.http.dialects import named_event
from tokenyard.server.http.generate import AddDetails, CompletionOutput, add_cached_tokens_details
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.openai.chat_output import reasoning_tokens
from tokenyard.server.openai.compaction import (
    ASK_FOR_SUMMARY,
    MAX_SUMMARY_TOKENS,
    SUMMARY_FOLLOWS,
    compaction_item,
    messages_of_user,
    summary_of,
)
from tokenyard.server.openai.completions import prepare_chat, write_answer
from tokenyard.server.openai.response_tools import ResponseTools, call_of, input_of, read_tools
from tokenyard.server.parse.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tokenyard.server.prompts import chat_prompt, check_chat_body, check_length
from tokenyard.server.protocol import ChatRequest, ContinuationFields, parse_body

Item = dict[str, Any]


@dataclass(kw_only=True)
class ContinuedResponse:
    """What a response that was begun elsewhere keeps.

    id: its id, from which those of its items follow.
    created_at: when it was created (Unix time).
    sequence_number: that of its next event.
    """

    id: str
    created_at: int
    sequence_number: int


@dataclass(kw_only=True)
class ResponsesRequest(ContinuationFields):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    continued_response: ContinuedResponse | None = None


async def responses(call: RequestContext) -> None:
    """Answer a request of OpenAI's Responses API."""
    check_chat_body(call)
    body = await parse_body(call.body, ResponsesRequest)
    for name in ("conversation", "background"):
        if getattr(body, name):
            message = f"{name} is not offered here: send the input, or previous_response_id, and read the answer"
            raise InvalidRequestError(message, param=name, code="unsupported")
    items = _items(call, body)
    tools = read_tools(body.tools)
    chat = _chat(body, items, tools)
    if body.truncation == "auto":
        await _truncate(call, chat)
    job = await prepare_chat(call, chat)
    details = partial(add_cached_tokens_details, call)
    writer = ResponseWriter(
        new_response_id(call.state.boot_id),
        body,
        tools,
        job.head["model"],
        lambda made: _keep(call, body, items, made),
        details,
    )
    if job.reading is not None:
        job.reading.id_seed = writer.response["id"]
    await write_answer(call, job, writer)
    if not body.stream:
        await call.reply.whole(orjson.dumps(writer.response))


async def input_tokens(call: RequestContext) -> None:
    """Count the tokens of the prompt that a request of responses would have."""
    check_chat_body(call)
    body = await parse_body(call.body, ResponsesRequest)
    call.state.check_model(body.model)
    chat = _chat(body, _items(call, body), read_tools(body.tools))
    count = await _count(call, chat)
    await call.reply.whole(orjson.dumps({"object": "response.input_tokens", "input_tokens": count}))


async def compact(call: RequestContext) -> None:
    """Compact a conversation: answer with its messages of the user and an item that holds the model's summary."""
    check_chat_body(call)
    body = await parse_body(call.body, ResponsesRequest)
    if body.stream:
        raise InvalidRequestError("a compaction is not streamed", param="stream")
    items = _items(call, body)
    chat = _chat(body, items, read_tools(body.tools))
    chat.response_format = None
    chat.tool_choice = "none" if chat.tools else None
    if chat.max_completion_tokens is None:
        chat.max_completion_tokens = min(MAX_SUMMARY_TOKENS, max(1, call.manager.context_length // 4))
    await _truncate(call, chat, [{"role": "user", "content": ASK_FOR_SUMMARY}])
    job = await prepare_chat(call, chat)
    writer = ResponseWriter(
        new_response_id(call.state.boot_id),
        body,
        ResponseTools(),
        job.head["model"],
        lambda made: None,
        partial(add_cached_tokens_details, call),
    )
    await write_answer(call, job, writer)
    response = writer.response
    said = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    summary = "".join(said).strip()
    if not summary:
        # Its client would drop the conversation for it.
        tokens = response["usage"]["output_tokens"]
        message = f"the model wrote no summary in {tokens} tokens; raise max_output_tokens, or send the conversation"
        raise InvalidRequestError(message, param="max_output_tokens")
    output = [*messages_of_user(items), compaction_item(summary)]
    answer = {name: response[name] for name in ("id", "created_at", "usage")}
    await call.reply.whole(orjson.dumps({**answer, "object": "response.compaction", "output": output}))


async def _count(call: RequestContext, chat: ChatRequest) -> int:
    text = await chat_prompt(call.manager, chat, call.state.style)
    return len(await call.manager.tokenize(text, False, allow_too_long=True))


async def _truncate(call: RequestContext, chat: ChatRequest, asked: Sequence[Item] = ()) -> None:
    """Drop the oldest turns of a conversation until it fits, with the messages `asked` at its end. Its first message,
    if of the system, and its last turn stay; of that turn, the oldest calls go next, with their results.
    """
    whole = chat.messages
    head = [message for message in whole[:1] if message["role"] == "system"]
    users = [place for place, message in enumerate(whole) if message["role"] == "user"]
    last = users[-1:]
    answers = [place for place, message in enumerate(whole) if message["role"] == "assistant" and [place] > last]
    turn = head + [whole[user] for user in last]
    cuts = [(head, place) for place in users[1:]] + [(turn, place) for place in answers[1:]]
    room = call.manager.context_length - (chat.max_completion_tokens or 1)

    def cut(number: int) -> list[Item]:
        kept, place = cuts[number - 1] if number else ([], 0)
        return [*kept, *whole[place:], *asked]

    few, most = 0, len(cuts)
    while few < most:
        middle = (few + most) // 2
        chat.messages = cut(middle)
        try:
            fits = await _count(call, chat) <= room
        except ContextLengthError:
            fits = False
        few, most = (few, middle) if fits else (middle + 1, most)
    chat.messages = cut(few)


def _items(call: RequestContext, body: ResponsesRequest) -> list[Item]:
    """All input items: those of the previous response, its output, and the new input.

    Raises HttpError if the previous response does not exist, and ContextLengthError if the input is too long.
    """
    if body.input is None and not body.previous_response_id:
        raise InvalidRequestError("input is missing", param="input")
    given = [] if body.input is None else body.input
    own = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if not body.previous_response_id:
        return own
    before = call.state.responses.previous(body.previous_response_id, call.tenant)
    check_length(call, before.size + len(call.body), "previous_response_id")
    items: list[Item] = orjson.loads(before.items) + orjson.loads(before.response)["output"] + own
    return items


def _keep(call: RequestContext, body: ResponsesRequest, items: list[Item], response: Item) -> None:
    """Store a finished response, unless the client opted out."""
    if body.store is not False:
        call.state.responses.put(response, items, call.tenant, call.turn.session if call.turn is not None else "")


def _chat(body: ResponsesRequest, items: list[Item], tools: ResponseTools) -> ChatRequest:
    """Convert the conversation and the parameters to a chat body."""
    conversation: list[dict[str, Any]] = []
    if body.instructions:
        conversation.append({"role": "system", "content": body.instructions})
    for place, item in enumerate(items):
        _add_item(conversation, item, f"input[{place}]")
    chat = ChatRequest(messages=conversation, model=body.model, stream=bool(body.stream))
    chat.max_completion_tokens = body.max_output_tokens
    chat.temperature, chat.top_p, chat.user = body.temperature, body.top_p, body.user
    chat.service_tier = body.service_tier
    chat.parallel_tool_calls = body.parallel_tool_calls
    chat.tools = tools.functions or None
    chat.tool_choice = tools.choice(body.tool_choice)
    chat.output_ids, chat.return_token_ids = body.output_ids, body.return_token_ids
    chat.reasoning_effort = (body.reasoning or {}).get("effort")
    chat.response_format = _format((body.text or {}).get("format"))
    return chat


def _add_item(conversation: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add an input item to the conversation. Reasoning, text and calls of one assistant turn form one message."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            text = _content(item.get("content"), where)
            if role != "assistant":
                conversation.append({"role": role, "content": text})
                return
            turn = _turn(conversation)
            turn["content"] = (turn["content"] or "") + text
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise InvalidRequestError(f"{where}: reasoning must be a list of parts", param="input")
            text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            if text:
                _turn(conversation)["reasoning_content"] = text
        case "function_call" | "custom_tool_call":
            _turn(conversation).setdefault("tool_calls", []).append(call_of(item))
        case "function_call_output" | "custom_tool_call_output":
            text = _content(item.get("output"), where)
            conversation.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": text})
        case "compaction":
            conversation.append({"role": "user", "content": f"{SUMMARY_FOLLOWS}\n{summary_of(item, where)}"})
        case kind:
            raise InvalidRequestError(f"{where}: items of type {kind!r} are not supported here", param="input")


def _turn(conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """The open assistant message of the conversation."""
    if not conversation or conversation[-1]["role"] != "assistant":
        conversation.append({"role": "assistant", "content": None})
    return conversation[-1]


def _content(content: Any, where: str) -> str:
    """The text of an item's content. Raises InvalidRequestError for other kinds."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise InvalidRequestError(f"{where}: only text is supported, not {kind!r}", param="input")
        texts.append(text)
    return "".join(texts)


def _format(form: Any) -> dict[str, Any] | None:
    """Convert text.format to response_format. Raises InvalidRequestError if it is not an object."""
    if not isinstance(form, dict | None):
        raise InvalidRequestError("text.format must be an object", param="text")
    if not form or form.get("type") != "json_schema":
        return form
    inner = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": inner}


class ResponseWriter:
    """Writes one response, as stream events and as a whole.

    Both are built from one list of items, so that their ids are equal. `keep` gets the finished response before its
    last event. `details` adds to the details of its input tokens.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        tools: ResponseTools,
        model: str,
        keep: Callable[[Item], None],
        details: AddDetails,
    ) -> None:
        self._details = details
        self._keep, self._continued, self._tools = keep, body.continued_response, tools
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "service_tier": body.service_tier or "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }
        if tools.warnings:
            self.response["warnings"] = tools.warnings
        if self._continued is not None:
            self.response |= {"id": self._continued.id, "created_at": self._continued.created_at}
        self._number = 0
        self._open: Item | None = None
        self._arguments = ""

    def pieces(self, answer: CompletionOutput, events: Sequence[Event]) -> bytes:
        """The stream events for new output."""
        out = []
        if not self._number:
            out.append(self._event("response.created", response=self.response))
            out.append(self._event("response.in_progress", response=self.response))
        for event in events:
            match event:
                case ContentText(text):
                    out += self._add_text("message", text)
                case ReasoningText(text):
                    out += self._add_text("reasoning", text)
                case ToolCallStart(_, name, call_id):
                    item = self._tools.begun(self._item_id(), call_id, name)
                    self._arguments = ""
                    out += self._begin({**item, "status": "in_progress"})
                case ToolCallArguments(_, text):
                    assert self._open is not None
                    self._arguments += text
                    if self._open["type"] == "function_call":
                        self._open["arguments"] += text
                        out.append(self._item_event("response.function_call_arguments.delta", delta=text))
                case ToolCallEnd():
                    out += self._end_item("completed")
        if answer.finish is not None:
            out += self._end(answer)
        return b"".join(out)

    def replay(self, answer: CompletionOutput, events: Sequence[Event]) -> None:
        """Take output that the client already has."""
        self.pieces(answer, events)
        if self._continued is not None:
            self._number = self._continued.sequence_number

    def _item_id(self) -> str:
        """The id of the next item without its prefix; it follows from that of the response, on any engine."""
        seed = f"{self.response['id']}:{len(self.response['output'])}"
        return hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, payload)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """An event about the open item."""
        assert self._open is not None
        place = len(self.response["output"]) - 1
        return self._event(kind, item_id=self._open["id"], output_index=place, **fields)

    def _begin(self, item: Item) -> list[bytes]:
        out = self._end_item("completed")
        self.response["output"].append(item)
        self._open = item
        place = len(self.response["output"]) - 1
        return [*out, self._event("response.output_item.added", output_index=place, item=item)]

    def _add_text(self, kind: str, text: str) -> list[bytes]:
        out: list[bytes] = []
        if self._open is None or self._open["type"] != kind:
            if kind == "message":
                part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "id": f"msg_{self._item_id()}", "role": "assistant", "content": []}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"type": kind, "id": f"rs_{self._item_id()}", "summary": [], "content": []}
            out = self._begin({**item, "status": "in_progress"})
            assert self._open is not None
            self._open["content"].append(part)
            out.append(self._item_event("response.content_part.added", content_index=0, part=part))
        assert self._open is not None
        self._open["content"][0]["text"] += text
        fields: Item = {"content_index": 0, "delta": text}
        if kind == "message":
            return [*out, self._item_event("response.output_text.delta", **fields, logprobs=[])]
        return [*out, self._item_event("response.reasoning_text.delta", **fields)]

    def _end_item(self, status: str) -> list[bytes]:
        """End the open item, if any."""
        item, out = self._open, []
        if item is None:
            return []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            out.append(self._item_event("response.function_call_arguments.done", **done))
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments)
            out.append(self._item_event("response.custom_tool_call_input.delta", delta=item["input"]))
            out.append(self._item_event("response.custom_tool_call_input.done", input=item["input"]))
        else:
            part = item["content"][0]
            fields: Item = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                out.append(self._item_event("response.output_text.done", **fields, logprobs=[]))
            else:
                out.append(self._item_event("response.reasoning_text.done", **fields))
            out.append(self._item_event("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        place = len(self.response["output"]) - 1
        out.append(self._event("response.output_item.done", output_index=place, item=item))
        self._open = None
        return out

    def _end(self, answer: CompletionOutput) -> list[bytes]:
        assert answer.finish is not None
        whole = answer.finish.reason == "stop"
        status = "completed" if whole else "incomplete"
        out = self._end_item(status)
        self.response["status"] = status
        if not whole:
            reason = "max_output_tokens" if answer.finish.reason == "length" else "content_filter"
            self.response["incomplete_details"] = {"reason": reason}
        self.response["usage"] = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(answer)},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        self._details(self.response["usage"]["input_tokens_details"], answer)
        self._keep(self.response)
        out.append(self._event(f"response.{status}", response=self.response))
        return out
