"""`/v1/scheduler`: the scheduling policy, its bound, and changing it while the server runs."""

from dataclasses import fields
from typing import Any

from tokenyard.base import InvalidRequestError, SchedulerSettings
from tokenyard.server.http.routes import Routes
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.protocol import SchedulerRequest, parse
from tokenyard.server.state import ServerState

routes = Routes()

USER_POLICY_MARK = ":"
CHANGEABLE = ("schedule_policy", "policy_options")


@routes.get("/v1/scheduler")
async def scheduler(state: State) -> dict[str, Any]:
    """The policy with its wrappers and options, what may overtake a waiting request under it, the report of policy
    `adaptive`, and the other settings.
    """
    return await _described(state)


@routes.post("/v1/scheduler")
async def change_scheduler(state: State, body: Body) -> dict[str, Any]:
    """Change the policy; 400 without a change for an unknown policy or option."""
    wanted = parse(body, SchedulerRequest, strict=state.options.strict_api)
    if USER_POLICY_MARK in wanted.policy and wanted.policy != state.options.info.get("schedule_policy"):
        raise InvalidRequestError(
            f"the policy {wanted.policy!r} is code, which is loaded only when the server starts; use --schedule-policy",
            param="policy",
        )
    await state.control.set_policy(wanted.policy, wanted.options)
    return await _described(state)


async def _described(state: ServerState) -> dict[str, Any]:
    snapshot, info = await state.control.snapshot(), state.options.info
    names = [item.name for item in fields(SchedulerSettings) if item.name in info and item.name not in CHANGEABLE]
    return {
        "policy": snapshot.get("policy"),
        "options": snapshot.get("policy_options", {}),
        "overtaking": snapshot.get("overtaking"),
        "note": snapshot.get("policy_note", ""),
        "priority_function": snapshot.get("priority_function", ""),
        "adaptive": snapshot.get("adaptive", {}),
        "settings": {name: info[name] for name in names},
    }
