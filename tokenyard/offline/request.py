"""One request of an `LLM`: its fields as over HTTP, and what the engine is asked for."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from tokenyard import base
from tokenyard.base import InvalidRequestError
from tokenyard.base.sessions import derived_session, named_session, turn_of
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.offline.generation import Completion, Generation, Prompt, is_conversation, token_ids
from tokenyard.offline.sampling_params import SamplingParams
from tokenyard.server.http.turns import ttl_ns
from tokenyard.server.openai.chat_output import chat_message
from tokenyard.server.openai.completions import chat_logprob_options
from tokenyard.server.openai.sampling_fields import new_generate_input, parse_text_options, refuse_unsupported
from tokenyard.server.openai.structured_outputs import grammar_text
from tokenyard.server.openai.tool_choice import chat_grammar, tool_use
from tokenyard.server.parse.events import ParsedMessage
from tokenyard.server.parse.output_style import OutputStyle, ParserOptions
from tokenyard.server.prompts import chat_prompt, predicted_text
from tokenyard.server.protocol import (
    ChatRequest,
    from_fields,
)
from tokenyard.server.state import ServerOptions


@dataclass(slots=True)
class Request:
    """One request of an `LLM`.

    prompt: as the caller gave it.
    spec: what the engine is asked for.
    body: its fields as in a body over HTTP; without messages if the prompt is no conversation.
    ttl_ns: how long its KV is asked to be kept, -1 for not said.
    reading: how its answers are parsed, None if they are not.
    prepared: whether `spec` is complete.
    """

    prompt: Prompt
    spec: GenerateReqInput
    body: ChatRequest
    ttl_ns: int
    reading: ParserOptions | None = None
    prepared: bool = False


def make_request(
    prompt: Prompt, params: base.SamplingParams, adapter: str | None, options: ServerOptions, *, stream: bool = False
) -> Request:
    """The request for the engine; `prepare` completes it. Raises InvalidRequestError."""
    stated = {item.name: getattr(params, item.name) for item in fields(base.SamplingParams)}
    bias, seed = stated["logit_bias"], stated.pop("seed")
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
    if not isinstance(seed, int | np.integer | None):
        raise InvalidRequestError("seed must be a whole number", param="seed")
    stated["logit_bias"] = {_whole(token): value for token, value in bias.items()}
    others = params.others if isinstance(params, SamplingParams) else {}
    try:
        sampling = msgspec.convert(stated, base.SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"a sampling parameter has the wrong type: {error}") from error
    messages = [dict(message) for message in prompt] if is_conversation(prompt) else []  # type: ignore[arg-type]
    body = _chat_body(others, messages, sampling)
    refuse_unsupported(body)
    spec = new_generate_input(body, {}, options.class_targets)
    spec.rid = spec.rid or uuid.uuid4().hex
    spec.sampling, spec.lora = sampling, adapter or ""
    spec.seed = None if seed is None else int(seed)
    keep_stop, interval = bool(body.include_stop_str_in_output), options.stream_interval
    spec.text_options = parse_text_options(body, stream=stream, stream_interval=interval, keep_stop=keep_stop)
    spec.logprobs = chat_logprob_options(body)
    if options.speculative_algorithm != "none":
        spec.prediction = predicted_text(body.prediction)
    spec.session = named_session(others, lambda _: None) or derived_session(messages)
    spec.turn = turn_of(messages) if spec.session else 0
    if isinstance(prompt, str):
        spec.text = prompt
    elif not messages:
        spec.input_ids = token_ids(prompt)
    markers = msgspec.json.encode({"cache_control": body.cache_control}) if body.cache_control else b""
    return Request(prompt, spec, body, ttl_ns(markers, body.prompt_cache_retention))


async def prepare(request: Request, manager: TokenizerManager, style: OutputStyle) -> None:
    """Render the prompt of a conversation, and read the constraints. Does nothing the second time."""
    spec, body = request.spec, request.body
    if request.prepared:
        return
    request.prepared = True
    if not body.messages:
        if body.tools:
            raise InvalidRequestError("tools need a conversation: a list of messages as prompt", param="tools")
        spec.grammar = grammar_text(body, style)
        return
    use = tool_use(body)
    spec.text = await chat_prompt(manager, body, style)
    spec.add_special_tokens = False
    spec.grammar = chat_grammar(body, use, style, spec.text)
    if body.tools or body.separate_reasoning:
        request.reading = style.reading(
            spec.text,
            use.functions,
            reasoning=body.separate_reasoning is not False,
            forced=use.forced,
            parallel=use.parallel,
        )
    if request.reading is not None:
        spec.text_options.keep_ids = style.keep_ids


def read_messages(request: Request, generation: Generation) -> None:
    """Put the message into each answer of a conversation that has tools, or whose reasoning is to be separate."""
    if not request.body.messages or not (request.body.tools or request.body.separate_reasoning):
        return
    for answer in generation.completions:
        message = ParsedMessage(answer.text)
        if request.reading is not None:
            reader = request.reading.reader()
            reader.feed(answer.text, last=True)
            message = reader.message
        answer.message = chat_message(message)


def no_answer(request: Request) -> Generation:
    """The generation of a request before it has begun."""
    return Generation(request.prompt, [Completion() for _ in range(request.spec.sampling.n)])


def _chat_body(others: Mapping[str, Any], messages: list[dict[str, Any]], sampling: base.SamplingParams) -> ChatRequest:
    """The fields of a request as an HTTP body has them. vLLM's `logprobs` is a number, OpenAI's says whether."""
    given = {**others, "messages": messages, "ignore_eos": sampling.ignore_eos}
    top = given.get("logprobs")
    if type(top) is int:
        given |= {"logprobs": True, "top_logprobs": top}
    return from_fields(given, ChatRequest)


def _whole(token: Any) -> Any:
    """A token id, which JSON has as a string, as a number; anything else as it is."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token
