"""Routes that do not generate: probes, models, tokenizing, metrics, server state, control and profiles."""

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenizers import Tokenizer

from tokenyard.base import InvalidRequestError, PauseMode, SamplingParams, SessionEnded
from tokenyard.base.fleet_headers import TENANT_HEADER
from tokenyard.base.model_cards import list_of_models
from tokenyard.base.sessions import short_session
from tokenyard.base.version import __version__
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.streams import Reader
from tokenyard.server.engine_client import LoraAdapterView
from tokenyard.server.http.api_keys import TENANT
from tokenyard.server.http.errors import check_encoding
from tokenyard.server.http.generate import FIRST_VERSION
from tokenyard.server.http.routes import Given, Routes
from tokenyard.server.http.streaming import read_body
from tokenyard.server.metrics.loads import (
    DEFAULT_SECTIONS,
    DEFERRED,
    DEPRECATED_TOTALS,
    FORMATS,
    as_prometheus,
    load_of,
    sections_of,
    wanted_sections,
)
from tokenyard.server.prompts import check_messages, decode, token_ids
from tokenyard.server.protocol import (
    AbortRequest,
    CloseSessionRequest,
    DetokenizeRequest,
    PauseRequest,
    TokenizeRequest,
    parse,
    parse_body,
)
from tokenyard.server.state import ServerState, matching

routes = Routes()

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
MIN_DETOKENIZED = 100_000
"""`/detokenize` accepts at least this many tokens, whatever the model's context length."""

SCRAPE_TIMEOUT_S = 0.002
"""A scrape does not wait for a long step to end: it gets the counters of the last heartbeat."""

TRANSFER_TIMEOUT_S = 1.0
"""Timeout of `/v1/transfer`, which other engines ask for the addresses of the ranks."""


async def _state(request: Request) -> ServerState:
    """The shared state."""
    return request.app.state.server  # type: ignore[no-any-return]


async def _body(request: Request) -> bytes:
    """The request's body, within the limit. Raises HttpError: 413 beyond it, 415 for one that is compressed."""
    check_encoding(request.headers.get("content-encoding", ""))
    return await read_body(request.receive, (await _state(request)).options.max_body_bytes)


State = Annotated[ServerState, Given(_state)]
Body = Annotated[bytes, Given(_body)]


@routes.get("/health")
@routes.on("HEAD", "/health", in_schema=False)
@routes.get("/ping", in_schema=False)
async def health(state: State) -> Response:
    """200 while the engine's heartbeat is recent and while the model loads; 503 with the reason otherwise.

    With several ranks it is 200 as long as one of them is healthy, and the body has the status of each.
    """
    if state.phase == "loading":
        return Response(status_code=200)
    why = _unhealthy_reason(state)
    ages = state.control.rank_ages_s()
    if len(ages) == 1:
        return Response(why, 503, media_type="text/plain") if why else Response(status_code=200)
    ranks = [_rank_health(state, rank, age_s) for rank, age_s in ages.items()]
    down = [rank["dp_rank"] for rank in ranks if rank["status"] != "up"]
    word = "down" if why else "degraded" if down else "up"
    return JSONResponse({"status": word, "reason": why, "down": down, "ranks": ranks}, 503 if why else 200)


def _unhealthy_reason(state: ServerState) -> str:
    """Why the engine is unhealthy, "" if it is healthy."""
    age_s = state.control.health()
    if age_s <= state.options.health_timeout_s:
        return ""
    if math.isinf(age_s):
        return "the engine has ended"
    return f"the scheduler has been unhealthy for {age_s:.0f} s; see its log"


def _rank_health(state: ServerState, rank: int, age_s: float) -> dict[str, Any]:
    """Status of a rank: up, stuck, or down (it does not run, and may be restarting)."""
    known = math.isfinite(age_s)
    word = "down" if not known else "up" if age_s <= state.options.health_timeout_s else "stuck"
    return {"dp_rank": rank, "status": word, "heartbeat_age_s": round(age_s, 3) if known else None}


