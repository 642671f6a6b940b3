"""An engine as a Ray Serve deployment: each replica runs a separate `tokenyard serve` process on its node.

Clients reach the engines through `tokenyard route`, which gets their addresses from `on_ray.addresses`, or through
Serve's own proxies, which take several milliseconds of CPU per request.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tokenyard.base import ConfigError
from tokenyard.on_ray.autoscaling import PrefillQueueAutoscaling
from tokenyard.on_ray.request_router import ChoiceRouter
from tokenyard.on_ray.server_process import ServerProcess

ASK_TIMEOUT_S = 5.0
DRAIN_S = 60.0
PERIOD_S, LOAD_WINDOW_S = 1.0, 5.0
MAX_ONGOING = 1000
KEY_VARIABLES = ("TOKENYARD_ADMIN_API_KEY", "TOKENYARD_API_KEY")
HOP_BY_HOP = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


class EngineDeployment:
    """A replica. Serve restarts it when `check_health` raises, and drains it before it removes it."""

    def __init__(self, flags: Sequence[str], drain_s: float) -> None:
        """Start the server with the flags of `tokenyard serve` and wait until it is ready. Raises RuntimeError if it
        exits before that.
        """
        host, timeout = ray.util.get_node_ip_address(), f"--shutdown-timeout={drain_s:g}"
        self._server = ServerProcess([*flags, "--host", host, "--port", "0", timeout])
        self._url, self._drain_s = self._server.url, drain_s
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
        self._own_headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._max_running_requests = 0

    async def __call__(self, request: Request) -> StreamingResponse:
        """Serve's HTTP path: forward a request to the server and stream its response back."""
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        url = self._url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        answer = await self._client().request(request.method, url, headers=headers, data=body, allow_redirects=False)
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        return StreamingResponse(_pieces(answer), answer.status, headers)

    async def ask(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """For handles: stream the response to a POST. Raises RuntimeError with the server's message if it fails."""
        answer = await self._client().post(self._url + path, json=body, headers=self._own_headers)
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        async for piece in _pieces(answer):
            yield piece

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: static metadata of this replica for request routers."""
        return {"url": self._url}

    async def check_health(self) -> None:
        """Serve's hook: raises RuntimeError when the replica must be replaced."""
        if self._server.status is not None:
            raise RuntimeError(f"the server ended with exit status {self._server.status}")
        async with self._client().get(f"{self._url}/health") as answer:
            if answer.status != 200:
                raise RuntimeError(f"the server is not well: {await answer.text()}")

    async def record_routing_stats(self) -> dict[str, float]:
        """Serve's hook: the load for `ChoiceRouter`, every second."""
        return await self._load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: the load for `PrefillQueueAutoscaling`."""
        return await self._load()

    async def _load(self) -> dict[str, float]:
        """Queued work, and utilization: the larger of the used shares of running-request slots and KV pool."""
        if self._server.status is not None:
            return {}
        if not self._max_running_requests:
            self._max_running_requests = int((await self._get("/server_info"))["max_running_requests"])
        ranks = (await self._get("/v1/loads"))["data"]
        requests = sum(rank["running_requests"] + rank["queued_requests"] for rank in ranks)
        held = sum(rank["used_tokens"] + rank["queued_tokens"] for rank in ranks)
        room = sum(rank["total_tokens"] for rank in ranks)
        return {
            "requests": float(requests),
            "queued_tokens": float(sum(rank["queued_tokens"] for rank in ranks)),
            "queued_s": sum(rank["queued_seconds"] for rank in ranks) / len(ranks),
            "fullness": max(requests / (self._max_running_requests * len(ranks)), held / room if room else 0.0),
        }

    async def _get(self, path: str) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(ASK_TIMEOUT_S)
        async with self._client().get(self._url + path, headers=self._own_headers, timeout=timeout) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = orjson.loads(await answer.read())
            return found

    def _client(self) -> aiohttp.ClientSession:
        """The HTTP client of the event loop on which Serve runs this replica. Responses have no timeout."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), auto_decompress=False)
        return self._session

    async def __del__(self) -> None:
        """Serve's hook: the server refuses new requests, and open ones may continue for `drain_s`."""
        server: ServerProcess | None = getattr(self, "_server", None)
        if server is None:
            return
        await asyncio.to_thread(server.stop, self._drain_s + ASK_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Pieces of the body as they arrive. Leaving early closes the connection, which aborts the request."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The Serve application: `serve run tokenyard.on_ray.deployment:build key=value ...`, or `args` in Serve's file.

    flags: flags of `tokenyard serve`, as one string or a list.
    min_engines, max_engines: bounds of autoscaling.
    target_s: seconds of queued work per engine above which engines are added.
    num_gpus, num_cpus: what Ray reserves for each engine.
    drain_s: how long open requests may continue when an engine is removed.
    upscale_delay_s, downscale_delay_s: how long there must be too few or too many engines before a change.
    policy: routing policy for clients that use Serve's proxies.

    Raises ConfigError for any other key.
    """
    given = dict(arguments)
    flags = given.pop("flags", [])
    words = flags.split() if isinstance(flags, str) else list(flags)
    drain_s, policy = float(given.pop("drain_s", DRAIN_S)), str(given.pop("policy", ""))
    resources = {name: float(given.pop(name)) for name in ("num_gpus", "num_cpus") if name in given}
    scaling = AutoscalingConfig(
        min_replicas=int(given.pop("min_engines", 1)),
        max_replicas=int(given.pop("max_engines", 4)),
        policy=AutoscalingPolicy(
            policy_function=PrefillQueueAutoscaling, policy_kwargs={"target_s": float(given.pop("target_s", 2.0))}
        ),
        metrics_interval_s=PERIOD_S,
        look_back_period_s=LOAD_WINDOW_S,
        upscale_delay_s=float(given.pop("upscale_delay_s", 5.0)),
        downscale_delay_s=float(given.pop("downscale_delay_s", 300.0)),
    )
    if given:
        raise ConfigError(f"{', '.join(given)}: there is no such argument of tokenyard.on_ray.deployment:build")
    router = RequestRouterConfig(
        request_router_class=ChoiceRouter,
        request_router_kwargs={"policy": policy} if policy else {},
        request_routing_stats_period_s=PERIOD_S,
    )
    deployment = serve.deployment(
        EngineDeployment,
        name="Engine",
        autoscaling_config=scaling,
        request_router_config=router,
        ray_actor_options=resources,
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=PERIOD_S,
        graceful_shutdown_timeout_s=drain_s + 2 * ASK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=PERIOD_S,
    )
    return deployment.bind(words, drain_s)
