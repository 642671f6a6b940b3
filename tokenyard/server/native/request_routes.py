"""`/v1/requests/{id}`: change the priority or deadline of a request, pause, resume or explain it.

The id is the client's (`rid`, `request_id`, X-Request-Id) or that of the answer.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from tokenyard.base import InvalidRequestError
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.generation_route import GenerationRoute
from tokenyard.server.http.routes import Routes
from tokenyard.server.http.streaming import Receive, Scope, Send
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.native.explain import cache_report, explained
from tokenyard.server.native.generate import resume
from tokenyard.server.native.policy_routes import USER_POLICY_MARK
from tokenyard.server.protocol import UpdateRequest, parse
from tokenyard.server.state import ServerState, matching

routes = Routes("/v1/requests")


@routes.on("PATCH", "/{request_id:path}")
async def update_request(state: State, request_id: str, body: Body) -> dict[str, Any]:
    """Change the priority or the deadline (from arrival) of a request that waits or runs; 404 otherwise.

    A `note` in the answer says that the policy ignores priorities.
    """
    fields = parse(body, UpdateRequest, strict=state.options.strict_api)
    priority, deadline_ms = fields.priority, fields.deadline_ms
    if priority is None and deadline_ms is None:
        raise InvalidRequestError("give priority, deadline_ms or both", param="priority")
    await _apply_to_request(
        state, request_id, lambda rid: state.control.update(rid, priority=priority, deadline_ms=deadline_ms)
    )
    answer = {"id": request_id, "priority": priority, "deadline_ms": deadline_ms}
    policy = (await state.control.snapshot()).get("policy", "")
    if priority is not None and not _counts_priorities(policy):
        answer["note"] = f"policy {policy} ignores priorities; see --enable-priority-scheduling"
    return answer


@routes.post("/{request_id:path}/pause")
async def pause_request(state: State, request_id: str) -> dict[str, Any]:
    """Pause a request until it is resumed. Its KV may stay in the prefix cache.

    With a KV store (--enable-hierarchical-cache) a record of it is written; `kept` says whether that succeeded.
    """
    await _apply_to_request(state, request_id, state.control.pause_request)
    answer: dict[str, Any] = {"id": request_id, "paused": True}
    records = state.generator.records
    return answer if records is None else answer | {"kept": bool(matching(request_id, records.rids))}


@routes.post("/{request_id:path}/resume")
async def resume_request(state: State, request_id: str) -> dict[str, Any] | Response:
    """Return a paused request to the queue, to continue where it stopped.

    For a request that was paused before the engine ended, the response is the rest of its answer.
    """
    records = state.generator.records
    if records is not None and not state.ids_of(request_id) and (rids := matching(request_id, records.rids)):
        return Resumed(GenerationRoute(state, lambda call: resume(call, records, sorted(rids))))
    await _apply_to_request(state, request_id, state.control.resume_request)
    return {"id": request_id, "paused": False}


class Resumed(Response):
    """The rest of requests that have records, generated while the response is sent."""

    def __init__(self, route: GenerationRoute) -> None:
        super().__init__()
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        await self._route(scope, receive, send)


@routes.get("/{request_id:path}/explain")
async def explain_request(state: State, request_id: str) -> dict[str, Any]:
    """Where the time of an open or recently ended request went: one entry per answer."""
    control = state.control
    rids = matching(request_id, control.recent_rids())
    answers = [answer for rid in rids for answer in await control.explain(rid)]
    if not answers:
        message = f"nothing is known of request {request_id!r}; it ended too long ago or never arrived"
        raise HttpError("request_not_found", message)
    turns = [turn for rid in rids if (turn := control.turn_of(rid)) is not None]
    about: dict[str, Any] = {"session": turns[0][0], "turn": turns[0][1]} if turns else {}
    reports = [report for rid in rids if (report := state.prompts.report(rid)) is not None]
    if reports:
        about["cache"] = cache_report(reports[0], answers[0], control.rid_of)
    return {"id": request_id, **about, "answers": [explained(answer, control.rid_of) for answer in answers]}


def _counts_priorities(policy: str) -> bool:
    """Whether a policy uses priorities, by the names of its parts. A user's policy may."""
    return "priority" in policy.split("+") or USER_POLICY_MARK in policy


async def _apply_to_request(state: ServerState, request_id: str, verb: Callable[[str], Awaitable[bool]]) -> None:
    """Apply `verb` to every part of a request. Raises HttpError (404) if none of it waits or runs."""
    reached = [await verb(rid) for rid in state.ids_of(request_id)]
    if not any(reached):
        message = f"no request {request_id!r} waits or runs; it has ended or never arrived"
        raise HttpError("request_not_found", message)
