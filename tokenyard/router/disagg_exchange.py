"""PD disaggregation: one worker prefills a request's prompt and another one decodes.

SGLang engines get both halves at the same time: the decode engine finds the prefill engine by `bootstrap_host`,
`bootstrap_port` and `bootstrap_room`. vLLM engines get them one after the other: the prefill engine's response, limited
to one token, holds the `kv_transfer_params` with which the decode engine fetches the KV. If prefill fails, a vLLM
decode engine computes the prompt itself. An SGLang engine cannot, so another pair is tried.

Prefill targets are chosen by uncached tokens and queued work, decode targets by free KV pool. Both are counted before
anything is sent.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import orjson
from typing_extensions import override

from tokenyard.router.client_connection import JSON_TYPE, ClientRequest, Headers, ResponseWriter
from tokenyard.router.dispatch_driver import DispatchDriver
from tokenyard.router.header_forwarding import RANK_HEADER, HeaderForwarding, with_fields
from tokenyard.router.http1 import ResponseHead, request_head
from tokenyard.router.proxy_exchange import ID_IN_USE, RETRYABLE, Exchange
from tokenyard.router.request_features import ParsedRequest
from tokenyard.router.worker_connection import Body, ResponseReader, UpstreamConnection, body_of
from tokenyard.router.workers import HttpTarget
from tokenyard.routing.load import DispatchedRequest

log = logging.getLogger(__name__)

DISAGG_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
MAX_RESPONSE_BYTES = 8 << 20
BOOTSTRAP_ROOM_BITS = 62
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill engine of vLLM is asked to do."""

_ONE_TOKEN = {"stream": False, "max_tokens": 1, "kv_transfer_params": WANTED}
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "return_token_ids")


def make_bootstrap_room(prefill: HttpTarget, decode: HttpTarget) -> int:
    """A random `bootstrap_room` that encodes the chosen ranks: modulo an engine's number of ranks it is the rank. If no
    room satisfies both engines, the prefill engine's rank wins.
    """
    ranks, others = len(prefill.worker.targets), len(decode.worker.targets)
    room = secrets.randbits(BOOTSTRAP_ROOM_BITS)
    room += (prefill.rank or 0) - room % ranks
    for turn in range(others):
        if (room + turn * ranks) % others == (decode.rank or 0):
            return room + turn * ranks
    return room


def bootstrap_fields(prefill: HttpTarget, decode: HttpTarget, prompts: int | None) -> dict[str, Any]:
    """The bootstrap fields of both halves: lists with an entry for each of `prompts`, plain values for None."""
    worker, rank = prefill.worker, prefill.rank or 0
    host, port = worker.url.host, next(iter(worker.bootstrap_ports[rank : rank + 1]), 0) or worker.bootstrap_port
    if prompts is None:
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": make_bootstrap_room(prefill, decode)}
    rooms = [make_bootstrap_room(prefill, decode) for _ in range(prompts)]
    return {"bootstrap_host": [host] * prompts, "bootstrap_port": [port] * prompts, "bootstrap_room": rooms}


def rank_fields(prefill: HttpTarget, decode: HttpTarget) -> tuple[dict[str, int], dict[str, int]]:
    """The rank fields for the prefill engine and for the decode engine, under all names that SGLang has used.

    Its older releases and the patch that introduced `data_parallel_rank_decode` read the prefill rank from
    `data_parallel_rank` on both sides. Later ones read `routed_dp_rank` (the engine's rank) and
    `disagg_prefill_dp_rank`.
    """
    first, second = prefill.rank, decode.rank
    rank_fields: dict[str, int] = {}
    asked = {} if first is None else {"data_parallel_rank": first, "routed_dp_rank": first}
    if second is not None:
        rank_fields = {"data_parallel_rank": second, "routed_dp_rank": second, "data_parallel_rank_decode": second}
    if first is not None:
        rank_fields |= {"data_parallel_rank": first, "disagg_prefill_dp_rank": first}
    return asked, rank_fields


def batch_size(fields: Mapping[str, Any]) -> int | None:
    """The number of prompts in a body; None for a single prompt that is not in a list."""
    prompt = next((fields[name] for name in ("prompt", "text", "input_ids") if fields.get(name) is not None), None)
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else None


class PrefillListener(Protocol):
    """Waits for a `PrefillRequest`."""

    def prefilled(self, status: int, body: bytes) -> None:
        """The prefill engine responded."""

    def prefill_failed(self, why: str) -> None:
        """The prefill engine failed without a response."""


