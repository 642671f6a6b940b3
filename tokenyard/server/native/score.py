"""`POST /v1/score`: the probability of given tokens after each of several texts (SGLang's scoring API)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tokenyard.base import Int32Array, InvalidRequestError, LogprobOptions, SamplingParams, TokenLogprobs
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.server.http.generate import collect, usage_of
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.openai.sampling_fields import new_generate_input
from tokenyard.server.prompts import token_ids
from tokenyard.server.protocol import SchedulingFields, parse_body

MAX_SCORES = 200_000
"""Larger responses would delay other requests while they are serialized."""


@dataclass(kw_only=True)
class ScoreRequest(SchedulingFields):
    """`POST /v1/score`. Query and items are texts, or token ids."""

    query: str | list[int]
    items: str | list[Any]
    label_token_ids: list[int]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: str | None = None


async def score(call: RequestContext) -> None:
    """Score each item: the probability of each label token after query and item."""
    body = await parse_body(call.body, ScoreRequest, strict=call.state.options.strict_api)
    adapter = call.state.check_model(body.model, body.lora_path)
    if not body.label_token_ids:
        raise InvalidRequestError("label_token_ids must not be empty", param="label_token_ids")
    items = [body.items] if isinstance(body.items, str) else body.items
    max_items = call.state.options.max_prompts
    if not 1 <= len(items) <= max_items:
        raise InvalidRequestError(f"items must be a list of 1 to {max_items} texts", param="items")
    if len(items) * len(body.label_token_ids) > MAX_SCORES:
        message = (
            f"{len(items)} items with {len(body.label_token_ids)} labels each; at most {MAX_SCORES} scores are computed"
        )
        raise InvalidRequestError(message, param="label_token_ids")
    specs = [await _spec(call, body, item, place) for place, item in enumerate(items)]
    for spec in specs:
        spec.lora = adapter
    answers = await collect(call, specs, 1)
    count, softmax = len(body.label_token_ids), bool(body.apply_softmax)
    scores = [label_scores(answer.logprobs, count, softmax=softmax) for answer in answers]
    for answer in answers:
        answer.completion_tokens = 0
    content = {
        "object": "scoring",
        "model": body.model if adapter and body.model else call.state.options.model_name,
        "scores": scores,
        "usage": usage_of(answers, 1),
    }
    await call.reply.whole(orjson.dumps(content))


async def _spec(call: RequestContext, body: ScoreRequest, item: Any, place: int) -> GenerateReqInput:
    """The engine request for one prompt, with the log-probabilities of the next token."""
    if isinstance(item, str) != isinstance(body.query, str):
        raise InvalidRequestError("query and items must both be texts or both be token ids", param="items")
    rid = f"{body.rid}-{place}" if isinstance(body.rid, str) else ""
    spec = new_generate_input(body, call.headers, call.state.options.class_targets, tenant=call.tenant, rid=rid)
    spec.input_ids = await _prompt(call, body, item)
    spec.sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    spec.logprobs = LogprobOptions(output=True, token_ids=body.label_token_ids)
    return spec


async def _prompt(call: RequestContext, body: ScoreRequest, item: Any) -> Int32Array:
    """Token ids of query and item, int32[n]."""
    if isinstance(body.query, str):
        text = item + body.query if body.item_first else body.query + item
        return await call.manager.tokenize(text, True)
    max_ids = call.manager.context_length
    if not isinstance(item, list):
        raise InvalidRequestError("items must hold lists of token ids", param="items")
    parts = [token_ids(body.query, "query", max_ids), token_ids(item, "items", max_ids)]
    return np.concatenate(parts[::-1] if body.item_first else parts)


def label_scores(logprobs: Sequence[TokenLogprobs], count: int, *, softmax: bool) -> list[float]:
    """Probabilities of the `count` label tokens; with `softmax` they add up to 1."""
    if not logprobs:
        return [0.0] * count
    values = [math.exp(logprob) for logprob in logprobs[-1].top_logprobs[-count:]]
    total = sum(values)
    return [value / total for value in values] if softmax and total > 0 else values
