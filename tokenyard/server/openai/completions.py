"""`/v1/chat/completions` and `/v1/completions`."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from tokenyard.base import InvalidRequestError, LogprobOptions
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.server.http.generate import (
    CompletionOutput,
    add_cached_tokens_details,
    collect,
    run,
    stage_times,
    usage_of,
    usage_so_far,
)
from tokenyard.server.http.large_bodies import run_off_loop
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.http.streaming import DONE, ChunkWriter, closing_event, with_token_ids
from tokenyard.server.openai.chat_output import (
    chat_deltas,
    chat_message,
    chat_reason,
    prediction_usage,
    reasoning_usage,
)
from tokenyard.server.openai.disagg_params import set_kv_routes
from tokenyard.server.openai.logprobs import chat_logprobs, completion_logprobs
from tokenyard.server.openai.sampling_fields import (
    check_max_tokens,
    new_generate_input,
    parse_sampling_params,
    parse_text_options,
    refuse_unsupported,
)
from tokenyard.server.openai.structured_outputs import grammar_text
from tokenyard.server.openai.tool_choice import chat_grammar, tool_use
from tokenyard.server.parse.events import ContentText, Event
from tokenyard.server.parse.output_style import ParserOptions
from tokenyard.server.prompts import (
    CompletionPrompt,
    chat_prompt,
    check_chat_body,
    completion_prompts,
    predicted_text,
)
from tokenyard.server.protocol import ChatRequest, CompletionRequest, ContinuationFields, OpenAIFields, parse_body
from tokenyard.server.state import answer_id

COMPLETION_MAX_TOKENS = 16
MAX_TOP_LOGPROBS = 20


class AnswerWriter(Protocol):
    """Writes one answer of an API other than OpenAI's chat and completions."""

    def pieces(self, answer: CompletionOutput, events: Sequence[Event]) -> bytes:
        """The events of a stream for new output. `answer.finish` is set with the last output."""

    def replay(self, answer: CompletionOutput, events: Sequence[Event]) -> None:
        """Take output that the client already has, before any other."""


@dataclass(slots=True)
class PreparedRequest:
    """A prepared HTTP request: what to run, and how to write its answers.

    specs: one per prompt, or one per answer if they were begun elsewhere.
    prompts: prompts of a completion, for `echo`; empty for chat.
    n: answers per prompt.
    head: fields that every chunk repeats.
    drop_output: leave out the one token that the engine samples.
    reading: how answers are parsed, None for plain text.
    named: the client named the tool to call.
    """

    specs: list[GenerateReqInput]
    prompts: list[CompletionPrompt]
    n: int
    chat: bool
    head: dict[str, Any]
    body: ChatRequest | CompletionRequest
    want_logprobs: bool
    want_usage: bool
    want_usage_always: bool
    drop_output: bool = False
    reading: ParserOptions | None = None
    named: bool = False

    @property
    def answers_per_spec(self) -> int:
        """How many answers each spec has."""
        return self.specs[0].sampling.n

    @property
    def want_token_ids(self) -> bool:
        """Whether choices carry the ids of their tokens."""
        return bool(self.body.return_token_ids)


async def chat_completions(call: RequestContext) -> None:
    """Answer a chat request."""
    check_chat_body(call)
    body = await parse_body(call.body, ChatRequest, strict=call.state.options.strict_api)
    await _answer(call, await prepare_chat(call, body))


async def completions(call: RequestContext) -> None:
    """Answer a text completion request."""
    body = await parse_body(call.body, CompletionRequest, strict=call.state.options.strict_api)
    await _answer(call, await prepare_completion(call, body))


