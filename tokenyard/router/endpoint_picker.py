"""The router as an endpoint picker of the Kubernetes Gateway API Inference Extension.

For each request Envoy asks over gRPC (`ext_proc`) where to send it, and carries the request and the response itself.
The dispatch machine answers, with its queue, limits and policies as for requests that the router carries. What only a
proxy can do is missing: retries after an error, and streams that continue elsewhere.

Protocol: kubernetes-sigs/gateway-api-inference-extension on GitHub, docs/proposals/004-endpoint-picker-protocol.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import override

from tokenyard.base import NS_PER_S, ConfigError, TokenyardError
from tokenyard.base.fleet_headers import AGE_HEADER, TENANT_HEADER, age_text
from tokenyard.router.access import given_key
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.dispatch_driver import OpenRequest
from tokenyard.router.errors import RouterError, error_body, error_headers, status_of
from tokenyard.router.header_forwarding import DEBUG_HEADER, RANK_HEADER, ROUTE_HEADER
from tokenyard.router.proxy import Router
from tokenyard.router.proxy_exchange import RETRYABLE, TAIL_BYTES, usage_at_end
from tokenyard.router.request_features import ParsedRequest

log = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
METADATA = "envoy.lb"
SUBSET, SUBSET_METADATA = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
FROM_ROUTERS = (AGE_HEADER, TENANT_HEADER, RANK_HEADER.decode(), DEBUG_HEADER.decode())
"""Headers that engines believe from routers only."""
PIECE_BYTES = 62_000
"""Most of a body in one message: Envoy refuses more than 64 KB with its headers."""
FALLBACKS = 2
"""Endpoints named after the chosen one, for a gateway that retries."""


class PickedRequest(OpenRequest):
    """A request that Envoy carries to the endpoint that the dispatch machine chooses."""

    def __init__(self, router: Router, request: ClientRequest, parsed: ParsedRequest) -> None:
        super().__init__(request, parsed)
        self._router = router
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has a target; raises TokenyardError if it gets none."""
        self._status: int | None = None
        self._tail = b""
        self._stream = asyncio.current_task()

    @property
    @override
    def status(self) -> int | None:
        return self._status

    @override
    def dispatched(self) -> None:
        if not self.placed.done():
            self.placed.set_result(None)

    @override
    def abort(self, error: TokenyardError) -> None:
        self._outcome = str(error.code)
        self._router.metrics.failed(error.code)
        self._close()
        if not self.placed.done():
            self.placed.set_exception(error)
        elif self._stream is not None:
            # Envoy carries it: the end of the gRPC stream ends it there.
            self._stream.cancel()

    def began(self, status: int) -> None:
        """The response has begun."""
        self._status = status
        router, target = self._router, self.target
        assert target is not None
        if status in RETRYABLE:
            router.refused(target, status)
        else:
            router.answered(target, status)

    def body(self, piece: bytes, *, last: bool) -> None:
        """A piece of the response's body."""
        if piece and not self.first_byte_ns:
            now = self.first_byte_ns = self._router.now_ns()
            if self.parsed.stream and self.status == 200:
                self._router.machine.first_token(self, now)
                self._router.metrics.first_byte((now - self.arrived_ns) / NS_PER_S)
        self._tail = (self._tail + piece)[-TAIL_BYTES:]
        if last and not self.over:
            self._outcome = "done"
            if self.target is not None and self.status is not None:
                self._router.completed(self.target, self.status)
            if self.status == 200 and self.sent is not None:
                self._usage = prompt, cached, _ = usage_at_end(self._tail)
                self._router.learn(self.parsed, self.sent, prompt, cached)
            self._close()

    def gone(self) -> None:
        """Envoy has ended the gRPC stream: the client left, or the endpoint failed; which one it does not say."""
        if not self.over:
            self._router.metrics.gone += 1
            self._outcome = "client_gone"
            self._close()

    def _close(self) -> None:
        if not self.over:
            self._router.ended(self)

    @override
    def estimate(self) -> tuple[int, int]:
        return self.parsed.tokens if self.status == 200 else 0, 0

    @override
    def check_time(self, now_s: float) -> None:
        if now_s - self.arrived_ns / NS_PER_S > self._router.settings.request_timeout_secs:
            self.abort(RouterError(504, "the answer took too long", code="timeout"))

    def headers(self) -> list[tuple[str, bytes]]:
        """The headers that Envoy sets for the endpoint."""
        target, router = self.target, self._router
        assert target is not None
        headers = [(DESTINATION, ",".join(self.endpoints()).encode())]
        headers.append((AGE_HEADER, age_text(router.now_ns() - self.arrived_ns)))
        headers.append(("x-request-id", self._request.request_id))
        headers.append((ROUTE_HEADER.decode(), router.id.encode()))
        if self.key is not None:
            headers.append((TENANT_HEADER, self.key.grant.tenant.encode()))
        if target.rank is not None:
            headers.append((RANK_HEADER.decode(), b"%d" % target.rank))
        return headers + [(name.decode(), value) for name, value in router.worker_headers]

    def endpoints(self) -> list[str]:
        """ip:port of the chosen endpoint, then of the next best ones."""
        assert self.choice is not None
        ranked = (self.choice.ranked[index].worker.url.authority for index in self.choice.ranking.order)
        return list(dict.fromkeys(ranked))[: 1 + FALLBACKS]


