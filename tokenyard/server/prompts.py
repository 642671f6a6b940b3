"""Prompts as clients write them: messages, text, token ids, and lists of those."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import Int32Array, InvalidRequestError
from tokenyard.server.answers import Call
from tokenyard.server.parse.reading import OutputStyle
from tokenyard.server.protocol import ChatRequest, CompletionRequest
from tokenyard.server.state import Manager

MAX_TOKEN_ID = 2**31 - 1


@dataclass(slots=True)
class CompletionPrompt:
    """One prompt: its text or its token ids (int32[n]), and the text that `echo` repeats."""

    text: str | None = None
    ids: Int32Array | None = None
    echo: str = ""


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as they are. Raises InvalidRequestError for one without a role, or with content that is not text."""
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where}.role must be a string", param="messages")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise InvalidRequestError(f"{where}.content must be a string or a list of parts", param="messages")
        for part in content if isinstance(content, list) else ():
            _check_part(part, where)
    return messages


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequestError(f"{where}.content: only text parts are supported, not {kind!r}", param="messages")


async def chat_prompt(manager: Manager, body: ChatRequest, style: OutputStyle) -> str:
    """The prompt text of a chat request, through the model's template."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    use_tools = bool(body.tools) and body.tool_choice != "none"
    given = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    variables = {name: value for name, value in given.items() if value is not None}
    return await manager.render_chat(
        style.roles(check_messages(body.messages)),
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        tools=body.tools if use_tools else None,
        chat_template_kwargs=variables | (body.chat_template_kwargs or {}),
    )


def token_ids(value: list[Any], param: str) -> Int32Array:
    """A JSON list as token ids, int32[n]. Raises InvalidRequestError if it holds anything but token ids."""
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value):
        raise InvalidRequestError(f"{param} must hold token ids, which are whole numbers from 0", param=param)
    return np.array(value, dtype=np.int32)


def split_prompts(value: str | list[Any], param: str) -> list[str | Int32Array]:
    """A string, a list of strings, a list of ids or a list of lists of ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [token_ids(item, param) for item in value]
    return [token_ids(value, param)]


def check_count(count: int, most: int, param: str) -> None:
    """Raise InvalidRequestError if one request brings more prompts than the server takes."""
    if count > most:
        raise InvalidRequestError(f"{count} prompts in one request; at most {most} are taken", param=param)


async def completion_prompts(call: Call, body: CompletionRequest) -> list[CompletionPrompt]:
    """All prompts of a completion request. With echo and logprobs a text is tokenized here, for its token names."""
    values = split_prompts(body.prompt, "prompt")
    check_count(len(values), call.state.options.max_prompts, "prompt")
    tokenizer = call.manager.tokenizer
    prompts = []
    for value in values:
        if isinstance(value, str):
            prompt = CompletionPrompt(text=value, echo=value)
            if body.echo and body.logprobs is not None:
                prompt.ids = await encode(tokenizer, value, body.add_special_tokens is not False)
        else:
            prompt = CompletionPrompt(ids=value)
            if body.echo and tokenizer is not None:
                prompt.echo = tokenizer.decode(value.tolist(), skip_special_tokens=False)
        prompts.append(prompt)
    return prompts


async def encode(tokenizer: Any, text: str, add_special_tokens: bool) -> Int32Array:
    """Token ids of `text`, int32[n], made off the event loop. Raises InvalidRequestError without a tokenizer."""
    if tokenizer is None:
        raise InvalidRequestError("this server has no tokenizer: send token ids instead of text", param="prompt")
    encoding = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return np.array(encoding.ids, dtype=np.int32)