async def prepare_chat(call: RequestContext, body: ChatRequest) -> PreparedRequest:
    """Prepare a chat body. Raises InvalidRequestError for invalid or unsupported fields."""
    refuse_unsupported(body)
    logprobs = chat_logprob_options(body)
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    check_max_tokens(given, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens", least=1)
    use = tool_use(body)
    text = await chat_prompt(call.manager, body, call.state.style)
    spec = _spec(call, body, given, default=call.manager.context_length, logprobs=logprobs)
    spec.text, spec.add_special_tokens = text, False
    spec.grammar = await run_off_loop(call.body, lambda: chat_grammar(body, use, call.state.style, text))
    job = _job(call, body, begun_elsewhere(spec, body), [], spec.sampling.n)
    job.head |= await set_kv_routes(call, body, job.specs)
    job.named = use.named
    job.reading = call.state.style.reading(
        text,
        use.functions,
        reasoning=body.separate_reasoning is not False,
        forced=use.forced,
        parallel=use.parallel,
    )
    call.messages, call.tools, call.reading = body.messages, body.tools or [], job.reading
    if job.reading is not None:
        for spec in job.specs:
            spec.text_options.keep_ids = call.state.style.keep_ids
        if job.reading.notes:
            job.head["warnings"] = job.reading.notes
    return job


async def prepare_completion(call: RequestContext, body: CompletionRequest) -> PreparedRequest:
    """Prepare a completion body. Raises InvalidRequestError for invalid or unsupported fields."""
    refuse_unsupported(body)
    _check_completion(body)
    logprobs = None
    if body.logprobs is not None:
        logprobs = _logprob_options(body.logprobs, "logprobs", 0 if body.echo else -1)
    # The engine always samples a token; an echo alone asks for one and leaves it out.
    most = 1 if body.max_tokens == 0 else body.max_tokens
    prompts = await completion_prompts(call, body)
    grammar = await run_off_loop(call.body, lambda: grammar_text(body, call.state.style))
    specs = []
    for prompt in prompts:
        spec = _spec(call, body, most, default=COMPLETION_MAX_TOKENS, logprobs=logprobs)
        spec.text, spec.input_ids = (prompt.text, None) if prompt.ids is None else (None, prompt.ids)
        spec.add_special_tokens = body.add_special_tokens is not False
        spec.grammar = grammar
        specs.append(spec)
    n = specs[0].sampling.n
    if body.output_ids and len(prompts) == 1:
        specs = begun_elsewhere(specs[0], body)
    job = _job(call, body, specs, prompts, n)
    job.head |= await set_kv_routes(call, body, specs)
    job.drop_output = body.max_tokens == 0
    return job


def _check_completion(body: CompletionRequest) -> None:
    """Raise InvalidRequestError for unsupported fields of completions."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of must equal n", param="best_of", code="unsupported")
    if body.suffix:
        raise InvalidRequestError("suffix is not supported by this server", param="suffix", code="unsupported")
    if body.echo and body.stream and body.logprobs is not None:
        raise InvalidRequestError("echo with logprobs cannot be streamed", param="echo", code="unsupported")
    check_max_tokens(body.max_tokens, "max_tokens", least=0 if body.echo else 1)


def chat_logprob_options(body: ChatRequest) -> LogprobOptions | None:
    """The log-probabilities that a chat asks for, None for none. Raises InvalidRequestError for too many alternatives,
    and for alternatives alone.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return _logprob_options(body.top_logprobs or 0, "top_logprobs", -1) if body.logprobs else None


def _logprob_options(top: int, param: str, prompt_from: int) -> LogprobOptions:
    """Logprob options with `top` alternatives. Raises InvalidRequestError if that is too many."""
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"{param} must be between 0 and {MAX_TOP_LOGPROBS}", param=param)
    return LogprobOptions(output=True, top=top, prompt_from=prompt_from)


def _spec(
    call: RequestContext, body: OpenAIFields, max_tokens: int | None, *, default: int, logprobs: LogprobOptions | None
) -> GenerateReqInput:
    """The engine request without its prompt. A given token limit must fit the context; a default is clamped to it."""
    spec = new_generate_input(
        body, call.headers, call.state.options.class_targets, tenant=call.tenant, rid=body.request_id
    )
    most = default if max_tokens is None else max_tokens
    if body.min_tokens is not None and not 0 <= body.min_tokens <= most:
        message = f"min_tokens is {body.min_tokens}; it must be between 0 and the most tokens of the answer ({most})"
        raise InvalidRequestError(message, param="min_tokens")
    spec.sampling = parse_sampling_params(
        body, call.state.options.default_sampling, max_new_tokens=most, min_new_tokens=body.min_tokens
    )
    spec.text_options = parse_text_options(
        body,
        stream=bool(body.stream),
        stream_interval=call.state.options.stream_interval,
        keep_stop=bool(body.include_stop_str_in_output),
    )
    spec.logprobs = logprobs
    predicted = predicted_text(body.prediction)
    spec.prediction = predicted if call.state.options.speculative_algorithm != "none" else ""
    spec.seed = body.seed
    spec.clamp_max_new_tokens = max_tokens is None
    return spec