class PickerStream:
    """One request in Envoy's hands: a gRPC stream of messages about it, in order."""

    def __init__(self, router: Router, peer: str) -> None:
        self._router, self._peer = router, peer
        self._headers: wire.HttpHeaders | None = None
        self._body = bytearray()
        self._picked: PickedRequest | None = None
        self._request_mode = self._response_mode = ProcessingMode.NONE
        self._subset: frozenset[str] | None = None

    @property
    def path(self) -> str:
        """The path of the request, "" before its headers are here."""
        return "" if self._headers is None else _named(self._headers).get(b":path", b"").decode("latin-1")

    async def answers(self, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        """The answers to a message. Raises TokenyardError for a request that is refused."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(message)
            case "request_body":
                return await self._request_body(message.request_body)
            case "response_headers":
                return [self._response_headers(message.response_headers)]
            case "response_body":
                return self._response_body(message.response_body)
            case "request_trailers":
                # A body that is streamed, and that trailers follow, ends with them.
                whole = [] if self._picked is not None else await self._whole_body(last=False)
                return [*whole, wire.ProcessingResponse(request_trailers=wire.TrailersResponse())]
            case _:
                if self._picked is not None:
                    self._picked.body(b"", last=True)
                return [wire.ProcessingResponse(response_trailers=wire.TrailersResponse())]

    def end(self) -> None:
        """The gRPC stream has ended."""
        if self._picked is not None:
            self._picked.gone()

    async def _request_headers(self, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        self._headers = message.request_headers
        hint = message.metadata_context.filter_metadata.get(SUBSET_METADATA)
        if hint is not None and SUBSET in hint:
            given = hint[SUBSET]
            self._subset = frozenset(map(str, given.split(",") if isinstance(given, str) else given))
        follows = not message.request_headers.end_of_stream and self._request_mode != ProcessingMode.NONE
        if not follows:
            return [wire.ProcessingResponse(request_headers=await self._pick(), dynamic_metadata=self._metadata())]
        if self._request_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return []  # the headers wait until the body is here
        return [wire.ProcessingResponse(request_headers=wire.HeadersResponse())]

    async def _request_body(self, body: wire.HttpBody) -> list[wire.ProcessingResponse]:
        self._body += body.body
        if len(self._body) > self._router.settings.max_body_mb * 1e6:
            most = f"{self._router.settings.max_body_mb:g} MB"
            raise RouterError(413, f"the body has more than {most} (--max-body-mb)", code="body_too_large")
        if self._request_mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            if not body.end_of_stream and self._request_mode == ProcessingMode.STREAMED:
                raise RouterError(500, STREAMED_WORDS, code="gateway_misconfigured")
            picked = await self._pick()
            answer = wire.BodyResponse(response=picked.response)
            return [wire.ProcessingResponse(request_body=answer, dynamic_metadata=self._metadata())]
        return await self._whole_body(last=True) if body.end_of_stream else []

    async def _whole_body(self, *, last: bool) -> list[wire.ProcessingResponse]:
        """The answers to a body that is here: where the request goes, and the body itself. `last`: nothing follows."""
        head = wire.ProcessingResponse(request_headers=await self._pick(), dynamic_metadata=self._metadata())
        pieces = _pieces(bytes(self._body), last=last)
        return [head, *(wire.ProcessingResponse(request_body=piece) for piece in pieces)]

    async def _pick(self) -> wire.HeadersResponse:
        """Have the request placed. Raises TokenyardError if it gets no target."""
        assert self._headers is not None
        request = self._client_request(self._headers, bytes(self._body))
        request.request_id = self._router.request_id(request)
        if self._router.keys is not None:
            await self._router.keys.check(given_key(request))
        parsed, key = self._router.admitted(request)
        parsed.among = self._subset
        picked = self._picked = PickedRequest(self._router, request, parsed)
        picked.charge(key)
        self._router.arrived(picked)
        await picked.placed
        headers = picked.headers()
        ours = {*FROM_ROUTERS, "authorization"} if self._router.own_key else {*FROM_ROUTERS}
        dropped = sorted(ours - {name for name, _ in headers})
        mutation = wire.HeaderMutation(set_headers=_options(headers), remove_headers=dropped)
        return wire.HeadersResponse(response=wire.CommonResponse(header_mutation=mutation, clear_route_cache=True))

    def _metadata(self) -> Any:
        """The endpoints as dynamic metadata, where the gateway's load balancer may look for them."""
        assert self._picked is not None
        return {METADATA: {DESTINATION: ",".join(self._picked.endpoints())}}

    def _client_request(self, headers: wire.HttpHeaders, body: bytes) -> ClientRequest:
        named = _named(headers)
        target = named.get(b":path", b"/")
        return ClientRequest(
            method=named.get(b":method", b"POST"),
            target=target,
            headers=[pair for pair in named.items() if not pair[0].startswith(b":")],
            keep_alive=True,
            http10=False,
            body=body,
            path=unquote(target.partition(b"?")[0].decode("latin-1")),
            peer=self._peer,
        )

    def _response_headers(self, headers: wire.HttpHeaders) -> wire.ProcessingResponse:
        status = _named(headers).get(b":status", b"")
        if self._picked is not None:
            self._picked.began(int(status) if status.isdigit() else 0)
            if headers.end_of_stream:
                self._picked.body(b"", last=True)
        return wire.ProcessingResponse(response_headers=wire.HeadersResponse())

    def _response_body(self, body: wire.HttpBody) -> list[wire.ProcessingResponse]:
        if self._picked is not None:
            self._picked.body(body.body, last=body.end_of_stream)
        if self._response_mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            return [wire.ProcessingResponse(response_body=wire.BodyResponse())]
        return [wire.ProcessingResponse(response_body=piece) for piece in _pieces(body.body, last=body.end_of_stream)]


def _named(headers: wire.HttpHeaders) -> dict[bytes, bytes]:
    """Headers by their lower-case names."""
    return {one.key.lower().encode(): one.raw_value or one.value.encode() for one in headers.headers.headers}


def _options(headers: list[tuple[str, bytes]]) -> list[HeaderValueOption]:
    """Headers that Envoy sets, in place of those that are there."""
    action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value), append_action=action)
        for name, value in headers
    ]


