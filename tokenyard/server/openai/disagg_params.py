"""PD disaggregation parameters of requests: one half goes to a prefill engine, the other to a decode engine.

SGLang routers send both halves together, with the same `bootstrap_host`, `bootstrap_port` and `bootstrap_room`. vLLM
routers send one after the other: the answer to the first, which has `do_remote_decode`, carries the
`kv_transfer_params` of the second.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from tokenyard.base import InvalidRequestError
from tokenyard.base.request import BootstrapInfo
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.server.http.request_context import RequestContext
from tokenyard.server.protocol import DisaggFields

SNAPSHOT_TIMEOUT_S = 0.05
MAX_BOOTSTRAP_ROOM = 2**64


async def set_kv_routes(
    call: RequestContext, fields: DisaggFields, specs: Sequence[GenerateReqInput]
) -> dict[str, Any]:
    """Set the KV transfer of each spec; returns fields for the answer.

    Raises InvalidRequestError for fields that are inconsistent or that this server does not support.
    """
    mode = call.state.options.disaggregation_mode
    given = [
        name
        for name in ("bootstrap_host", "bootstrap_room", "kv_transfer_params")
        if getattr(fields, name) not in (None, "", [], {})
    ]
    if not given:
        return {}
    if mode == "null":
        message = f"{given[0]} needs a server with --disaggregation-mode"
        raise InvalidRequestError(message, param=given[0], code="unsupported")
    if fields.bootstrap_room is not None:
        for place, spec in enumerate(specs):
            spec.kv = _bootstrap_route(fields, place, mode)
            spec.rank = 0 if spec.rank is None and not spec.kv.peer else spec.rank
        return {}
    if fields.kv_transfer_params:
        return await _params(call, fields.kv_transfer_params, specs)
    raise InvalidRequestError("bootstrap_host needs a bootstrap_room", param="bootstrap_room")


def _bootstrap_route(fields: DisaggFields, place: int, mode: str) -> BootstrapInfo:
    """Bootstrap info of prompt `place`: the prefill half waits in the room, the decode half connects to it."""
    room, host, port = (_one(fields, name, place) for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"))
    if type(room) is not int or not 0 <= room < MAX_BOOTSTRAP_ROOM:
        raise InvalidRequestError("bootstrap_room must be a whole number below 2**64", param="bootstrap_room")
    if mode == "prefill":
        return BootstrapInfo(f"room {room}")
    if type(host) is not str or not host or type(port) is not int or not 0 < port < 65536:
        message = "the decode half needs bootstrap_host and bootstrap_port of the engine that prefills"
        raise InvalidRequestError(message, param="bootstrap_host")
    return BootstrapInfo(f"room {room}", f"{host}:{port}")


def _one(fields: DisaggFields, name: str, place: int) -> Any:
    value = getattr(fields, name)
    if not isinstance(value, list):
        return value
    if place >= len(value):
        raise InvalidRequestError(f"{name} has {len(value)} entries for more prompts", param=name)
    return value[place]


async def _params(call: RequestContext, params: dict[str, Any], specs: Sequence[GenerateReqInput]) -> dict[str, Any]:
    if len(specs) != 1:
        raise InvalidRequestError("kv_transfer_params is for one prompt", param="kv_transfer_params")
    if params.get("do_remote_prefill"):
        room, host, port = (params.get(name) for name in ("remote_request_id", "remote_host", "remote_port"))
        if not (isinstance(room, str) and 0 < len(room) <= 128 and isinstance(host, str) and type(port) is int):
            message = "kv_transfer_params needs remote_request_id, remote_host and remote_port"
            raise InvalidRequestError(message, param="kv_transfer_params")
        specs[0].kv = BootstrapInfo(room, f"{host}:{port}", str(params.get("remote_engine_id", ""))[:64])
        return {}
    if not params.get("do_remote_decode"):
        return {}
    ranks = (await call.state.control.snapshot(SNAPSHOT_TIMEOUT_S)).get("transfer", {})
    known: dict[str, Any] = next(iter(ranks.values()), {})
    host, _, port = known.get("address", "").rpartition(":")
    if not host:
        raise InvalidRequestError("this server sends no KV (--disaggregation-mode)", param="kv_transfer_params")
    room = f"req-{uuid.uuid4().hex}"
    specs[0].kv, specs[0].rank = BootstrapInfo(room), 0
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": known.get("boot_id", ""),
        "remote_request_id": room,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_block_ids": [],
        "tp_size": 1,
    }
    return {"kv_transfer_params": params}
