"""Single requests by their id while they wait or run: how urgent they are, pausing, resuming, explaining.

The id is the one that the client gave (`rid`, `request_id`, X-Request-Id) or that of the answer.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Response

from tokenyard.base import InvalidRequestError
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.generation_route import GenerationRoute
from tokenyard.server.http.streaming import Receive, Scope, Send
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.native.explain import explained
from tokenyard.server.native.generate import resume
from tokenyard.server.native.policy_routes import USER_POLICY_MARK
from tokenyard.server.protocol import UpdateRequest, parse
from tokenyard.server.state import ServerState, matching

router = APIRouter(prefix="/v1/requests")


@router.patch("/{request_id:path}")
async def update_request(state: State, request_id: str, body: Body) -> dict[str, Any]:
    """Change the priority or the deadline (counted from arrival) of a request that waits or runs; 404 if it is gone.

    A `note` says so where priorities do not count.
    """
    fields = parse(body, UpdateRequest, strict=state.options.strict_api)
    priority, deadline_ms = fields.priority, fields.deadline_ms
    if priority is None and deadline_ms is None:
        raise InvalidRequestError("give priority, deadline_ms or both", param="priority")
    await _apply_to_request(
        state, request_id, lambda rid: state.control.update(rid, priority=priority, deadline_ms=deadline_ms)
    )
    told = {"id": request_id, "priority": priority, "deadline_ms": deadline_ms}
    policy = (await state.control.snapshot()).get("policy", "")
    if priority is not None and not _counts_priorities(policy):
        told["note"] = f"priorities do not count under policy {policy}; see --enable-priority-scheduling"
    return told


@router.post("/{request_id:path}/pause")
async def pause_request(state: State, request_id: str) -> dict[str, Any]:
    """Let a request give up its place until it is resumed; what it has computed may stay in the prefix cache.

    With a store below (--enable-hierarchical-cache) it is written down; `kept` says whether that was done.
    """
    await _apply_to_request(state, request_id, state.control.pause_request)
    told: dict[str, Any] = {"id": request_id, "paused": True}
    records = state.generator.records
    return told if records is None else told | {"kept": bool(matching(request_id, records.rids))}


@router.post("/{request_id:path}/resume", response_model=None)
async def resume_request(state: State, request_id: str) -> dict[str, Any] | Response:
    """Let a paused request go on exactly where it stopped, as soon as its turn comes.

    Of one that was paused before the engine was killed or started again, this gives the rest of the answer.
    """
    records = state.generator.records
    if records is not None and not state.ids_of(request_id) and (rids := matching(request_id, records.rids)):
        return Resumed(GenerationRoute(state, lambda call: resume(call, records, sorted(rids))))
    await _apply_to_request(state, request_id, state.control.resume_request)
    return {"id": request_id, "paused": False}


class Resumed(Response):
    """The rest of requests that have records, generated as the answer is sent."""

    def __init__(self, route: GenerationRoute) -> None:
        super().__init__()
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        await self._route(scope, receive, send)


@router.get("/{request_id:path}/explain")
async def explain_request(state: State, request_id: str) -> dict[str, Any]:
    """Where the time of a request went, open or ended not long ago: an entry for each of its answers."""
    control = state.control
    rids = matching(request_id, control.recent_rids())
    told = [explained(answer, control.rid_of) for rid in rids for answer in await control.explain(rid)]
    if not told:
        message = f"nothing is known of request {request_id!r}; it ended too long ago, or never came"
        raise HttpError("request_not_found", message)
    return {"id": request_id, "answers": told}


def _counts_priorities(policy: str) -> bool:
    """Whether a policy looks at priorities, by the names of its parts; one's own may."""
    return "priority" in policy.split("+") or USER_POLICY_MARK in policy


async def _apply_to_request(state: ServerState, request_id: str, verb: Callable[[str], Awaitable[bool]]) -> None:
    """Apply `verb` to every part of a request. Raises HttpError (404) if none of it waits or runs."""
    reached = [await verb(rid) for rid in state.ids_of(request_id)]
    if not any(reached):
        message = f"no request {request_id!r} waits or runs; it has ended, or never came"
        raise HttpError("request_not_found", message)