@routes.get("/ready")
@routes.on("HEAD", "/ready", in_schema=False)
async def ready(state: State) -> Response:
    """200 when the server accepts requests; 503 while it loads, drains or is stuck."""
    why = state.phase if state.phase != "ready" else _unhealthy_reason(state) and f"stuck: {_unhealthy_reason(state)}"
    return Response(why, 503, {"retry-after": "1"}, "text/plain") if why else Response(status_code=200)


@routes.get("/v1/transfer")
async def transfer(state: State) -> dict[str, Any]:
    """The address and format for KV transfer with each rank; empty without PD disaggregation."""
    return {"ranks": (await state.control.snapshot(TRANSFER_TIMEOUT_S)).get("transfer", {})}


@routes.get("/v1/cache")
async def cache(state: State) -> dict[str, Any]:
    """KV stored and loaded by each rank's KV store, and its records of paused requests.

    Empty without a KV store.
    """
    counters = await state.control.snapshot(TRANSFER_TIMEOUT_S)
    paused = {name: counters[name] for name in ("paused_requests",) if name in counters}
    return {"ranks": counters.get("kv_store", {}), **paused}


@routes.get("/health_generate")
async def health_generate(state: State) -> Response:
    """200 once a token was generated through the whole engine."""
    spec = GenerateReqInput(input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
    await state.admit().feed(spec, _Discard(), lambda delta: None)
    return Response(status_code=200)


class _Discard(Reader):
    """Takes an answer that only has to come."""

    slow = False

    def write(self, delta: OutputDelta) -> None:
        """Drop it."""

    async def drain(self) -> None:
        """Return at once."""


@routes.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """The model that is served, once under each of its names, and its adapters."""
    names = (state.options.model_name, *state.options.model_aliases)
    adapters = [_adapter(state, each) for each in _adapters(state)]
    return list_of_models([*(_model(state, name) for name in names), *adapters])


@routes.get("/v1/models/{name:path}")
async def model(state: State, name: str) -> dict[str, Any]:
    """What is known of a model; 404 for another one."""
    adapter = state.check_model(name)
    if adapter:
        return _adapter(state, state.generator.adapters.loaded[adapter])
    return _model(state, name if name in state.options.model_aliases else "")


def _adapters(state: ServerState) -> list[LoraAdapterView]:
    """The adapters that are loaded."""
    return [*state.generator.adapters.loaded.values()] if state.phase != "loading" else []


def _adapter(state: ServerState, adapter: LoraAdapterView) -> dict[str, Any]:
    """The card of an adapter."""
    return {**_model(state, adapter.name), "root": adapter.folder, "parent": state.options.model_name}


def _model(state: ServerState, name: str = "") -> dict[str, Any]:
    """The card of the model under one of its names, with the fields of OpenAI, vLLM (`root`, `max_model_len`) and
    Anthropic.
    """
    length = state.generator.context_length if state.phase != "loading" else None
    return {
        "id": name or state.options.model_name,
        "object": "model",
        "type": "model",
        "display_name": name or state.options.model_name,
        "created": state.created_s,
        "created_at": datetime.fromtimestamp(state.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "tokenyard",
        "root": state.options.model_name,
        "max_model_len": length,
        "max_input_tokens": length,
        "max_tokens": length,
    }


@routes.post("/tokenize")
@routes.post("/v1/tokenize", in_schema=False)
async def tokenize(state: State, body: Body) -> dict[str, Any]:
    """Token ids of a prompt, or of messages through the chat template."""
    fields = await parse_body(body, TokenizeRequest, strict=state.options.strict_api)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("give exactly one of prompt and messages", param="prompt")
    special = fields.add_special_tokens is not False and fields.messages is None
    text = fields.prompt
    if text is None:
        text = await state.generator.render_chat(
            check_messages(fields.messages or [], state.generator.context_length),
            add_generation_prompt=fields.add_generation_prompt is not False and not fields.continue_final_message,
            continue_final_message=bool(fields.continue_final_message),
            tools=fields.tools,
            chat_template_kwargs=fields.chat_template_kwargs or {},
        )
    tokenizer = state.generator.tokenizer
    ids = (await state.generator.tokenize(text, special, allow_too_long=True)).tolist()
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": state.generator.context_length}
    if fields.return_token_strs and tokenizer is not None:
        answer["token_strs"] = await asyncio.to_thread(_token_strings, tokenizer, ids)
    return answer


def _token_strings(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    """The vocabulary's tokens with these ids, None for unknown ids."""
    return [tokenizer.id_to_token(token) for token in ids]


@routes.post("/detokenize")
@routes.post("/v1/detokenize", in_schema=False)
async def detokenize(state: State, body: Body) -> dict[str, Any]:
    """The text of token ids."""
    fields = await parse_body(body, DetokenizeRequest, strict=state.options.strict_api)
    tokenizer = state.generator.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("this server has no tokenizer", param="tokens")
    ids = token_ids(fields.tokens, "tokens", max(state.generator.context_length, MIN_DETOKENIZED)).tolist()
    known = await asyncio.to_thread(_token_strings, tokenizer, ids)
    if None in known:
        raise InvalidRequestError(f"the tokenizer has no token {ids[known.index(None)]}", param="tokens")
    skip = bool(fields.skip_special_tokens)
    return {"prompt": await decode(tokenizer, ids, skip_special_tokens=skip)}


@routes.get("/metrics")
async def metrics(state: State) -> Response:
    """Prometheus text. During a long step its gauges are up to a second old."""
    if state.phase != "loading":
        snapshot = await state.control.snapshot(SCRAPE_TIMEOUT_S)
        adapters = {"lora_adapters": float(len(found))} if (found := _adapters(state)) else {}
        state.metrics.set_load(load_of(snapshot) | rates_of(snapshot) | adapters, totals_of(snapshot))
        state.metrics.adaptive = snapshot.get("adaptive", {})
        state.metrics.tp_ranks = snapshot.get("tp_ranks", {})
        state.metrics.kv = snapshot
        ages = state.control.rank_ages_s()
        if len(ages) > 1:
            ranks = await state.control.rank_snapshots(SCRAPE_TIMEOUT_S)
            up = {rank: {"up": float(age <= state.options.health_timeout_s)} for rank, age in ages.items()}
            loads = {rank: load_of(counters) | rates_of(counters) for rank, counters in ranks.items()}
            state.metrics.ranks = {rank: up[rank] | loads.get(rank, {}) for rank in up}
    return Response(state.metrics.exposition(), media_type=PROMETHEUS)


def rates_of(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """Gauges by our names that are ratios of the scheduler's counters."""
    counters = snapshot.get("counters", {})
    return {
        "new_token_ratio": snapshot.get("new_token_ratio", 0.0),
        "cache_hit_rate": counters.get("hit_tokens", 0) / max(counters.get("prompt_tokens", 0), 1),
    }


def totals_of(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """Counters by our names, from a scheduler snapshot."""
    counters = snapshot.get("counters", {})
    deferred = snapshot.get("measures", {}).get(DEFERRED, 0)
    return {
        "retractions": counters.get("retracted", 0),
        "preemptions": counters.get("preempted", 0),
        "recomputed_tokens": counters.get("recomputed_tokens", 0),
        "spec_verify_rows": counters.get("verify_rows", 0),
        "spec_draft_tokens": counters.get("draft_tokens", 0),
        "spec_accepted_tokens": counters.get("accepted_draft_tokens", 0),
        "lora_loads": counters.get("adapter_loads", 0),
        "evicted_tokens": snapshot.get("evicted_tokens", 0),
        "evicted_sessions": counters.get("evicted_sessions", 0),
        "scheduler_steps": counters.get("steps", 0),
        "aborted_requests": counters.get("aborted", 0),
        "queried_tokens": counters.get("prompt_tokens", 0),
        DEFERRED: deferred,
        **dict.fromkeys(DEPRECATED_TOTALS, deferred),
    }


@routes.get("/v1/loads")
async def loads(
    state: State, include: str = DEFAULT_SECTIONS, format: str = "json", dp_rank: int | None = None
) -> dict[str, Any] | Response:
    """Load of each rank, or of `dp_rank`, for routers and planners: those sections that `include` names."""
    if format not in FORMATS:
        raise InvalidRequestError(f"format must be one of {', '.join(FORMATS)}", param="format")
    known = state.control.rank_ages_s()
    if dp_rank is not None and dp_rank not in known:
        message = f"there is no rank {dp_rank}; this server has {len(known)}, counted from 0"
        raise InvalidRequestError(message, param="dp_rank", code="unknown_rank")
    wanted, found = wanted_sections(include), await state.control.rank_snapshots()
    sections = [
        sections_of(counters, wanted, rank) for rank, counters in found.items() if dp_rank is None or rank == dp_rank
    ]
    if format == "prometheus":
        return Response(as_prometheus(sections), media_type=PROMETHEUS)
    return {"object": "list", "data": sections}


@routes.get("/get_load")
async def get_load(state: State) -> list[dict[str, Any]]:
    """The older form of /v1/loads."""
    return [
        {
            "dp_rank": rank,
            "num_reqs": load["running_requests"] + load["queued_requests"],
            "num_waiting_reqs": load["queued_requests"],
            "num_tokens": load["used_tokens"],
        }
        for rank, counters in (await state.control.rank_snapshots()).items()
        for load in [load_of(counters)]
    ]


@routes.get("/server_info")
@routes.get("/get_server_info", in_schema=False)
async def server_info(state: State) -> dict[str, Any]:
    """Settings (without API keys) and state."""
    age_s = state.control.health() if state.phase != "loading" else math.inf
    ranks = await state.control.rank_snapshots() if state.phase != "loading" else {}
    ports = {rank: _bootstrap_port(counters) for rank, counters in ranks.items()}
    size = state.options.info.get("dp_size", 1)
    return {
        **state.options.info,
        "default_sampling_params": state.options.default_sampling,
        "version": __version__,
        "boot_id": state.boot_id,
        "continues_output_ids": True,
        "continues_any_api": True,
        "status": state.phase,
        "dp_size": size,
        "disaggregation_bootstrap_ports": [ports.get(rank, 0) for rank in range(size)] if any(ports.values()) else [],
        "heartbeat_age_s": age_s if math.isfinite(age_s) else None,
        "cost_model": next((counters["cost_model"] for counters in ranks.values() if "cost_model" in counters), None),
        "internal_states": [_with_old_names(counters) for counters in ranks.values()],
    }


def _with_old_names(counters: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a rank, with the names of keys until the next release."""
    return {**counters, "tiers": counters["kv_store"]} if "kv_store" in counters else {**counters}


def _bootstrap_port(counters: Mapping[str, Any]) -> int:
    """The port at which other engines ask a rank for KV; 0 if the rank does not serve KV."""
    transfer: Mapping[str, Any] = next(iter(counters.get("transfer", {}).values()), {})
    port = str(transfer.get("address", "")).rpartition(":")[2]
    return int(port) if port else 0


@routes.get("/model_info")
@routes.get("/get_model_info", in_schema=False)
async def model_info(state: State) -> dict[str, Any]:
    """The model that is served."""
    return {
        "model_path": state.options.info.get("model_path"),
        "tokenizer_path": state.options.info.get("tokenizer_path"),
        "served_model_name": state.options.model_name,
        "is_generation": True,
        "weight_version": state.control.weight_version or FIRST_VERSION,
        "max_model_len": state.generator.context_length,
    }


@routes.get("/version")
async def version() -> dict[str, Any]:
    """The version of the package."""
    return {"version": __version__}


@routes.post("/flush_cache")
@routes.post("/reset_prefix_cache", in_schema=False)
@routes.get("/flush_cache", in_schema=False)
async def flush_cache(state: State) -> dict[str, Any]:
    """Empty the prefix cache; 400 while requests wait or run."""
    if not await state.control.flush_cache():
        raise InvalidRequestError("the cache is not flushed: requests are waiting or running", code="busy")
    return {"success": True}


@routes.post("/close_session")
async def close_session(state: State, body: Body, request: Request) -> dict[str, Any]:
    """A session of the caller's tenant has no further turns: its KV may be evicted first."""
    fields = parse(body, CloseSessionRequest, strict=state.options.strict_api)
    if not fields.session_id:
        raise InvalidRequestError("session_id is empty; give the session's id", param="session_id")
    headers = request.headers
    by_key = request.scope.get(TENANT) or headers.get(TENANT_HEADER)
    tenant = by_key or fields.tenant or headers.get("x-tenant") or fields.user or ""
    session = short_session(fields.session_id)
    state.prompts.closed(tenant, session)
    await state.control.end_session(SessionEnded(session, tenant))
    return {"success": True}


@routes.post("/clear_hicache_storage_backend")
async def clear_store(state: State) -> dict[str, Any]:
    """Delete all KV in the KV store (--enable-hierarchical-cache)."""
    return {"success": True, "blocks": await state.control.clear_store()}


@routes.post("/abort_request")
async def abort_request(state: State, body: Body) -> dict[str, Any]:
    """Abort a request by its id, or all requests."""
    fields = parse(body or b"{}", AbortRequest, strict=state.options.strict_api)
    if not fields.abort_all and not fields.rid:
        raise InvalidRequestError("give rid, or abort_all: true", param="rid")
    meant = fields.rid or ""
    records = state.generator.records
    named = dict.fromkeys((*state.ids_of(meant), *matching(meant, records.rids if records is not None else ())))
    rids: list[str | None] = [None] if fields.abort_all else [*named]
    for rid in rids:
        await state.control.abort(rid)
    return {"success": True}


@routes.post("/pause_generation")
async def pause_generation(state: State, body: Body) -> dict[str, Any]:
    """Pause the engine until /continue_generation. `mode` says what happens to running requests."""
    fields = parse(body or b"{}", PauseRequest, strict=state.options.strict_api)
    modes: tuple[PauseMode, ...] = get_args(PauseMode)
    mode = next((mode for mode in modes if mode == (fields.mode or "in_place")), None)
    if mode is None:
        raise InvalidRequestError(f"mode must be one of {', '.join(modes)}", param="mode")
    await state.control.pause(mode)
    return {"success": True, "mode": mode}


@routes.post("/continue_generation")
async def continue_generation(state: State) -> dict[str, Any]:
    """Undo /pause_generation."""
    await state.control.continue_()
    return {"success": True}


@routes.post("/start_profile")
async def start_profile(state: State) -> dict[str, Any]:
    """Start a profile of the scheduler's steps and of requests that arrive from now on; 400 if one is running."""
    if not await state.control.start_profile():
        raise InvalidRequestError("a profile is already running; end it with /stop_profile", code="profile_runs")
    state.start_timeline()
    return {"success": True}


@routes.post("/stop_profile")
async def stop_profile(state: State) -> Response:
    """End the profile and return it as a file for ui.perfetto.dev or chrome://tracing; 400 if none is running."""
    steps = await state.control.stop_profile()
    if steps is None:
        raise InvalidRequestError("no profile is running; start one with /start_profile", code="no_profile")
    events = orjson.loads(steps) + state.stop_timeline()
    headers = {"content-disposition": 'attachment; filename="tokenyard-trace.json"'}
    return Response(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), 200, headers, "application/json")
