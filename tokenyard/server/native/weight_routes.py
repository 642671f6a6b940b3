"""Changing the model's weights while the server runs, and vLLM's names for pauses around it."""

import logging
from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tokenyard.base import ConfigError, InvalidRequestError, PauseMode, TokenyardError, WeightSource
from tokenyard.engine.frontend.weight_updates import WeightUpdate
from tokenyard.server.http.errors import outcome_of
from tokenyard.server.http.generate import FIRST_VERSION
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.protocol import UpdateWeightsFromDisk, parse
from tokenyard.server.state import ServerState

logger = logging.getLogger(__name__)
router = APIRouter()

LOAD_FORMATS = ("", "auto", "safetensors")
VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place", "retract": "retract"}
MAX_VERSION_CHARS = 128


def version_of(state: ServerState) -> str:
    """The version of the weights in use, as clients see it."""
    return state.control.weight_version or FIRST_VERSION


@router.get("/weight_version")
@router.get("/get_weight_version", include_in_schema=False)
async def weight_version(state: State) -> dict[str, Any]:
    """The version of the weights in use."""
    return {"weight_version": version_of(state)}


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(state: State, body: Body) -> Response:
    """Use the weights of another checkpoint of the same model, without ending requests; 400, and the old weights stay,
    if they do not fit or are damaged.
    """
    fields = parse(body, UpdateWeightsFromDisk, strict=state.options.strict_api)
    if not fields.model_path:
        raise InvalidRequestError("model_path is empty; give the folder of a checkpoint", param="model_path")
    if (fields.load_format or "") not in LOAD_FORMATS:
        raise InvalidRequestError("load_format must be auto or safetensors", param="load_format")
    version = checked_version(fields.weight_version)
    if fields.abort_all_requests:
        await state.control.abort()
    update = WeightUpdate(WeightSource(fields.model_path), version, fields.flush_cache is not False)
    return await apply_update(state, update, "model_path")


def checked_version(version: str | None) -> str:
    """The version that a client names, "" for none. Raises InvalidRequestError for one that cannot be a name."""
    version = version or ""
    if len(version) > MAX_VERSION_CHARS or not version.isprintable() or "#" in version:
        message = f"weight_version must be up to {MAX_VERSION_CHARS} printable characters without '#'"
        raise InvalidRequestError(message, param="weight_version")
    return version


async def apply_update(state: ServerState, update: WeightUpdate, param: str) -> Response:
    """Change the weights, and answer as SGLang does, with this API's error next to it where that failed."""
    try:
        version = await state.control.update_weights(update)
    except TokenyardError as error:
        outcome = outcome_of(error)
        error.param = error.param or (param if isinstance(error, ConfigError) else None)
        logger.error("the weights were not changed: %s", error.message)
        detail = {"message": error.message, "type": outcome.type, "param": error.param, "code": outcome.code}
        message = f"the weights were not changed: {error.message}"
        return JSONResponse({"success": False, "message": message, "error": detail}, outcome.status)
    paused = state.control.paused
    message = f"weights of version {version} are in use"
    answer = {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}
    if paused:
        counters = await state.control.snapshot()
        answer["num_paused_requests"] = sum(counters.get(name, 0) for name in ("waiting", "prefilling", "running"))
    return Response(orjson.dumps(answer), media_type="application/json")


@router.post("/pause")
async def pause(state: State, mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
    """vLLM's name of /pause_generation. `keep` keeps running requests and their KV, `abort` ends them, and `retract`
    has them computed again. The prefix cache is emptied unless requests use it.
    """
    if mode not in VLLM_MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(VLLM_MODES)}", param="mode")
    await state.control.pause(VLLM_MODES[mode])
    if clear_cache:
        await state.control.flush_cache()
    return {"status": "paused", "mode": mode}


@router.post("/resume")
async def resume(state: State) -> dict[str, Any]:
    """vLLM's name of /continue_generation."""
    await state.control.continue_()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(state: State) -> dict[str, Any]:
    """Whether the engine is paused."""
    return {"is_paused": state.control.paused}
