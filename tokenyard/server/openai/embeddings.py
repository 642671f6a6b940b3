"""Embeddings: `/v1/embeddings` in OpenAI's shape, `/v1/rerank` in Jina's and Cohere's, `/score` in vLLM's, and
`/api/embed` in Ollama's.

A vector is pooled from the model's last hidden states and normalized. Models trained for embeddings, such as
Qwen3-Embedding, give better vectors than chat models.
"""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tokenyard.base import Finish, Int32Array, InvalidRequestError, Pooling, SamplingParams, TokenyardError
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.server.http.generate import collect
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.openai.sampling_fields import new_generate_input
from tokenyard.server.prompts import split_prompts
from tokenyard.server.protocol import SchedulingFields, parse_body

Vectors = npt.NDArray[np.float32]


@dataclass(kw_only=True)
class PoolingFields(SchedulingFields):
    """Fields that all pooling requests share. `pooling` is last or mean."""

    model: str | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None


@dataclass(kw_only=True)
class EmbeddingsRequest(PoolingFields):
    """`POST /v1/embeddings`."""

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None


@dataclass(kw_only=True)
class RerankRequest(PoolingFields):
    """`POST /v1/rerank` and `/rerank`. Documents are texts, or objects with a text."""

    query: str
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool | None = None


@dataclass(kw_only=True)
class PairsRequest(PoolingFields):
    """`POST /score`: one text against each of several, or pairs of as many."""

    text_1: str | list[str]
    text_2: str | list[str]


@dataclass(kw_only=True)
class OllamaEmbed(PoolingFields):
    """`POST /api/embed`."""

    input: str | list[str]
    dimensions: int | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


async def embeddings(call: RequestContext) -> None:
    """Answer with a vector for each input."""
    body = await parse_body(call.body, EmbeddingsRequest, strict=call.state.options.strict_api)
    adapter = call.state.check_model(body.model, body.lora_path)
    if body.encoding_format not in (None, "float", "base64"):
        raise InvalidRequestError("encoding_format must be float or base64", param="encoding_format")
    vectors, tokens = await _vectors(call, body, adapter, split_prompts(call, body.input, "input"))
    vectors = shortened(vectors, body.dimensions)
    if body.encoding_format == "base64":
        shown: list[Any] = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    else:
        shown = [vector.tolist() for vector in vectors]
    content = {
        "object": "list",
        "data": [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(shown)],
        "model": body.model if adapter and body.model else call.state.options.model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    await call.reply.whole(orjson.dumps(content))


async def rerank(call: RequestContext) -> None:
    """Order documents by the cosine similarity of their vectors to that of the query, most similar first."""
    body = await parse_body(call.body, RerankRequest, strict=call.state.options.strict_api)
    adapter = call.state.check_model(body.model, body.lora_path)
    texts = [_document(document, place) for place, document in enumerate(body.documents)]
    if not texts:
        raise InvalidRequestError("documents must not be empty", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequestError("top_n must be at least 1", param="top_n")
    vectors, tokens = await _vectors(call, body, adapter, split_prompts(call, [body.query, *texts], "documents"))
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(texts)), key=lambda place: (-scores[place], place))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    content = {
        "object": "list",
        "model": body.model if adapter and body.model else call.state.options.model_name,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    await call.reply.whole(orjson.dumps(content))


async def score_pairs(call: RequestContext) -> None:
    """Answer with the cosine similarity of the vectors of each pair of texts."""
    body = await parse_body(call.body, PairsRequest, strict=call.state.options.strict_api)
    adapter = call.state.check_model(body.model, body.lora_path)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if not first or len(first) not in (1, len(second)):
        raise InvalidRequestError("text_1 must be one text, or as many as text_2", param="text_1")
    vectors, tokens = await _vectors(call, body, adapter, split_prompts(call, [*first, *second], "text_2"))
    scores = np.sum(vectors[: len(first)] * vectors[len(first) :], axis=1).tolist()
    content = {
        "object": "list",
        "model": body.model if adapter and body.model else call.state.options.model_name,
        "data": [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    await call.reply.whole(orjson.dumps(content))


async def ollama_embed(call: RequestContext) -> None:
    """Answer Ollama's request for vectors."""
    began_ns = time.monotonic_ns()
    body = await parse_body(call.body, OllamaEmbed)
    adapter = call.state.check_model((body.model or "").removesuffix(":latest"), body.lora_path)
    vectors, tokens = await _vectors(call, body, adapter, split_prompts(call, body.input, "input"))
    content = {
        "model": body.model or call.state.options.model_name,
        "embeddings": shortened(vectors, body.dimensions).tolist(),
        "total_duration": time.monotonic_ns() - began_ns,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }
    await call.reply.whole(orjson.dumps(content))


async def _vectors(
    call: RequestContext, body: PoolingFields, adapter: str, prompts: Sequence[str | Int32Array]
) -> tuple[Vectors, int]:
    """(float32[prompts, size], each row normalized, number of prompt tokens)."""
    specs = [_spec(call, body, prompt, place) for place, prompt in enumerate(prompts)]
    for spec in specs:
        spec.lora = adapter
    answers = await collect(call, specs, 1)
    return unit_vectors([answer.finish for answer in answers]), sum(answer.prompt_tokens for answer in answers)


def _spec(call: RequestContext, body: PoolingFields, prompt: str | Int32Array, place: int) -> GenerateReqInput:
    """The engine request for the vector of one text."""
    rid = f"{body.rid}-{place}" if isinstance(body.rid, str) else ""
    spec = new_generate_input(body, call.headers, call.state.options.class_targets, tenant=call.tenant, rid=rid)
    spec.pooling = pooling_of(body.pooling)
    if isinstance(prompt, str):
        spec.text = prompt
        spec.add_special_tokens = body.add_special_tokens is not False
    else:
        spec.input_ids = prompt
    spec.sampling = SamplingParams(max_new_tokens=0, temperature=0.0)
    return spec


def pooling_of(name: str | None) -> Pooling:
    """How a vector is pooled. Raises InvalidRequestError for an unknown name."""
    match name:
        case None | "last":
            return "last"
        case "mean":
            return "mean"
    raise InvalidRequestError("pooling must be last or mean", param="pooling")


def unit_vectors(finishes: Sequence[Finish | None]) -> Vectors:
    """float32[answers, size], each row normalized. Raises TokenyardError if the engine returned no vector."""
    if not all(finish is not None and finish.vector for finish in finishes):
        raise TokenyardError("the engine gave no vector")
    return _normalized(np.stack([np.frombuffer(finish.vector, dtype=np.float32) for finish in finishes if finish]))


def _normalized(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0.0, lengths, 1.0), dtype=np.float32)


def shortened(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` of each vector, normalized again. Raises InvalidRequestError for too many."""
    size = vectors.shape[1]
    if dimensions is None:
        return vectors
    if not 1 <= dimensions <= size:
        raise InvalidRequestError(f"dimensions must be between 1 and {size}", param="dimensions")
    return _normalized(vectors[:, :dimensions])


def _document(document: Any, place: int) -> str:
    """The text of a document. Raises InvalidRequestError for anything else."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"documents[{place}] must be a text, or an object with one", param="documents")
    return text
