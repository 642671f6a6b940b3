"""Prompts as clients write them: messages, text, token ids, and lists of those."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import ContextLengthError, Int32Array, InvalidRequestError
from tokenyard.server.engine_client import GenerateClient
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.parse.output_style import OutputStyle
from tokenyard.server.protocol import ChatRequest, CompletionRequest

MAX_TOKEN_ID = 2**31 - 1
CHAT_BODY_BYTES = 16
"""Maximum bytes of a chat body per byte of the longest prompt: escapes, field names, tools."""

MIN_CHAT_BODY_BYTES = 1_000_000


@dataclass(slots=True)
class CompletionPrompt:
    """One prompt: its text or its token ids (int32[n]), and the text that `echo` repeats."""

    text: str | None = None
    ids: Int32Array | None = None
    echo: str = ""


def check_chat_body(call: RequestContext) -> None:
    """Raise ContextLengthError for a chat body far larger than any prompt, before it is parsed."""
    check_length(call, len(call.body), "messages")


def check_length(call: RequestContext, size: int, param: str) -> None:
    """Raise ContextLengthError for a conversation of `size` bytes of JSON if that is far more than any prompt."""
    max_bytes = max(MIN_CHAT_BODY_BYTES, CHAT_BODY_BYTES * call.manager.max_prompt_bytes)
    if size > max_bytes:
        reason = f"with prompts of at most {call.manager.max_prompt_bytes} bytes, at most {max_bytes} are accepted"
        raise _too_long(call.manager.context_length, f"the body has {size} bytes; {reason}", param)


def _too_long(context_length: int, reason: str, param: str | None) -> ContextLengthError:
    """The error for a prompt whose tokens are not counted, as there are surely more than fit."""
    message = (
        f"This model's maximum context length is {context_length} tokens. However, your prompt is longer: {reason}"
    )
    return ContextLengthError(message, param=param, prompt_tokens=context_length, most=context_length - 1)


def check_messages(messages: list[dict[str, Any]], max_prompt_tokens: int) -> list[dict[str, Any]]:
    """The messages as they are. Raises InvalidRequestError for one without a role, or with content that is not text,
    and ContextLengthError for more messages and parts than tokens fit.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    pieces = len(messages)
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where}.role must be a string", param="messages")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise InvalidRequestError(f"{where}.content must be a string or a list of parts", param="messages")
        parts = content if isinstance(content, list) else []
        pieces += len(parts)
        if pieces > 2 * max_prompt_tokens:
            raise ContextLengthError(f"too many messages for {max_prompt_tokens} tokens", param="messages")
        for part in parts:
            _check_part(part, where)
    return messages


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequestError(f"{where}.content: only text parts are supported, not {kind!r}", param="messages")


def predicted_text(prediction: dict[str, Any] | None) -> str:
    """The text of OpenAI's `prediction`, "" for none. Raises InvalidRequestError for one that is not text."""
    if prediction is None:
        return ""
    content = prediction.get("content")
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if prediction.get("type") != "content" or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        message = 'prediction must be {"type": "content", "content": TEXT}, with a string or a list of text parts'
        raise InvalidRequestError(message, param="prediction")
    return "".join(part["text"] for part in parts)


async def chat_prompt(manager: GenerateClient, body: ChatRequest, style: OutputStyle) -> str:
    """The prompt text of a chat request, through the model's template."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    use_tools = bool(body.tools) and body.tool_choice != "none"
    given = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    variables = {name: value for name, value in given.items() if value is not None}
    try:
        return await manager.render_chat(
            style.roles(check_messages(body.messages, manager.context_length)),
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            tools=body.tools if use_tools else None,
            chat_template_kwargs=variables | (body.chat_template_kwargs or {}),
        )
    except ContextLengthError as error:
        raise _too_long(manager.context_length, error.message, error.param) from error


def token_ids(value: list[Any], param: str, max_ids: int) -> Int32Array:
    """A JSON list as token ids, int32[n]. Raises ContextLengthError for more than `max_ids`, before it looks at them,
    and InvalidRequestError for anything but token ids.
    """
    if len(value) > max_ids:
        raise ContextLengthError(f"{param} has {len(value)} tokens; at most {max_ids} are accepted", param=param)
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value):
        raise InvalidRequestError(f"{param} must hold token ids, which are whole numbers from 0", param=param)
    return np.array(value, dtype=np.int32)


def split_prompts(call: RequestContext, value: str | list[Any], param: str) -> list[str | Int32Array]:
    """A string, a list of strings, a list of ids or a list of lists of ids, as a list of prompts.

    Raises InvalidRequestError for anything else or more prompts than are taken, ContextLengthError for too many ids.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    max_prompt_tokens, max_prompts = call.manager.context_length, call.state.options.max_prompts
    if not isinstance(value[0], str | list):
        return [token_ids(value, param, max_prompt_tokens)]
    if len(value) > max_prompts:
        message = f"{len(value)} prompts in one request; at most {max_prompts} are accepted"
        raise InvalidRequestError(message, param=param)
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [token_ids(item, param, max_prompt_tokens) for item in value]
    raise InvalidRequestError(f"{param} must hold prompts of one kind: strings, or lists of token ids", param=param)


async def completion_prompts(call: RequestContext, body: CompletionRequest) -> list[CompletionPrompt]:
    """All prompts of a completion request. With echo and logprobs a text is tokenized here, for its token names."""
    values = split_prompts(call, body.prompt, "prompt")
    tokenizer = call.manager.tokenizer
    prompts = []
    for value in values:
        if isinstance(value, str):
            prompt = CompletionPrompt(text=value, echo=value)
            if body.echo and body.logprobs is not None:
                prompt.ids = await call.manager.tokenize(value, body.add_special_tokens is not False)
        else:
            prompt = CompletionPrompt(ids=value)
            if body.echo and tokenizer is not None:
                prompt.echo = await decode(tokenizer, value.tolist(), skip_special_tokens=False)
        prompts.append(prompt)
    return prompts


async def decode(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids, made off the event loop."""
    # A batch call releases the interpreter's lock, a single one does not.
    texts = await asyncio.to_thread(tokenizer.decode_batch, [ids], skip_special_tokens=skip_special_tokens)
    return str(texts[0])
