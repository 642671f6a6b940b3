"""The router: accepts requests of clients, answers its own routes and proxies the rest to workers."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterable
from itertools import count

from typing_extensions import override

from tokenyard.base import TokenyardError
from tokenyard.base.admin_paths import is_admin_path
from tokenyard.base.response_ids import engine_of_response
from tokenyard.base.sessions import conversation_of, derived_session, named_session, short_session, tenant_session
from tokenyard.router.access import audit, check_access, given_key, tenant_key
from tokenyard.router.admin_routes import Control
from tokenyard.router.batches import RouterBatches
from tokenyard.router.client_connection import BodyReader, ClientConnection, ClientHandler, ClientRequest
from tokenyard.router.disagg_exchange import DISAGG_PATHS, DisaggExchange
from tokenyard.router.dispatch_driver import DispatchDriver
from tokenyard.router.errors import RouterError
from tokenyard.router.header_forwarding import RANK_HEADER, ROUTE_HEADER, HeaderForwarding
from tokenyard.router.proxy_exchange import Exchange
from tokenyard.router.request_features import ParsedRequest, Tokenize, asked_priority, parse_body
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.stream_continuation import RESPONSES, wants_stream
from tokenyard.router.tenant_keys import TenantKeys
from tokenyard.routing.tenant_limits import KeyUsage

log = logging.getLogger(__name__)

_DOT_SEGMENT = re.compile(r"/\.{1,2}(/|$)")

DATA_PREFIXES = ("/v1/", "/api/")
DATA_PATHS = frozenset(
    {
        *("/generate", "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/classify", "/encode"),
        *("/completion", "/close_session"),
    }
)
NAMES_MODEL = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses/input_tokens", "/v1/responses/compact"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/score"),
        *("/api/chat", "/api/generate", "/api/embed"),
    }
)
"""Paths whose body names a model."""
MAX_HOPS = 8
MAX_REQUEST_ID_CHARS = 128


class KeyCheck(ClientHandler):
    """A request whose key is being checked."""

    def __init__(self, router: "Router", keys: TenantKeys, front: ClientConnection, request: ClientRequest) -> None:
        self._router, self._keys, self._front, self._request = router, keys, front, request
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        await self._keys.check(given_key(self._request))
        self._front.hand_to(self._router.handle_known, self._request)

    @override
    def client_gone(self) -> None:
        self._task.cancel()

    @override
    def pause(self) -> None:
        """Nothing is written yet."""

    @override
    def resume(self) -> None:
        """Nothing is written yet."""


class Router(DispatchDriver):
    """A dispatch driver with client connections."""

    def __init__(self, settings: RouterSettings, tokenize: Tokenize | None = None) -> None:
        super().__init__(settings)
        self.connections: dict[ClientConnection, None] = {}
        self.max_connections = 0
        """Maximum number of client connections; 0 for no limit."""
        self._tokenize = tokenize
        self._id = self.id.encode()
        # Ids are UUIDs of version 4 in form, as some servers, llama-cpp-python's for one, refuse others.
        self._id_head = str(uuid.uuid4()).rpartition("-")[0].encode()
        self._numbers = count()
        self._session_header = settings.session_header.lower().encode()
        self.own_key = bool(settings.worker_api_key or settings.api_key or settings.has_tenant_keys)
        """Whether the key of a client is for the router, and no worker gets it."""
        self._passing = HeaderForwarding(self._id, self.worker_headers, own_key=self.own_key)
        self.batches = RouterBatches(self, self._parsed, self._passing) if settings.file_storage_path else None
        self._control = Control(self, self.batches)

    @override
    def sweep(self) -> None:
        """Expire stalled requests and connections. Called every `SWEEP_S`."""
        super().sweep()
        if self.keys is not None:
            self.keys.refresh()
        now = self.now()
        for connection in list(self.connections):
            connection.check_time(now, self.settings.client_timeout_secs)

    def new_connection(self) -> ClientConnection:
        """The protocol of a new client connection."""
        max_body_bytes = int(self.settings.max_body_mb * 1e6)
        uploads = None if self.batches is None else self._upload
        return ClientConnection(self.handle, self.connections, max_body_bytes, self.max_connections, uploads)

    def _upload(self, front: ClientConnection, request: ClientRequest) -> BodyReader | None:
        """What reads the body of a new file, given its head; None to keep it until the key is checked."""
        assert self.batches is not None
        key = given_key(request)
        if self.keys is not None and self.keys.pending(key):
            self.keys.begin(key)
            return None
        return self.batches.upload(front, request)

    def handle(self, front: ClientConnection, request: ClientRequest) -> ClientHandler | None:
        """Answer a request of the router's own, or start an exchange with a worker, which is returned. A key that is
        checked elsewhere is checked first.
        """
        request.request_id = self.request_id(request)
        if self.keys is not None and self.keys.pending(given_key(request)):
            return KeyCheck(self, self.keys, front, request)
        return self.handle_known(front, request)

    def handle_known(self, front: ClientConnection, request: ClientRequest) -> ClientHandler | None:
        """The same for a request whose key needs no check."""
        own = self._control.takes(request)
        try:
            if own:
                return self._control.answer(front, request)
            return self._data(front, request)
        except TokenyardError as refusal:
            # What the router's own paths refuse is no error of a request for a model.
            if not own:
                self.metrics.failed(refusal.code)
            front.fail(refusal, request.path)
        except Exception:
            log.exception("a request failed by a fault of the router")
            self.metrics.failed("internal_error")
            error = RouterError(500, "the router met an internal error; its log says more", code="internal_error")
            front.fail(error, request.path)
        return None

    def _data(self, front: ClientConnection, request: ClientRequest) -> Exchange:
        """Start an exchange with a worker. Raises TokenyardError for a request that the router refuses."""
        parsed, key = self.admitted(request)
        kind = DisaggExchange if self.workers.has_disagg_workers and request.path in DISAGG_PATHS else Exchange
        exchange = kind(self, self._passing, front, request, parsed)
        exchange.charge(key)
        self.arrived(exchange)
        return exchange

    def admitted(self, request: ClientRequest) -> tuple[ParsedRequest, KeyUsage | None]:
        """What the router reads of a request for the workers, and the limits that it counts against, None without a
        tenant's key. Raises TokenyardError for a request that the router refuses.
        """
        proxied = request.path in DATA_PATHS or request.path.startswith(DATA_PREFIXES)
        if not proxied or _DOT_SEGMENT.search(request.path):
            what = f"there is nothing at this path: {request.method.decode()} {request.path}"
            raise RouterError(404, what, code="not_found")
        admin, key = is_admin_path(request.path), None
        if self.keys is not None and not admin:
            key = tenant_key(request, self.settings, self.keys, time.time())
        else:
            check_access(request, self.settings, admin=admin)
            audit(request, admin=admin)
        if self.draining:
            raise RouterError(503, "the router is shutting down", code="draining")
        most = self.settings.max_concurrent_requests
        if most and len(self.exchanges) >= most:
            raise RouterError(429, f"{most} requests are open, which is the limit; try again later", code="overloaded")
        self._check_loop(request)
        parsed = self._parsed(request)
        for rank in (parsed.rank, parsed.prefill_rank, parsed.decode_rank):
            if rank is not None and not self.workers.has_rank(rank):
                raise RouterError(400, f"no worker has the rank {rank}", code="unknown_rank")
        if key is not None:
            self._admit(request, parsed, key)
        return parsed, key

    def _parsed(self, request: ClientRequest) -> ParsedRequest:
        if request.method != b"POST":
            return ParsedRequest(engine=engine_of_response(_response_in(request.path)))
        parsed = parse_body(
            request.body,
            bytes_per_token=self.bytes_per_token,
            tokenize=self._tokenize,
            needs_prefix=self.policy.needs_prefix,
            stable=self.shared is not None,
            adapters=self.workers.adapters,
        )
        parsed.stream = wants_stream(request.path, parsed.fields)
        stored = parsed.fields.get("previous_response_id") or _response_in(request.path)
        parsed.engine = engine_of_response(stored)
        if parsed.rank is None and (rank := request.get(RANK_HEADER)):
            parsed.rank = parsed.prefill_rank = _rank(rank)
        if self._session_header:
            parsed.session = self._session(request, parsed)
        self.resolve_model(request, parsed)
        return parsed

    def _session(self, request: ClientRequest, parsed: ParsedRequest) -> str:
        """The session of a request, "" for none: of the header that the settings name, else as engines find it."""
        name = request.get(self._session_header).decode("latin-1")
        if not name:
            # Which session a stored response belongs to is known to its engine alone.
            name = named_session(parsed.fields, lambda one: request.get(one.encode()).decode("latin-1"), lambda _: "")
        name = name or derived_session(conversation_of(parsed.fields))
        return short_session(tenant_session(parsed.tenant, name))

    def _admit(self, request: ClientRequest, parsed: ParsedRequest, key: KeyUsage) -> None:
        """Count a request against the limits of its key. Raises RouterError (403, 429) for what the key does not allow.

        Its tenant is the key's, whatever the body says.
        """
        grant, fields = key.grant, parsed.fields
        for param in ("model", "lora_path"):
            name = fields.get(param)
            if grant.models and name is not None and name not in grant.models:
                raise RouterError(403, f"this API key may not use {str(name)[:256]!r}", code="not_allowed", param=param)
        if grant.models and parsed.model not in grant.models:
            names = ", ".join(sorted(grant.models))
            raise RouterError(
                403, f"name a model that this API key may use: {names}", code="not_allowed", param="model"
            )
        if grant.max_priority is not None and asked_priority(fields, request.get(b"x-priority")) > grant.max_priority:
            what = f"this API key allows a priority of at most {grant.max_priority}"
            raise RouterError(403, what, code="not_allowed", param="priority")
        parsed.tenant = grant.tenant
        beyond = key.admit(parsed.tokens, self.now_ns())
        if beyond:
            self.metrics.limited(grant.tenant)
            raise RouterError(429, f"this API key allows {beyond}; try again later", code="tenant_limit")

    def resolve_model(self, request: ClientRequest, parsed: ParsedRequest) -> None:
        """Raise RouterError (400, 404) for a request that names a model, unless a worker lists it: an engine's error
        would name only its own.
        """
        if request.path not in NAMES_MODEL or not self.workers.of_several_models or self.workers.lists(parsed.model):
            return
        raise unknown_model(parsed.model, self.workers.base_models)

    def _check_loop(self, request: ClientRequest) -> None:
        """Raise RouterError (508) for a request that passed this router before, or more than `MAX_HOPS` routers."""
        hops = request.get(ROUTE_HEADER).replace(b" ", b"").split(b",")
        if self._id in hops or len(hops) > MAX_HOPS:
            raise RouterError(
                508, "routing loop: a worker of this router is a router that sends requests back", code="loop"
            )

    def request_id(self, request: ClientRequest) -> bytes:
        """The id that the client gave a request in x-request-id, else a new one."""
        given = request.get(b"x-request-id")
        if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.decode().isprintable():
            return given
        return b"%b-%012x" % (self._id_head, next(self._numbers))


def _response_in(path: str) -> str:
    """The id of the stored response in a path, "" without one."""
    return path[len(RESPONSES) + 1 :].partition("/")[0] if path.startswith(f"{RESPONSES}/") else ""


def unknown_model(model: str, served: Iterable[str]) -> RouterError:
    """The error for a request for `model`, "" or "default" if it names none, where only `served` models are there."""
    names = ", ".join(map(repr, served))
    if not model or model == "default":
        what = f"the request names no model; this router serves {names}"
        return RouterError(400, what, code="model_required", param="model")
    what = f"the model {model[:256]!r} does not exist; this router serves {names}"
    return RouterError(404, what, code="model_not_found", param="model")


def _rank(text: bytes) -> int:
    """The rank in a header. Raises RouterError (400) if it is not a number."""
    if not text.isdigit() or len(text) > 9:
        raise RouterError(400, "x-data-parallel-rank must be a number of 0 or more", code="invalid_rank")
    return int(text)
