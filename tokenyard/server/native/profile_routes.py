"""`/start_profile` and `/stop_profile`: a timeline of steps and streams that Perfetto opens."""

from typing import Any

import orjson
from fastapi import APIRouter, Response

from tokenyard.base import InvalidRequestError
from tokenyard.server.native.control_routes import State

router = APIRouter()


@router.post("/start_profile")
async def start_profile(state: State) -> dict[str, Any]:
    """Begin a timeline of the scheduler's steps and of the requests that come from now on; 400 if one runs."""
    if not await state.control.start_profile():
        raise InvalidRequestError("a profile runs already; end it by /stop_profile", code="profile_runs")
    state.start_timeline()
    return {"success": True}


@router.post("/stop_profile", response_class=Response)
async def stop_profile(state: State) -> Response:
    """End the timeline and answer it as a file for ui.perfetto.dev or chrome://tracing; 400 if none runs."""
    steps = await state.control.stop_profile()
    if steps is None:
        raise InvalidRequestError("no profile runs; begin one by /start_profile", code="no_profile")
    events = orjson.loads(steps) + state.stop_timeline()
    headers = {"content-disposition": 'attachment; filename="tokenyard-trace.json"'}
    return Response(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), 200, headers, "application/json")
