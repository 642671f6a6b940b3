"""Changing the model's weights while the server runs, and vLLM's names for pauses around it."""

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenyard.base import ConfigError, InvalidRequestError, PauseMode, TokenyardError, WeightSource
from tokenyard.engine.frontend.weight_files import check_tensor_file
from tokenyard.engine.frontend.weight_updates import MEMORY_TAGS, WeightUpdate
from tokenyard.server.http.errors import outcome_of
from tokenyard.server.http.generate import FIRST_VERSION
from tokenyard.server.http.routes import Routes
from tokenyard.server.http.streaming import read_body
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.protocol import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    MemoryOccupation,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    parse,
)
from tokenyard.server.state import ServerState

logger = logging.getLogger(__name__)
routes = Routes()

LOAD_FORMATS = ("", "auto", "safetensors")
VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place", "retract": "retract"}
MAX_VERSION_CHARS = 128
TENSOR_TYPES = ("application/octet-stream", "application/vnd.safetensors")
DEFAULT_ROWS, MAX_ROWS = 100, 10_000
GROUP = "weight_update_group"
"""SGLang's default name of a group."""


def version_of(state: ServerState) -> str:
    """The version of the weights in use, as clients see it."""
    return state.control.weight_version or FIRST_VERSION


@routes.get("/weight_version")
@routes.get("/get_weight_version", in_schema=False)
async def weight_version(state: State) -> dict[str, Any]:
    """The version of the weights in use."""
    return {"weight_version": version_of(state)}


@routes.post("/update_weights_from_disk")
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
    source = WeightSource(fields.model_path, draft_folder=fields.draft_model_path or "")
    update = WeightUpdate(source, version, fields.flush_cache is not False)
    return await apply_update(state, update, "model_path")


@routes.post("/update_weights_from_tensor")
async def update_weights_from_tensor(
    request: Request, state: State, weight_version: str = "", flush_cache: bool = True, abort_all_requests: bool = False
) -> Response:
    """Use new values of some tensors: the body is a safetensors file, or JSON with the path of one."""
    body = request.headers.get("content-type", "").partition(";")[0].strip()
    files = state.control.weights.files
    if body in TENSOR_TYPES:
        version = checked_version(weight_version)
        path = await _receive(request, files.new_path())
    else:
        content = await read_body(request.receive, state.options.max_body_bytes)
        fields = parse(content, UpdateWeightsFromTensor, strict=state.options.strict_api)
        if fields.serialized_named_tensors is not None:
            message = (
                "pickled tensors are not read, as loading them could run code; send a safetensors file as the body "
                "(content-type: application/octet-stream), or the path of one"
            )
            raise InvalidRequestError(message, param="serialized_named_tensors")
        if not fields.path:
            raise InvalidRequestError("give the path of a safetensors file, or send one as the body", param="path")
        # Before the file is copied, as nothing would remove it.
        version = checked_version(fields.weight_version or weight_version)
        flush_cache = flush_cache if fields.flush_cache is None else fields.flush_cache
        abort_all_requests = fields.abort_all_requests or abort_all_requests
        path = await asyncio.to_thread(files.copy, fields.path)
    await asyncio.to_thread(check_tensor_file, path)
    staged = state.control.weights.stage(path)
    if not flush_cache:
        message = f"the tensors are used with the next ones that come without flush_cache=false; {staged} files wait"
        return JSONResponse({"success": True, "message": message})
    if abort_all_requests:
        await state.control.abort()
    return await answer_update(state, state.control.weights.use_staged(version), None)


async def _receive(request: Request, path: Path) -> Path:
    """Write the body of a request to a file. Raises InvalidRequestError if there is no room for it."""
    try:
        with path.open("wb") as file:
            async for part in request.stream():
                await asyncio.to_thread(file.write, part)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InvalidRequestError(f"the tensors could not be kept: {error.strerror}") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


@routes.post("/init_weights_update_group")
async def init_weights_update_group(state: State, body: Body) -> Response:
    """Join a trainer's group of torch.distributed; the response comes once all members have joined."""
    fields = parse(body, InitWeightsUpdateGroup, strict=state.options.strict_api)
    if not 0 < fields.master_port < 2**16:
        raise InvalidRequestError("master_port must be 1 to 65535", param="master_port")
    if fields.rank_offset < 1:
        raise InvalidRequestError("rank_offset must be at least 1, as rank 0 is the trainer", param="rank_offset")
    group = fields.group_name or GROUP
    work = state.control.weights.join_group(
        *(group, fields.master_address, fields.master_port),
        rank_offset=fields.rank_offset,
        size=fields.world_size,
        backend=fields.backend or "nccl",
    )
    return await _answer_call(work, f"the group {group} is joined")


@routes.post("/destroy_weights_update_group")
async def destroy_weights_update_group(state: State, body: Body) -> Response:
    """Leave a trainer's group."""
    group = parse(body or b"{}", DestroyWeightsUpdateGroup, strict=state.options.strict_api).group_name or GROUP
    return await _answer_call(state.control.weights.leave_group(group), f"the group {group} is left")


