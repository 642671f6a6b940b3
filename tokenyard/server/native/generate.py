"""`POST /generate` in SGLang's shape: one prompt or a batch, text or token ids, cumulative text in streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tokenyard.base import NS_PER_S, Finish, Int32Array, InvalidRequestError, LogprobOptions
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.paused_requests import PausedRequests
from tokenyard.server.http.generate import CompletionOutput, add_cached_tokens_details, collect, run, weights_of_answer
from tokenyard.server.http.large_bodies import run_off_loop
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.http.streaming import DONE
from tokenyard.server.openai.completions import begun_elsewhere
from tokenyard.server.openai.disagg_params import set_kv_routes
from tokenyard.server.openai.logprobs import native_logprobs
from tokenyard.server.openai.sampling_fields import (
    check_max_tokens,
    new_generate_input,
    parse_sampling_params,
    parse_text_options,
    refuse_unsupported,
)
from tokenyard.server.openai.structured_outputs import grammar_text
from tokenyard.server.prompts import split_prompts
from tokenyard.server.protocol import NativeRequest, NativeSampling, ResumeRequest, parse, parse_body

NATIVE_MAX_NEW_TOKENS = 128
MAX_TOP_LOGPROBS = 100


@dataclass(slots=True)
class PreparedNativeRequest:
    """A parsed request.

    specs: one per prompt.
    n: answers per prompt.
    batch: whether the client sent a list and expects one.
    with_text: whether log-probabilities carry the tokens' text.
    empty: per prompt, whether nothing is to be generated.
    logprob_from: first prompt position with log-probabilities, -1 for none.
    begun: whether the answers were begun elsewhere, and are repeated from their beginning.
    rid: the id of answers that were begun elsewhere; "" for that of the spec.
    """

    specs: list[GenerateReqInput]
    n: int
    batch: bool
    with_text: bool
    empty: list[bool]
    logprob_from: int
    begun: bool = False
    rid: str = ""

    def drops_output(self, index: int) -> bool:
        """Whether max_new_tokens is 0: the engine samples one token, which the answer leaves out."""
        return self.empty[index // self.n]


async def generate(call: RequestContext) -> None:
    """Answer a native request."""
    body = await parse_body(call.body, NativeRequest, strict=call.state.options.strict_api)
    await _answer(call, await _job(call, body), stream=bool(body.stream))


async def resume(call: RequestContext, records: PausedRequests, rids: Sequence[str]) -> None:
    """Return the rest of requests that were paused before the engine ended, streamed or whole as first requested.

    The rest has the shape of `/generate`, whichever API the requests used. It can be fetched again until it has been
    delivered in full.
    """
    fields = parse(call.body or b"{}", ResumeRequest, strict=call.state.options.strict_api)
    adapters = {adapter.key for adapter in call.manager.adapters.loaded.values()}
    specs = [spec for rid in rids for spec in await records.specs(rid, adapters)]
    if fields.shown_tokens is not None:
        _set_shown(specs, fields.shown_tokens)
    stream = specs[0].text_options.stream if fields.stream is None else fields.stream
    for spec in specs:
        spec.text_options = replace(spec.text_options, stream=stream)
    await _answer(call, PreparedNativeRequest(specs, 1, len(specs) > 1, False, [False] * len(specs), -1), stream=stream)
    for rid in rids:
        records.forget(rid, resumed=True)


def _set_shown(specs: list[GenerateReqInput], tokens: int) -> None:
    """Set how many tokens the client already has. Raises InvalidRequestError for an impossible number."""
    known = 0 if specs[0].output_ids is None else len(specs[0].output_ids)
    if len(specs) > 1 or not 0 <= tokens <= known:
        reason = "is for a request with one answer" if len(specs) > 1 else f"must be between 0 and {known}"
        raise InvalidRequestError(f"shown_tokens {reason}", param="shown_tokens")
    specs[0].text_options = replace(specs[0].text_options, shown=tokens)
    if specs[0].logprobs is not None and specs[0].output_ids is not None:
        specs[0].output_ids = specs[0].output_ids[:tokens]


async def _answer(call: RequestContext, job: PreparedNativeRequest, *, stream: bool) -> None:
    if stream:
        await _stream(call, job)
        return
    answers = await collect(call, job.specs, job.specs[0].sampling.n)
    results = [_result(call, job, index, answer) for index, answer in enumerate(answers)]
    await call.reply.whole(orjson.dumps(results if job.batch or job.n > 1 else results[0]))


async def _job(call: RequestContext, body: NativeRequest) -> PreparedNativeRequest:
    """Prepare a request body. Raises InvalidRequestError for invalid or unsupported fields."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give exactly one of text and input_ids", param="text")
    refuse_unsupported(body)
    value: Any = body.text if body.text is not None else body.input_ids
    param = "text" if body.text is not None else "input_ids"
    batch = isinstance(value, list) and bool(value) and isinstance(value[0], (list, str))
    prompts = split_prompts(call, value, param)
    samplings = _per_prompt(body.sampling_params, len(prompts), "sampling_params")
    empty = [sampling is not None and sampling.max_new_tokens == 0 for sampling in samplings]
    start = _logprob_from(body, all(empty))
    if start == 0:
        # The first token has no log-probability, so its id must be known here.
        prompts = [await call.manager.tokenize(p, True) if isinstance(p, str) else p for p in prompts]
    rids = _rids(call, body, len(prompts))
    adapters = [call.state.check_model(None, name) for name in _per_prompt(body.lora_path, len(prompts), "lora_path")]
    each = list(zip(prompts, samplings, rids, strict=True))
    specs = await run_off_loop(
        call.body,
        lambda: [_spec(call, body, prompt, sampling or NativeSampling(), rid, start) for prompt, sampling, rid in each],
    )
    for spec, adapter in zip(specs, adapters, strict=True):
        spec.lora = adapter
    await set_kv_routes(call, body, specs)
    n = specs[0].sampling.n
    if any(spec.sampling.n != n for spec in specs):
        raise InvalidRequestError("all prompts of a batch must have the same n", param="sampling_params")
    job = PreparedNativeRequest(specs, n, batch, bool(body.return_text_in_logprobs), empty, start)
    if body.output_ids:
        if batch or body.return_logprob:
            raise InvalidRequestError("output_ids need one prompt, without log-probabilities", param="output_ids")
        job.specs, job.begun, job.rid = begun_elsewhere(specs[0], body), True, specs[0].rid
    return job