def begun_elsewhere(spec: GenerateReqInput, body: ContinuationFields) -> list[GenerateReqInput]:
    """The requests that continue answers begun elsewhere: `spec` itself, or one for each of several answers, with the
    seed that it has with all.

    Raises InvalidRequestError if `output_ids` are not those of its answers.
    """
    begun, n = body.output_ids or [], spec.sampling.n
    if n == 1 or not begun:
        spec.output_ids = [token for token in begun if isinstance(token, int)] or None
        if len(begun) != len(spec.output_ids or []):
            raise InvalidRequestError("output_ids must be one flat list of whole numbers", param="output_ids")
        return [spec]
    if len(begun) != n or not all(isinstance(ids, list) for ids in begun):
        raise InvalidRequestError(f"output_ids must be {n} lists, one for each answer", param="output_ids")
    sampling, options, seed = replace(spec.sampling, n=1), spec.text_options, spec.seed
    return [
        replace(
            spec,
            rid=f"{spec.rid}-{index}" if spec.rid else "",
            sampling=sampling,
            text_options=replace(options),
            seed=None if seed is None else seed + index,
            output_ids=ids or None,  # type: ignore[arg-type]
        )
        for index, ids in enumerate(begun)
    ]


def _job(
    call: RequestContext,
    body: ChatRequest | CompletionRequest,
    specs: list[GenerateReqInput],
    prompts: list[CompletionPrompt],
    n: int,
) -> PreparedRequest:
    """Put together how the answers to `specs` are written."""
    adapter = call.state.check_model(body.model, body.lora_path)
    for spec in specs:
        spec.lora = adapter
    head = _head(call, body, specs)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
    always = bool(options and options.continuous_usage_stats)
    return PreparedRequest(
        specs=specs,
        prompts=prompts,
        n=n,
        chat=isinstance(body, ChatRequest),
        head=head,
        body=body,
        want_logprobs=specs[0].logprobs is not None,
        want_usage=bool(options and options.include_usage),
        want_usage_always=always,
    )


def _head(call: RequestContext, body: ChatRequest | CompletionRequest, specs: list[GenerateReqInput]) -> dict[str, Any]:
    """The fields that every chunk repeats. Sets the request id of each spec."""
    rid = specs[0].rid or uuid.uuid4().hex
    for place, spec in enumerate(specs):
        spec.rid = rid if len(specs) == 1 else f"{rid}-{place}"
    if isinstance(body.rid, list):
        raise InvalidRequestError("rid must be one string here: one id stands for the whole answer", param="rid")
    chat = isinstance(body, ChatRequest)
    kind = "chat.completion" if chat else "text_completion"
    head: dict[str, Any] = {
        "id": answer_id(rid, chat=chat),
        "object": f"{kind}.chunk" if chat and body.stream else kind,
        "created": int(time.time()),
        "model": _model_name(call, body, specs[0].lora),
    }
    if body.service_tier is not None:
        head["service_tier"] = body.service_tier
    return head


def _model_name(call: RequestContext, body: ChatRequest | CompletionRequest, adapter: str) -> str:
    """The model name of the response: the client's if it names an adapter, else the served one."""
    return (body.model or "") if adapter and body.model not in (None, "", "default") else call.state.options.model_name


async def write_answer(call: RequestContext, job: PreparedRequest, writer: AnswerWriter) -> CompletionOutput:
    """Run a request with one answer and write it, as a stream if its client wants one."""
    answer = CompletionOutput()
    stream, token_ids = bool(job.body.stream), list[int]()
    begun = bool(job.body.output_ids)

    def take(_: int, delta: OutputDelta) -> None:
        nonlocal begun
        if answer.reader is None and job.reading is not None:
            answer.reader = job.reading.reader()
        if begun:
            writer.replay(answer, _events(answer, delta.said))
            begun = False
        answer.add(delta, keep=False)
        data = writer.pieces(answer, _events(answer, delta.text, last=delta.finish is not None))
        if job.want_token_ids:
            token_ids.extend(delta.token_ids)
        if data and stream:
            call.reply.write(with_token_ids(data, token_ids) if job.want_token_ids else data)
            token_ids.clear()

    await run(call, job.specs, take)
    if stream:
        await call.reply.end()
    return answer