STREAMED_WORDS = "the gateway sends request bodies in pieces; set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED"


def _pieces(body: bytes, *, last: bool) -> list[wire.BodyResponse]:
    """A body as messages; at least one, so that the end of an empty body is told."""
    starts = range(0, max(len(body), 1), PIECE_BYTES)
    pieces = [body[start : start + PIECE_BYTES] for start in starts]
    ends = [False] * (len(pieces) - 1) + [last]
    return [
        wire.BodyResponse(
            response=wire.CommonResponse(
                body_mutation=wire.BodyMutation(
                    streamed_response=wire.StreamedBodyResponse(body=piece, end_of_stream=end)
                )
            )
        )
        for piece, end in zip(pieces, ends, strict=True)
    ]


def _refusal(error: TokenyardError, path: str) -> wire.ProcessingResponse:
    """An error of the router as the response that Envoy gives."""
    status = status_of(error)
    headers = [(name.decode(), value) for name, value in error_headers(status)]
    mutation = wire.HeaderMutation(set_headers=_options([("content-type", b"application/json"), *headers]))
    answer = wire.ImmediateResponse(body=error_body(error, path), headers=mutation)
    answer.status.code = status
    return wire.ProcessingResponse(immediate_response=answer)


class EndpointPicker(external_processor_pb2_grpc.ExternalProcessorServicer, health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The gRPC services: `ext_proc`, and health: SERVING while the router takes requests and a worker is healthy."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Process(
        self, request_iterator: AsyncIterator[wire.ProcessingRequest], context: Any
    ) -> AsyncIterator[wire.ProcessingResponse]:
        """Answer the messages about one request."""
        stream = PickerStream(self._router, context.peer())
        try:
            async for message in request_iterator:
                for answer in await stream.answers(message):
                    yield answer
        except TokenyardError as error:
            yield _refusal(error, stream.path)
        except Exception:
            log.exception("a request failed because of an internal error")
            what = "the router met an internal error; its log says more"
            yield _refusal(RouterError(500, what, code="internal_error"), stream.path)
        finally:
            stream.end()

    async def Check(self, request: Any, context: Any) -> Any:
        """Whether requests may come."""
        status = health_pb2.HealthCheckResponse.SERVING
        if self._router.why_not_ready():
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


async def start_picker(router: Router) -> grpc.aio.Server:
    """Listen at `--endpoint-picker-port`. Raises ConfigError if that is not possible."""
    settings = router.settings
    # Buffered bodies come as one message each; --max-body-mb bounds them, with an answer that says so.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])
    picker = EndpointPicker(router)
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    health_pb2_grpc.add_HealthServicer_to_server(picker, server)
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{address}:{settings.endpoint_picker_port}"
    try:
        if settings.tls_cert_path:
            with open(settings.tls_key_path, "rb") as key, open(settings.tls_cert_path, "rb") as chain:
                credentials = grpc.ssl_server_credentials([(key.read(), chain.read())])
            server.add_secure_port(address, credentials)
        else:
            server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another --endpoint-picker-port") from None
    await server.start()
    return server