def _logprob_from(body: NativeRequest, empty: bool) -> int:
    """The first prompt position with log-probabilities, -1 for none.

    Without a position, a request that generates nothing gets those of the whole prompt, as SGLang's frontend language
    expects.
    """
    if not body.return_logprob:
        return -1
    if body.logprob_start_len is None:
        return 0 if empty else -1
    return body.logprob_start_len


def _per_prompt(value: Any, count: int, param: str) -> Sequence[Any]:
    """One value per prompt, from a list or repeated. Raises InvalidRequestError for a list of the wrong length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{param} has {len(value)} entries for {count} prompts", param=param)
    return value


def _rids(call: RequestContext, body: NativeRequest, count: int) -> Sequence[str]:
    """A request id per prompt; "" where the server generates one."""
    if isinstance(body.rid, list):
        if len(set(body.rid)) < len(body.rid):
            raise InvalidRequestError("rid holds an id twice", param="rid")
        return list(_per_prompt(body.rid, count, "rid"))
    rid = body.rid or call.headers.get("x-request-id", "")
    return [rid] if count == 1 else [f"{rid}-{place}" if rid else "" for place in range(count)]


def _spec(
    call: RequestContext,
    body: NativeRequest,
    prompt: str | Int32Array,
    sampling: NativeSampling,
    rid: str,
    logprob_from: int,
) -> GenerateReqInput:
    """The engine request for one prompt."""
    check_max_tokens(sampling.max_new_tokens, "max_new_tokens", least=0)
    # The engine always samples a token.
    max_new_tokens = NATIVE_MAX_NEW_TOKENS if sampling.max_new_tokens is None else max(1, sampling.max_new_tokens)
    spec = new_generate_input(body, call.headers, call.state.options.class_targets, tenant=call.tenant, rid=rid)
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.input_ids = prompt
    spec.sampling = parse_sampling_params(
        sampling,
        call.state.options.default_sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
    )
    spec.text_options = parse_text_options(
        sampling, stream=bool(body.stream), stream_interval=call.state.options.stream_interval, keep_stop=False
    )
    if body.return_logprob:
        named = body.token_ids_logprob or []
        spec.logprobs = LogprobOptions(True, _top(body.top_logprobs_num), logprob_from, named)
    spec.seed = sampling.seed
    spec.grammar = grammar_text(sampling, call.state.style)
    spec.clamp_max_new_tokens = sampling.max_new_tokens is None
    return spec


def _top(value: int | None) -> int:
    """The number of alternatives per token. Raises InvalidRequestError if it is out of range."""
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        message = f"top_logprobs_num must be between 0 and {MAX_TOP_LOGPROBS}"
        raise InvalidRequestError(message, param="top_logprobs_num")
    return value or 0


async def _stream(call: RequestContext, job: PreparedNativeRequest) -> None:
    """Stream the answers; each event repeats all text and tokens so far, as SGLang's clients expect."""
    stride = job.specs[0].sampling.n
    answers = [CompletionOutput() for _ in range(len(job.specs) * stride)]
    if job.begun:
        for answer, spec in zip(answers, job.specs, strict=True):
            answer.token_ids = list(spec.output_ids if spec.output_ids is not None else ())
    several = job.batch or job.n > 1

    def take(place: int, delta: OutputDelta) -> None:
        index = place * stride + delta.index
        if job.begun:
            answers[index].text = answers[index].text or delta.said
        answers[index].add(delta, keep=True)
        result = _result(call, job, index, answers[index])
        if several:
            result["index"] = index
        call.reply.write(b"data: " + orjson.dumps(result) + b"\n\n")

    await run(call, job.specs, take)
    call.reply.write(DONE)
    await call.reply.end()