@routes.post("/update_weights_from_distributed")
async def update_weights_from_distributed(state: State, body: Body) -> Response:
    """Use new values of some tensors, which the trainer broadcasts in the group meanwhile."""
    fields = parse(body, UpdateWeightsFromDistributed, strict=state.options.strict_api)
    if not fields.names or not len(fields.names) == len(fields.dtypes) == len(fields.shapes):
        raise InvalidRequestError("names, dtypes and shapes must have one entry for each tensor", param="names")
    version = checked_version(fields.weight_version)
    if fields.abort_all_requests:
        await state.control.abort()
    tensors = list(zip(fields.names, fields.dtypes, fields.shapes, strict=True))
    received = await _answer_call(state.control.weights.receive(fields.group_name or GROUP, tensors), "received")
    if received.status_code != 200 or fields.flush_cache is False:
        return received
    return await answer_update(state, state.control.weights.use_staged(version), None)


@routes.post("/release_memory_occupation")
async def release_memory_occupation(state: State, body: Body) -> Response:
    """Give the memory of weights and KV back until /resume_memory_occupation; new requests wait. 400 while requests are
    open.
    """
    return await _answer_call(state.control.weights.release(_tags(state, body)), "released")


@routes.post("/resume_memory_occupation")
async def resume_memory_occupation(state: State, body: Body) -> Response:
    """Take memory again. Weights are read from where those in use came from."""
    return await _answer_call(state.control.weights.resume(_tags(state, body)), "resumed")


def _tags(state: ServerState, body: bytes) -> set[str]:
    """The kinds of memory that a request names. Raises InvalidRequestError for an unknown one."""
    fields = parse(body or b"{}", MemoryOccupation, strict=state.options.strict_api)
    tags = set(MEMORY_TAGS if fields.tags is None else fields.tags)
    if not tags or not tags <= set(MEMORY_TAGS):
        raise InvalidRequestError(f"tags are some of {', '.join(MEMORY_TAGS)}", param="tags")
    return tags


async def _answer_call(work: Awaitable[None], done: str) -> Response:
    """Answer as SGLang does, with this API's error where the call failed."""
    try:
        await work
    except TokenyardError as error:
        return _failed(error, error.message)
    return JSONResponse({"success": True, "message": done})


def _failed(error: TokenyardError, message: str) -> Response:
    outcome = outcome_of(error)
    detail = {"message": error.message, "type": outcome.type, "param": error.param, "code": outcome.code}
    return JSONResponse({"success": False, "message": message, "error": detail}, outcome.status)


@routes.post("/get_weights_by_name")
async def get_weights_by_name(state: State, body: Body) -> Any:
    """The first rows of a tensor of the checkpoint in use, as nested lists."""
    fields = parse(body, GetWeightsByName, strict=state.options.strict_api)
    rows = DEFAULT_ROWS if fields.truncate_size is None else fields.truncate_size
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidRequestError(f"truncate_size must be 1 to {MAX_ROWS}", param="truncate_size")
    try:
        found = await state.control.weight(fields.name, rows)
    except ConfigError as error:
        error.param = "name"
        raise
    # JSON has no NaN and no infinity, which weights of a failed training have; these are null.
    return Response(orjson.dumps(found), media_type="application/json")


def checked_version(version: str | None) -> str:
    """The version that a client names, "" for none. Raises InvalidRequestError for one that cannot be a name."""
    version = version or ""
    if len(version) > MAX_VERSION_CHARS or not version.isprintable() or "#" in version:
        message = f"weight_version must be up to {MAX_VERSION_CHARS} printable characters without '#'"
        raise InvalidRequestError(message, param="weight_version")
    return version


async def apply_update(state: ServerState, update: WeightUpdate, param: str) -> Response:
    """Change the weights; see `answer_update`."""
    return await answer_update(state, state.control.update_weights(update), param)


async def answer_update(state: ServerState, work: Awaitable[str], param: str | None) -> Response:
    """Answer as SGLang does, with this API's error next to it where an update failed."""
    try:
        version = await work
    except TokenyardError as error:
        error.param = error.param or (param if isinstance(error, ConfigError) else None)
        logger.error("the weights were not changed: %s", error.message)
        return _failed(error, f"the weights were not changed: {error.message}")
    paused = state.control.paused
    message = f"weights of version {version} are in use"
    answer = {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}
    if paused:
        counters = await state.control.snapshot()
        answer["num_paused_requests"] = sum(counters.get(name, 0) for name in ("waiting", "prefilling", "running"))
    return Response(orjson.dumps(answer), media_type="application/json")


@routes.post("/pause")
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


@routes.post("/resume")
async def resume(state: State) -> dict[str, Any]:
    """vLLM's name of /continue_generation."""
    await state.control.continue_()
    return {"status": "resumed"}


@routes.get("/is_paused")
async def is_paused(state: State) -> dict[str, Any]:
    """Whether the engine is paused."""
    return {"is_paused": state.control.paused}
