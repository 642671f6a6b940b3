"""Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.base.version import __version__
from tokenyard.server.http.generate import CompletionOutput
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.http.routes import Routes
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.ollama.entries import capabilities, list_entry, loaded_entry, shown
from tokenyard.server.openai.completions import PreparedRequest, prepare_chat, prepare_completion, write_answer
from tokenyard.server.parse.argument_types import loads_lenient
from tokenyard.server.parse.events import ContentText, Event, ParsedToolCall, ReasoningText
from tokenyard.server.prompts import check_chat_body
from tokenyard.server.protocol import ChatRequest, CompletionRequest, ContinuationFields, parse_body

routes = Routes("/api")

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
)
"""Options that have the same name elsewhere."""


@dataclass(kw_only=True)
class OllamaFields(ContinuationFields):
    """Fields that chat and generate share."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None


@dataclass(kw_only=True)
class OllamaChat(OllamaFields):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(kw_only=True)
class OllamaGenerate(OllamaFields):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    template: str | None = None
    raw: bool | None = None


async def chat(call: RequestContext) -> None:
    """Answer a chat of Ollama's API."""
    began_ns = time.monotonic_ns()
    check_chat_body(call)
    body = await parse_body(call.body, OllamaChat)
    if not body.messages:
        await _loaded(call, chat=True)
        return
    request = ChatRequest(messages=[_message(message) for message in body.messages], tools=body.tools or None)
    _take_fields(request, body)
    if body.think is not None:
        request.chat_template_kwargs = {"enable_thinking": bool(body.think)}
        if isinstance(body.think, str):
            request.reasoning_effort = body.think
        request.separate_reasoning = True
    await _answer(call, await prepare_chat(call, request), body, began_ns, chat=True)


async def generate(call: RequestContext) -> None:
    """Answer a prompt of Ollama's API."""
    began_ns = time.monotonic_ns()
    body = await parse_body(call.body, OllamaGenerate)
    for name in ("suffix", "images", "template"):
        if getattr(body, name):
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
    if not body.prompt:
        await _loaded(call, chat=False)
        return
    if body.raw or not call.state.style.has_template:
        plain = CompletionRequest(prompt=body.prompt)
        _take_fields(plain, body)
        job = await prepare_completion(call, plain)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        request = ChatRequest(messages=[*system, {"role": "user", "content": body.prompt}])
        _take_fields(request, body)
        if body.think is not None:
            request.chat_template_kwargs = {"enable_thinking": bool(body.think)}
        job = await prepare_chat(call, request)
    await _answer(call, job, body, began_ns, chat=False)


def _take_fields(request: ChatRequest | CompletionRequest, body: OllamaFields) -> None:
    """Copy the options. Those about the machine, such as num_ctx, have no effect."""
    options = body.options or {}
    request.model = (body.model or "").removesuffix(":latest") or None
    request.stream = body.stream is not False
    request.output_ids, request.return_token_ids = body.output_ids, body.return_token_ids
    for name in SAMPLING:
        if options.get(name) is not None:
            _check_option(name, options[name])
            setattr(request, name, options[name])
    if options.get("repeat_penalty") is not None:
        _check_option("repeat_penalty", options["repeat_penalty"])
        request.repetition_penalty = options["repeat_penalty"]
    most = options.get("num_predict")
    if most is not None and type(most) is not int:
        raise InvalidRequestError("options.num_predict must be a whole number", param="options")
    # Ollama writes on until the end of the context for -1 and -2.
    request.max_tokens = most if most is not None and most >= 0 else None
    if body.format == "json":
        request.response_format = {"type": "json_object"}
    elif isinstance(body.format, dict):
        request.response_format = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format:
        raise InvalidRequestError('format must be "json" or a JSON schema', param="format")


def _check_option(name: str, value: Any) -> None:
    """Raise InvalidRequestError for an option of a wrong type."""
    if name == "stop":
        fits = isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    elif name in ("top_k", "seed"):
        fits = type(value) is int
    else:
        fits = type(value) in (int, float)
    if not fits:
        raise InvalidRequestError(f"options.{name} is of a wrong type", param="options")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    if message.get("images"):
        raise InvalidRequestError("images are not supported by this server", param="messages", code="unsupported")
    made: dict[str, Any] = {name: message[name] for name in ("role", "content", "thinking") if name in message}
    if message.get("role") == "tool":
        made["name"] = message.get("tool_name") or message.get("name") or ""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_call(call, place) for place, call in enumerate(calls)]
    return made


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequestError("tool_calls must hold functions", param="messages")
    return {"id": f"call_{place}", "type": "function", "function": function}