def _result(call: RequestContext, job: PreparedNativeRequest, index: int, answer: CompletionOutput) -> dict[str, Any]:
    """One answer with its meta_info."""
    spec = job.specs[index // job.specs[0].sampling.n]
    if job.drops_output(index):
        answer = _without_output(answer)
    meta: dict[str, Any] = {
        "id": job.rid or spec.rid,
        "finish_reason": _finish_reason(answer.finish),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cached_tokens": answer.cached_tokens,
    }
    if answer.finish is not None:
        meta["e2e_latency"] = (answer.finish.finished_ns - answer.finish.arrival_ns) / NS_PER_S
        meta["retractions"] = answer.finish.retractions
        meta |= weights_of_answer(answer.finish)
    add_cached_tokens_details(call, meta, answer)
    if spec.logprobs is not None:
        meta |= _logprob_meta(call, job, answer, spec.input_ids)
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _without_output(answer: CompletionOutput) -> CompletionOutput:
    """The answer without the one sampled token."""
    inputs = [entry for entry in answer.logprobs if entry.position < answer.prompt_tokens]
    finish = answer.finish
    if finish is not None and finish.reason != "abort":
        finish = replace(finish, reason="length", matched=None, completion_tokens=0)
    return replace(answer, text="", token_ids=[], completion_tokens=0, logprobs=inputs, finish=finish)


def _finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """SGLang's finish_reason object."""
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": finish.completion_tokens}
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message}


def _logprob_meta(
    call: RequestContext, job: PreparedNativeRequest, answer: CompletionOutput, prompt: Int32Array | list[int] | None
) -> dict[str, Any]:
    """Log-probabilities of prompt and output tokens. The first prompt token has none and gets null."""
    inputs = [entry for entry in answer.logprobs if entry.position < answer.prompt_tokens]
    outputs = answer.logprobs[len(inputs) :]
    names = call.state.names
    meta: dict[str, Any] = {}
    options = job.specs[0].logprobs
    ranked = options.top if options is not None else 0
    named = options is not None and bool(options.token_ids)
    own, top = native_logprobs(outputs, names, with_text=job.with_text)
    meta["output_token_logprobs"], meta["output_top_logprobs"] = own, [best[:ranked] for best in top]
    if named:
        meta["output_token_ids_logprobs"] = [best[ranked:] for best in top]
    if job.logprob_from >= 0:
        own, top = native_logprobs(inputs, names, with_text=job.with_text)
        if job.logprob_from == 0 and prompt is not None:
            first = int(prompt[0])
            own, top = [[None, first, names.text(first) if job.with_text else None], *own], [None, *top]
        meta["input_token_logprobs"], meta["input_top_logprobs"] = own, [best and best[:ranked] for best in top]
        if named:
            meta["input_token_ids_logprobs"] = [best and best[ranked:] for best in top]
    return meta
