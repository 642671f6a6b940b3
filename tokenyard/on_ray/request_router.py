"""The policies of `tokenyard route` as Serve's request router, for clients that use Serve's proxies.

Each proxy and each handle has its own router. It sees only the headers of HTTP requests and does not know what the
prefix caches hold, so cache affinity comes only from the session or the beginning of a prompt.
"""

import asyncio
import copy
import time
from collections.abc import Mapping
from typing import Any

import orjson
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tokenyard.on_ray.replica_listeners import replicas_changed
from tokenyard.routing.load import DispatchedRequest, TargetLoad, TtftModel
from tokenyard.routing.policies import RequestFeatures, prefix_key, text_key
from tokenyard.routing.registry import DEFAULT_POLICY, make_policy

BYTES_PER_TOKEN = 4
SESSION_HEADER = b"x-session-id"


class ChoiceRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Ranks replicas with `routing.policies`. Load is what this router sent, or the engine's report if higher."""

    def initialize_state(self, policy: str = DEFAULT_POLICY) -> None:
        """Serve's hook: `policy` is one of `tokenyard route --policy`."""
        self._policy = make_policy(policy, sticky=True)
        self._speed = TtftModel()
        self._targets: dict[ReplicaID, TargetLoad] = {}
        self._sent: dict[str, DispatchedRequest] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas that run now."""
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        self._targets = {name: target for name, target in self._targets.items() if name in here}
        replicas_changed([str(replica.replica_metadata.get("url", "")) for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: replicas in order of preference."""
        if not candidate_replicas:
            return []
        features = RequestFeatures(1) if pending_request is None else features_of(pending_request)
        ranking = self._policy.rank(features, [self._state(replica) for replica in candidate_replicas])
        return [[candidate_replicas[place]] for place in ranking.order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve's hook: a replica accepted the request."""
        target = self._target(replica_id)
        features = features_of(pending_request)
        sent = DispatchedRequest(target, features.tokens, 0, time.monotonic())
        self._sent[pending_request.metadata.internal_request_id] = sent
        self._policy.sent(features, target)
        asyncio.get_running_loop().call_later(sent.expected_s(), sent.prefilled)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve's hook: a request finished or failed."""
        if sent := self._sent.pop(internal_request_id, None):
            sent.end()

    def _target(self, replica_id: ReplicaID) -> TargetLoad:
        if replica_id not in self._targets:
            self._targets[replica_id] = TargetLoad(replica_id.unique_id, self._speed)
        return self._targets[replica_id]

    def _state(self, replica: RunningReplica) -> TargetLoad:
        """The load that this router sent to a replica, or the engine's last report if higher."""
        state, stats = copy.copy(self._target(replica.replica_id)), replica.routing_stats
        if stats.get("queued_tokens"):
            self._speed.token_s = stats["queued_s"] / stats["queued_tokens"]
        state.requests = max(state.requests, int(stats.get("requests", 0)))
        state.prefill_tokens = max(state.prefill_tokens, stats.get("queued_tokens", 0.0))
        return state


def features_of(request: PendingRequest) -> RequestFeatures:
    """Features for a policy, from the headers of an HTTP request or the body of an `EngineDeployment.ask` call."""
    session = getattr(request.metadata, "session_id", "")
    scope = getattr(request.args[0], "asgi_scope", None) if request.args else None
    if scope is not None:
        headers = dict(scope["headers"])
        session = session or headers.get(SESSION_HEADER, b"").decode("latin-1")
        return RequestFeatures(_tokens(int(headers.get(b"content-length", 0))), key=text_key(session), session=session)
    body = request.args[-1] if request.args else None
    if not isinstance(body, Mapping):
        return RequestFeatures(1, session=session)
    text = orjson.dumps(body.get("messages") or body.get("prompt") or body.get("text") or "")
    return RequestFeatures(_tokens(len(text)), key=prefix_key(text), session=session)


def _tokens(size: int) -> int:
    return max(size // BYTES_PER_TOKEN, 1)