def _events(answer: CompletionOutput, text: str, *, last: bool = False) -> list[Event]:
    """What the parser finds in more text; without a parser all of it is content."""
    if answer.reader is not None:
        return answer.reader.feed(text, last=last)
    return [ContentText(text)] if text else []


async def _answer(call: RequestContext, job: PreparedRequest) -> None:
    """Run a job and write its answers, as a stream or whole."""
    if not job.body.stream:
        answers = await collect(call, job.specs, job.answers_per_spec)
        await call.reply.whole(orjson.dumps(_whole(call, job, answers)))
        return
    await _stream(call, job)


def _whole(call: RequestContext, job: PreparedRequest, answers: list[CompletionOutput]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    if job.drop_output:
        for answer in answers:
            _without_output(answer)
    choices = [_choice(call, job, index, answer) for index, answer in enumerate(answers)]
    content = {**job.head, "choices": choices, "usage": _usage(call, job, answers)}
    if job.body.return_x_sched and answers[0].finish is not None:
        content["x_sched"] = stage_times(answers[0].finish, job.specs[0])
    return content


def _usage(call: RequestContext, job: PreparedRequest, answers: list[CompletionOutput]) -> dict[str, Any]:
    """The usage object, with completion_tokens_details if there are any."""
    details = reasoning_usage(answers) if job.reading is not None else {}
    if job.body.prediction is not None:
        details |= prediction_usage(answers)
    usage = usage_of(answers, job.n) | ({"completion_tokens_details": details} if details else {})
    add_cached_tokens_details(call, usage["prompt_tokens_details"], answers[0])
    return usage


def _without_output(answer: CompletionOutput) -> None:
    """Remove the one sampled token."""
    answer.logprobs = [entry for entry in answer.logprobs if entry.position < answer.prompt_tokens]
    answer.text, answer.token_ids, answer.completion_tokens = "", [], 0


def _choice(call: RequestContext, job: PreparedRequest, index: int, answer: CompletionOutput) -> dict[str, Any]:
    """One entry of `choices`."""
    names, logprobs = call.state.names, None
    choice: dict[str, Any] = {"index": index}
    if job.chat:
        choice["message"] = _message(job, answer)
        if job.want_logprobs:
            logprobs = chat_logprobs(answer.logprobs, names)
    else:
        prompt = job.prompts[index // job.n]
        echo = bool(isinstance(job.body, CompletionRequest) and job.body.echo)
        choice["text"] = prompt.echo + answer.text if echo else answer.text
        if job.want_logprobs:
            first, offset = None, 0
            if echo and prompt.ids is not None:
                first = int(prompt.ids[0])
                offset = min(0, len(prompt.echo) - sum(len(names.text(token)) for token in prompt.ids.tolist()))
            logprobs = completion_logprobs(answer.logprobs, names, offset=offset, first_token=first)
    choice["logprobs"] = logprobs
    choice["finish_reason"] = _reason(job, answer)
    choice["matched_stop"] = answer.finish.matched if answer.finish else None
    if job.want_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _message(job: PreparedRequest, answer: CompletionOutput) -> dict[str, Any]:
    """The message of a whole chat answer, parsed if it may have reasoning or tool calls."""
    if job.reading is None:
        return {"role": "assistant", "content": answer.text, "refusal": None}
    answer.reader = job.reading.reader(answer.said)
    answer.reader.feed(answer.text, last=True)
    return chat_message(answer.reader.message)


def _reason(job: PreparedRequest, answer: CompletionOutput) -> str | None:
    """The finish_reason; "length" for an answer whose one token is left out."""
    if answer.finish is None:
        return None
    if answer.reader is not None:
        return chat_reason(answer.finish.reason, answer.reader.message, named=job.named)
    return "length" if job.drop_output and answer.finish.reason == "stop" else answer.finish.reason


async def _stream(call: RequestContext, job: PreparedRequest) -> None:
    """Write a stream. The last content chunk, usage and [DONE] are sent together."""
    stride = job.answers_per_spec
    answers = [CompletionOutput() for _ in range(len(job.specs) * stride)]
    writers: list[ChunkWriter | None] = [None] * len(answers)
    offsets = [0] * len(answers)
    special = job.want_logprobs or job.want_token_ids
    left = len(answers)

    def take(place: int, delta: OutputDelta) -> None:
        nonlocal left
        index = place * stride + delta.index
        writer, opening = writers[index], b""
        if writer is None:
            writer = ChunkWriter(job.head, index, chat=job.chat, null_usage=job.want_usage)
            writers[index], opening = writer, _opening(job, index, writer)
        if job.reading is not None:
            answers[index].add(delta, keep=False)
            chunk = _parsed_chunks(call, job, writer, delta, answers[index])
        elif delta.finish is None and not special:
            if job.want_usage_always:
                chunk = writer.counted(delta.text, usage_so_far(delta))
            else:
                chunk = writer.plain(delta.text) if delta.text else b""
        else:
            answers[index].add(delta, keep=False)
            chunk = _full_chunk(call, job, writer, delta, answers[index], offsets, index)
        left -= delta.finish is not None
        if not left:
            chunk += _closing(call, job, answers)
        if opening or chunk:
            call.reply.write(opening + chunk)

    await run(call, job.specs, take)
    await call.reply.end()


def _parsed_chunks(
    call: RequestContext, job: PreparedRequest, writer: ChunkWriter, delta: OutputDelta, answer: CompletionOutput
) -> bytes:
    """The chunks of a parsed chat answer; log-probabilities and finish_reason are in the last one."""
    assert job.reading is not None
    if answer.reader is None:
        answer.reader = job.reading.reader(delta.said)
    deltas = chat_deltas(answer.reader.feed(delta.text, last=delta.finish is not None))
    logprobs = chat_logprobs(delta.logprobs, call.state.names) if job.want_logprobs and delta.logprobs else None
    if delta.finish is not None or logprobs or job.want_token_ids:
        deltas = deltas or [{}]
    if not deltas:
        return b""
    last = writer.delta(
        deltas[-1],
        finish_reason=_reason(job, answer),
        matched=delta.finish.matched if delta.finish else None,
        logprobs=logprobs,
        token_ids=delta.token_ids if job.want_token_ids else None,
        usage=usage_of([answer], 1) if job.want_usage_always else None,
    )
    return b"".join([*map(writer.delta, deltas[:-1]), last])


def _opening(job: PreparedRequest, index: int, writer: ChunkWriter) -> bytes:
    """What precedes an answer's first content: the role, or the echoed prompt."""
    if job.chat:
        return writer.role()
    if isinstance(job.body, CompletionRequest) and job.body.echo and not job.body.output_ids:
        return writer.plain(job.prompts[index // job.n].echo)
    return b""


def _full_chunk(
    call: RequestContext,
    job: PreparedRequest,
    writer: ChunkWriter,
    delta: OutputDelta,
    answer: CompletionOutput,
    offsets: list[int],
    index: int,
) -> bytes:
    """A chunk with more than text."""
    if job.drop_output:
        delta = replace(delta, text="", token_ids=[])
    logprobs, names = None, call.state.names
    if job.want_logprobs and delta.logprobs:
        if job.chat:
            logprobs = chat_logprobs(delta.logprobs, names)
        else:
            logprobs = completion_logprobs(delta.logprobs, names, offset=offsets[index])
            offsets[index] += sum(map(len, logprobs["tokens"]))
    return writer.full(
        delta.text,
        finish_reason=_reason(job, answer),
        matched=delta.finish.matched if delta.finish else None,
        logprobs=logprobs,
        token_ids=delta.token_ids if job.want_token_ids else None,
        usage=usage_of([answer], 1) if job.want_usage_always else None,
    )


def _closing(call: RequestContext, job: PreparedRequest, answers: list[CompletionOutput]) -> bytes:
    """The end of a stream: a chunk with usage and stage times if requested, and [DONE]."""
    if job.drop_output:
        for answer in answers:
            _without_output(answer)
    extra: dict[str, Any] = {}
    if job.want_usage:
        extra["usage"] = _usage(call, job, answers)
    if job.body.return_x_sched and answers[0].finish is not None:
        extra["x_sched"] = stage_times(answers[0].finish, job.specs[0])
    return (closing_event(job.head, extra) if extra else b"") + DONE