class PrefillRequest(ResponseReader):
    """The prefill half of a request, after its dispatch."""

    def __init__(self, router: DispatchDriver, target: HttpTarget, owner: PrefillListener) -> None:
        self.target = target
        self._router, self._owner = router, owner
        self._request = b""
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def begin(self, method: bytes, path: bytes, headers: Headers, body: bytes) -> None:
        """Send it, on an idle connection if there is one."""
        url = self.target.worker.url
        head = request_head(method, url.path.encode() + path, url.authority.encode(), headers, len(body))
        self._request = head + body
        self._connection = self.target.worker.pool.take()
        if self._connection is None:
            self._connect()
        else:
            self._connection.send(self, self._request)

    def drop(self) -> None:
        """Abort it: its result is no longer needed."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.drop(self)
            self._connection = None

    def _connect(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connected())

    async def _connected(self) -> None:
        try:
            self._connection = await self.target.worker.pool.connect()
        except OSError as error:
            self._router.unreachable(self.target, refused=isinstance(error, ConnectionRefusedError))
            self._owner.prefill_failed("the prefill worker cannot be reached")
            return
        finally:
            self._connecting = None
        self._connection.send(self, self._request)

    @override
    def on_head(self, head: ResponseHead) -> Body | None:
        self._status = head.status
        if head.status in RETRYABLE:
            self._router.refused(self.target, head.status)
        else:
            self._router.answered(self.target, head.status)
        return body_of(head, unpack=True)

    @override
    def on_body(self, data: bytes, done: bool) -> None:
        self._size += len(data)
        if self._size <= MAX_RESPONSE_BYTES:
            self._parts.append(data)
        if done:
            self._connection = None
            self._router.completed(self.target, self._status)
            self._owner.prefilled(self._status, b"".join(self._parts))

    @override
    def on_broken(self, why: str, *, stale: bool) -> None:
        self._connection = None
        if stale:
            self._connect()
            return
        self._router.connection_failed(self.target)
        self._owner.prefill_failed(why)


class DisaggExchange(Exchange):
    """An exchange with a decode worker, preceded or accompanied by a `PrefillRequest` at a prefill worker."""

    def __init__(
        self,
        router: DispatchDriver,
        passing: HeaderForwarding,
        front: ResponseWriter,
        request: ClientRequest,
        parsed: ParsedRequest,
    ) -> None:
        super().__init__(router, passing, front, request, parsed, disagg=True)
        self._leg: PrefillRequest | None = None
        self._handed: dict[str, Any] = {}

    @override
    def dispatched(self) -> None:
        self._handed = {}
        self._leg = None if self.partner is None else PrefillRequest(self._router, self.partner, self)
        super().dispatched()

    @override
    def _go(self, target: HttpTarget) -> None:
        """Send both halves, or only the prefill half if decode needs its response."""
        partner, leg, request, fields = self.partner, self._leg, self._request, self.parsed.fields
        if partner is None or leg is None:
            super()._go(target)
            return
        asked, self._handed = rank_fields(partner, target)
        headers = self._headers()
        if partner.rank is not None:
            headers.append((RANK_HEADER, b"%d" % partner.rank))
        if partner.worker.by_params:
            cut = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
            if "max_completion_tokens" in fields:
                cut["max_completion_tokens"] = 1
            leg.begin(request.method, request.target, headers, orjson.dumps(cut | _ONE_TOKEN | asked))
            return
        met = bootstrap_fields(partner, target, batch_size(fields))
        self._handed |= met
        leg.begin(request.method, request.target, headers, with_fields(request.body, met | asked, fields))
        super()._go(target)

    @override
    def _extra_fields(self, target: HttpTarget) -> dict[str, Any]:
        return super()._extra_fields(target) | ({} if self._started else self._handed)

    def prefilled(self, status: int, body: bytes) -> None:
        """The prefill engine computed or refused the prompt."""
        leg, self._leg = self._leg, None
        target, partner, sent = self.target, self.partner, self.prefill
        self._router.prefill_ended(self, computed=True)
        if self.over or sent is None or leg is None or target is None or partner is None:
            return
        if status != 200:
            self._refused(status, body)
            return
        if partner.worker.by_params:
            self._learn(body, sent)
            try:
                params = orjson.loads(body).get("kv_transfer_params")
            except (orjson.JSONDecodeError, AttributeError):
                params = None
            if isinstance(params, dict):
                self._handed["kv_transfer_params"] = params
            super()._go(target)

    def prefill_failed(self, why: str, *, broken: bool = True) -> None:
        """The prefill worker failed: let the decode worker compute the prompt if it can, or try another pair.

        broken: it did not answer.
        """
        self._leg = None
        self._router.prefill_ended(self, computed=False)
        target, partner = self.target, self.partner
        if self.over or self._started or target is None or partner is None:
            return
        if partner.worker.by_params:
            log.warning("a prompt is computed where it is answered: %s", why)
            self._handed = {}
            super()._go(target)
        elif not target.worker.computes_alone:
            self._restart_prefill(why, broken=broken)
        # A Tokenyard decode engine already has the request, notices the failure, and computes the prompt.

    def _restart_prefill(self, why: str, *, broken: bool = True) -> None:
        self._head = None
        self._retry_elsewhere(why, broken=broken)

    def _refused(self, status: int, body: bytes) -> None:
        """The prefill worker refused the request. Another one would refuse it too, unless this one was only overloaded.
        A Tokenyard decode engine would wait for the KV, so it is asked to compute the prompt itself.
        """
        assert self.partner is not None
        assert self.target is not None
        if self._started:
            return  # The decode engine has given up waiting for the KV, and has computed the prompt itself.
        # A decode engine that gives up while the prompt is on its way ends their room; the next try has another one.
        retryable = self._is_retryable(status) or status == ID_IN_USE
        if retryable and self.target.worker.computes_alone and not self.partner.worker.by_params:
            # Once for a request, so that it takes nothing from the budget of retries.
            self.alone, self._head = True, None
            self._drop_upstream()
            self._router.retry(self)
        elif retryable:
            self.prefill_failed(f"the prefill worker answered {status}", broken=False)
        else:
            self._drop_upstream()
            self._close()
            self._front.answer(status, body, [JSON_TYPE])

    @override
    def _learn(self, tail: bytes, sent: DispatchedRequest) -> None:
        """Count only the prefill worker's cache hits: vLLM's decode engines also count the KV that they fetched."""
        partner = self.partner
        if partner is None or not partner.worker.by_params or sent is not self.sent:
            super()._learn(tail, sent)

    @override
    def _explain(self) -> dict[str, Any]:
        return super()._explain() | ({} if self.partner is None else {"prefill": self.partner.name})

    @override
    def _drop_upstream(self) -> None:
        super()._drop_upstream()
        self._drop_leg()

    @override
    def _close(self) -> None:
        self._drop_leg()
        super()._close()

    def _drop_leg(self) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.drop()