class OllamaWriter:
    """Writes one answer as lines of JSON, or as one."""

    def __init__(self, model: str, began_ns: int, *, chat: bool) -> None:
        self._head = {"model": model}
        self._chat = chat
        self._began_ns = began_ns
        self._content = self._thinking = ""

    def pieces(self, answer: CompletionOutput, events: Sequence[Event]) -> bytes:
        """The lines of a stream for new output. Calls come with the last one, as they are objects in this API."""
        content, thinking = _texts(events)
        self._content += content
        self._thinking += thinking
        lines = [self.line(content, thinking)] if content or thinking else []
        if answer.finish is not None:
            lines.append({**self.line("", "", _calls(answer)), **self.last(answer)})
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def replay(self, answer: CompletionOutput, events: Sequence[Event]) -> None:
        """Take output that the client already has."""

    def whole(self, answer: CompletionOutput) -> dict[str, Any]:
        """The answer in one line."""
        return {**self.line(self._content, self._thinking, _calls(answer)), **self.last(answer)}

    def line(self, content: str, thinking: str, calls: Sequence[ParsedToolCall] = ()) -> dict[str, Any]:
        """One line, of an answer that goes on."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        if not self._chat:
            more = {"thinking": thinking} if thinking else {}
            return {**self._head, "created_at": now, "response": content, **more, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"function": {"index": place, "name": call.name, "arguments": _arguments(call.arguments)}}
                for place, call in enumerate(calls)
            ]
        return {**self._head, "created_at": now, "message": message, "done": False}

    def last(self, answer: CompletionOutput) -> dict[str, Any]:
        """Fields of the last line."""
        finish = answer.finish
        assert finish is not None
        return {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            # Not in Ollama's API: which of them were in the prefix cache.
            "prompt_eval_cached_count": answer.cached_tokens,
            "prompt_eval_duration": max(0, finish.first_token_ns - finish.admitted_ns),
            "eval_count": answer.completion_tokens,
            "eval_duration": max(0, finish.finished_ns - finish.first_token_ns),
        }


def _arguments(text: str) -> Any:
    """Arguments, which are objects in this API; those of a cut-off call are none."""
    try:
        value = loads_lenient(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def _answer(call: RequestContext, job: PreparedRequest, body: OllamaFields, began_ns: int, *, chat: bool) -> None:
    """Run a job and write its answer, as lines or as one."""
    writer = OllamaWriter(job.head["model"], began_ns, chat=chat)
    answer = await write_answer(call, job, writer)
    if body.stream is False:
        await call.reply.whole(orjson.dumps(writer.whole(answer)))


def _texts(events: Sequence[Event]) -> tuple[str, str]:
    """(content, thinking) of some events."""
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    return content, "".join(event.text for event in events if isinstance(event, ReasoningText))


def _calls(answer: CompletionOutput) -> list[ParsedToolCall]:
    return answer.reader.message.calls if answer.reader is not None else []


async def _loaded(call: RequestContext, *, chat: bool) -> None:
    """The answer to a request without a prompt, by which clients load a model."""
    writer = OllamaWriter(call.state.options.model_name, time.monotonic_ns(), chat=chat)
    await call.reply.whole(orjson.dumps({**writer.line("", ""), "done": True, "done_reason": "load"}))


@routes.get("/version")
async def version() -> dict[str, Any]:
    """The version of this server."""
    return {"version": __version__}


@routes.get("/tags")
async def tags(state: State) -> dict[str, Any]:
    """The models that are there: the one that is served."""
    return {"models": [list_entry(state.options.model_name, state.options.model_facts)]}


@routes.get("/ps")
async def ps(state: State) -> dict[str, Any]:
    """The models that are loaded: the one that is served."""
    facts = state.options.model_facts
    length = state.generator.context_length
    entry = loaded_entry(state.options.model_name, facts, size=facts.size_bytes, context_length=length, expires_s=None)
    return {"models": [entry]}


@routes.post("/show")
async def show(state: State, body: Body) -> dict[str, Any]:
    """What is known of the model."""
    try:
        content = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    name = content.get("model") or content.get("name") if isinstance(content, dict) else None
    state.check_model(str(name or "").removesuffix(":latest"))
    style = state.style
    return shown(
        state.options.model_facts,
        template=style.template,
        context_length=state.generator.context_length,
        capabilities=capabilities(style),
    )
