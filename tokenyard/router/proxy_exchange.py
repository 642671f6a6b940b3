"""Proxies one request: sends it to the target that the dispatch machine chose, and forwards the response.

The hot path does not await: callbacks of the two connections drive it. Until a byte has gone to the client, a failure
leads to a retry on another target. After that, an interrupted stream is continued on another worker if possible, and
ends with an error otherwise.
"""

import asyncio
import logging
import math
import re
from typing import Any

import orjson
from typing_extensions import override

from tokenyard.base import NS_PER_S, TokenyardError
from tokenyard.base.fleet_headers import age_text
from tokenyard.router.client_connection import ClientHandler, ClientRequest, Headers, ResponseWriter
from tokenyard.router.dispatch_driver import DispatchDriver, OpenRequest
from tokenyard.router.errors import RouterError, error_event
from tokenyard.router.header_forwarding import (
    AGE_HEADER,
    DEBUG_HEADER,
    RANK_HEADER,
    TENANT_HEADER,
    HeaderForwarding,
    with_fields,
)
from tokenyard.router.http1 import LAST_CHUNK, ResponseHead, WireError, as_chunk, request_head
from tokenyard.router.request_features import ParsedRequest
from tokenyard.router.stream_continuation import (
    BY_PROMPT_IDS,
    COMPLETIONS,
    Continuation,
    continuation_mode,
)
from tokenyard.router.worker_connection import Body, ResponseReader, UpstreamConnection, body_of
from tokenyard.router.workers import HttpTarget
from tokenyard.routing.load import DispatchedRequest

log = logging.getLogger(__name__)

RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
ID_IN_USE = 409
"""The worker has not noticed yet that the router gave up an earlier try there."""

JSON, EVENT_STREAM, JSON_LINES = b"application/json", b"text/event-stream", b"application/x-ndjson"
TAIL_BYTES = 4096
MAX_HELD_BYTES = 1 << 20
"""Most of an answer in JSON that waits for its end, as it can be had from another worker until then."""

_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,9})')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)":\s*(\d{1,9})')


class Exchange(OpenRequest, ClientHandler, ResponseReader):
    """A request and its response: the `ClientHandler` of its client and the `ResponseReader` of its worker."""

    def __init__(
        self,
        router: DispatchDriver,
        passing: HeaderForwarding,
        front: ResponseWriter,
        request: ClientRequest,
        parsed: ParsedRequest,
        *,
        disagg: bool = False,
    ) -> None:
        super().__init__(request, parsed, disagg=disagg)
        self._router, self._front = router, front
        self._passing = passing
        self._pieces, self._seen_pieces, self._quiet_since_s = 0, -1, 0.0
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head: ResponseHead | None = None
        self._started = False
        self._resumed: Continuation | None = None
        self._follows = False
        self._failures = 0
        self._before = self._last = self._held = b""
        self.added_headers: Headers = []
        """Headers of the router for this request alone."""

    # The request.

    @property
    @override
    def status(self) -> int | None:
        return None if self._head is None else self._head.status

    @override
    def dispatched(self) -> None:
        """Send it to its `target`."""
        assert self.target is not None
        self._go(self.target)

    @override
    def abort(self, error: TokenyardError) -> None:
        """End the request with `error` in any state: as the response, or as the end of the stream."""
        self._drop_upstream()
        if self._started:
            self._abort_stream(error)
        else:
            self._fail(error)

    def _go(self, target: HttpTarget) -> None:
        """Send it, on an idle connection if there is one."""
        connection = target.worker.pool.take()
        if connection is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(target))
        else:
            self._write(connection, target)

    async def _connect(self, target: HttpTarget) -> None:
        try:
            connection = await target.worker.pool.connect()
        except OSError as error:
            self._connecting = None
            self._router.unreachable(target, refused=isinstance(error, ConnectionRefusedError))
            self._retry_elsewhere("the worker cannot be reached")
            return
        self._connecting = None
        if self.over:
            target.worker.pool.put(connection)
        else:
            self._write(connection, target)

    def _write(self, connection: UpstreamConnection, target: HttpTarget) -> None:
        self._upstream = connection
        body, headers, path = self._request.body, self._headers(), self._request.target
        extra = self._extra_fields(target)
        if self._started and self._resumed is not None and self._resumed.way == BY_PROMPT_IDS:
            body, path = self._resumed.prompt_body(target.worker.context_length), COMPLETIONS.encode()
            extra.pop("return_token_ids", None)
            extra.pop("output_ids", None)
        if target.rank is not None:
            headers.append((RANK_HEADER, b"%d" % target.rank))
        body = with_fields(body, extra, self.parsed.fields) if extra else body
        path_prefix, host = target.worker.path_and_host
        connection.send(self, request_head(self._request.method, path_prefix + path, host, headers, len(body)) + body)

    def _headers(self) -> Headers:
        """The headers for a worker. The age is that of the wait: a continued stream waits since its interruption."""
        headers = self._passing.headers(self._request)
        since_ns = self.arrived_ns if self.interrupted_ns is None else self.interrupted_ns
        headers.append((AGE_HEADER, age_text(self._router.now_ns() - since_ns)))
        if self.key is not None:
            headers.append((TENANT_HEADER, self.key.grant.tenant.encode()))
        return headers + self.added_headers

    def _extra_fields(self, target: HttpTarget) -> dict[str, Any]:
        """Fields to add to the client's body: the rank, and the request for token ids."""
        extra: dict[str, Any] = {} if target.rank is None else {"data_parallel_rank": target.rank}
        if not self._started:
            way = target.worker.continues
            self._resumed = self._continuation(way) if way and self.parsed.stream else None
        return extra | self._resumed.extra if self._resumed is not None else extra

    def _continuation(self, way: str) -> Continuation | None:
        """The state to continue the stream in this `way` if its worker fails; None if it cannot be continued."""
        if not self._router.settings.continuation:
            return None
        way = continuation_mode(self._request.path, self.parsed.fields, way)
        return Continuation(self._request.path, self.parsed.fields, way) if way else None

    # The response: callbacks of the worker's connection.

    @override
    def on_head(self, head: ResponseHead) -> Body | None:
        target, router = self.target, self._router
        assert target is not None
        kind = head.get(b"content-type")
        follows = head.length is None and head.status == 200 and (EVENT_STREAM in kind or JSON_LINES in kind)
        if self._started and not follows:
            router.refused(target, head.status)
            self._drop_upstream()
            if self._is_retryable(head.status):
                self._retry_continuation(f"the worker answers {head.status}")
            else:
                self._lost("the worker does not continue the stream")
            return None
        if head.status == ID_IN_USE and self.tries > 1:
            router.refused(target, head.status)
            self._retry_elsewhere("the worker still has an earlier try", broken=False)
            return None
        if head.status in RETRYABLE and router.machine.may_retry(self):
            router.refused(target, head.status)
            self._drop_upstream()
            router.retry(self)
            return None
        router.answered(target, head.status)
        self._follows = follows and self._resumed is not None
        if not self._started:
            self._head = head
        else:
            router.machine.first_token(self, router.now_ns())
        unpack = self._request.http10 or self._follows
        return body_of(head, unpack=unpack, empty=self._request.method == b"HEAD")

    @override
    def on_body(self, data: bytes, done: bool) -> None:
        self._pieces += 1
        self.interrupted_ns = None
        if self._follows:
            data, done = self._followed(data, done)
        if self._started:
            if data:
                self._before, self._last = self._last, data
                self._front.write(data)
        else:
            self._begin(data, done)
        if done:
            self._finish()

    def _followed(self, data: bytes, done: bool) -> tuple[bytes, bool]:
        """The bytes to forward for a piece of a stream that can be continued. A stream that ends without its final
        event is continued on another worker.
        """
        continuation = self._resumed
        assert continuation is not None
        try:
            data = continuation.feed(data)
        except WireError as error:
            self._drop_upstream()
            self._lost(str(error))
            return b"", False
        if done and not continuation.done:
            self._upstream = None
            if data and self._started:
                self._front.write(data if self._request.http10 else as_chunk(data))
            self._lost("the worker ended its stream without an end")
            return b"", False
        if self._request.http10:
            return data, done
        return as_chunk(data) + (LAST_CHUNK if done else b""), done

    @override
    def on_broken(self, why: str, *, stale: bool) -> None:
        self._upstream = None
        assert self.target is not None
        if stale:
            # The worker closed an idle connection at the same moment. That does not count as a failure.
            self._connecting = asyncio.get_running_loop().create_task(self._connect(self.target))
            return
        self._router.connection_failed(self.target)
        self._lost(why)

    def _lost(self, why: str) -> None:
        """The worker will not finish its response: continue it elsewhere, retry it, or report an error."""
        if self.over:
            return
        if not self._started:
            self._head = None
            self._retry_elsewhere(why)
            return
        continuation, context = self._resumed, None if self.target is None else self.target.worker.context_length
        # A stream whose workers fail again and again may be the cause.
        worn_out = self._failures >= self._router.settings.max_retries
        if continuation is None or worn_out or not continuation.can_resume(context):
            self._break_off(why)
            return
        log.warning("a stream continues at another worker after %d tokens: %s", continuation.token_count, why)
        self._failures += 1
        continuation.resume_stream()
        self._drop_upstream()
        self._router.resume(self, continuation.way)

    def _retry_continuation(self, why: str) -> None:
        """An interrupted stream was refused, or its worker cannot be reached: try again, or end it with an error."""
        if self._router.may_resume(self):
            self._router.retry(self)
        else:
            self._break_off(why)

    def _break_off(self, why: str) -> None:
        log.warning("a stream broke off: %s", why)
        self.abort(RouterError(502, "the worker failed in the middle of the answer", code="worker_failed"))

    def _begin(self, data: bytes, done: bool) -> None:
        """Bytes of the body have arrived: begin the response, with all of it if it is one piece of JSON."""
        if not data and not done:
            return
        head, router = self._head, self._router
        assert head is not None
        self._held += data
        if not done and JSON in head.get(b"content-type") and len(self._held) <= MAX_HELD_BYTES:
            return
        data, self._held = self._held, b""
        now = self.first_byte_ns = router.now_ns()
        if self.parsed.stream and head.status == 200:
            router.machine.first_token(self, now)
            router.metrics.first_byte((now - self.arrived_ns) / NS_PER_S)
        self._started = True
        self._last = data
        self._front.begin(b"HTTP/1.1 %d %b" % (head.status, head.reason), self._answer_headers(head), data)

    def _answer_headers(self, head: ResponseHead) -> Headers:
        headers = [header for header in head.headers if header[0] != b"x-request-id"]
        if self._request.http10:
            self._request.keep_alive = self._request.keep_alive and head.length is not None
            headers = [header for header in headers if header[0] != b"transfer-encoding"]
        elif head.length is None and not head.chunked and head.status not in (204, 304):
            headers.append((b"transfer-encoding", b"chunked"))
        if self._request.get(DEBUG_HEADER):
            headers.append((DEBUG_HEADER, orjson.dumps(self._explain())))
        return headers

    def _finish(self) -> None:
        """The response is complete and succeeded."""
        tail = (self._before + self._last)[-TAIL_BYTES:]
        sent, self._upstream = self.sent, None
        assert sent is not None
        self._learn(tail, sent)
        assert self.target is not None
        assert self._head is not None
        self._router.completed(self.target, self._head.status)
        self._outcome = self._outcome or "done"
        self._close()
        self._front.end()

    def _learn(self, tail: bytes, sent: DispatchedRequest) -> None:
        """Learn the prompt's length and cached tokens from the end of the response to `sent`."""
        prompt, cached, output = usage_at_end(tail)
        if output is None and self._resumed is not None and self._follows:
            output = self._resumed.token_count
        self._usage = prompt, cached, output
        self._router.learn(self.parsed, sent, prompt, cached)

    @override
    def estimate(self) -> tuple[int, int]:
        answer = 0 if self._resumed is None else self._resumed.token_count
        return self.parsed.tokens if self._started else 0, answer

    @override
    def log_fields(self) -> dict[str, Any]:
        return super().log_fields() | {"continued": self._failures}

    # Failures.

    def _is_retryable(self, status: int) -> bool:
        """Whether another worker, or the same one later, may answer otherwise."""
        return status in RETRYABLE or (status == ID_IN_USE and self.tries > 1)

    def _retry_elsewhere(self, why: str, *, broken: bool = True) -> None:
        """The target failed before the client got anything of its response; `broken` if it did not answer."""
        if self.over:
            return
        self._held = b""
        self._drop_upstream()
        if self._started:
            self._retry_continuation(why)
            return
        if self._router.machine.may_retry(self, broken=broken):
            self._router.retry(self)
            return
        log.warning("a request failed after %d tries: %s", self.tries, why)
        self.abort(RouterError(502, "no worker could answer this request; try again later", code="worker_failed"))

    def _fail(self, error: TokenyardError) -> None:
        """Respond with an error of the router. Nothing has been sent to the client yet."""
        self._router.metrics.failed(error.code)
        self._outcome = str(error.code)
        self._close()
        self._front.fail(error, self._request.path)

    def _abort_stream(self, error: TokenyardError) -> None:
        """End a response that cannot be continued: an event stream with an error event, others by closing."""
        self._router.metrics.failed(error.code)
        self._outcome = str(error.code)
        head = self._head
        self._close()
        kind = b"" if head is None or head.length is not None else head.get(b"content-type")
        if EVENT_STREAM in kind or JSON_LINES in kind:
            event, end = error_event(error, self._request.path), b"\n" if JSON_LINES in kind else b"\n\n"
            if not self._last.endswith(end if self._request.http10 else end + b"\r\n"):
                event = end + event
            self._front.write(event if self._request.http10 else as_chunk(event) + LAST_CHUNK)
            self._front.end(keep=False)
        else:
            self._front.abort()

    @override
    def client_gone(self) -> None:
        if not self.over:
            self._router.metrics.gone += 1
            self._outcome = "client_gone"
            self._drop_upstream()
            self._close()

    @override
    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    @override
    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    def _drop_upstream(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._upstream = self._upstream, None
        if connection is not None:
            connection.drop(self)

    def _close(self) -> None:
        """Release everything that the request holds, however it ended."""
        if self.over:
            return
        if self._connecting is not None:
            self._connecting.cancel()
        self._router.ended(self)

    def _explain(self) -> dict[str, Any]:
        """Why this target was chosen, with all scores, under names that clients may see."""
        choice = self.choice
        assert choice is not None
        return {
            "target": choice.target.name,
            "policy": self._router.machine.policy_for(self).name,
            "reason": choice.ranking.reason,
            "tries": self.tries,
            "tokens": self.parsed.tokens,
            "scores": {t.name: round(s, 6) for t, s in zip(choice.ranked, choice.ranking.scores, strict=True)},
            "in_flight": {t.name: t.state.requests for t in choice.ranked},
        }

    @override
    def check_time(self, now_s: float) -> None:
        """Abort or continue a response that takes too long, or whose worker has stalled."""
        settings = self._router.settings
        if now_s - self.arrived_ns / NS_PER_S > settings.request_timeout_secs:
            self.abort(RouterError(504, "the answer took too long", code="timeout"))
            return
        if self._pieces != self._seen_pieces or self._front.paused or self.sent is None:
            self._seen_pieces, self._quiet_since_s = self._pieces, now_s
        elif now_s - self._quiet_since_s > self._silence_timeout_s():
            assert self.target is not None
            self._router.connection_failed(self.target)
            self._quiet_since_s = now_s
            self._drop_upstream()
            self._lost("the worker fell silent")

    def _silence_timeout_s(self) -> float:
        """How long the worker may send nothing. It is `health_check_timeout_secs` if the worker is unhealthy and the
        request can be retried or continued elsewhere.
        """
        settings = self._router.settings
        most_s = settings.stall_timeout_secs
        if not self._started and not self._held:
            most_s = settings.first_byte_timeout_secs if self.parsed.stream else math.inf
        worker = None if self.target is None else self.target.worker
        if worker is not None and worker.healthy is False:
            continuation = self._resumed
            if not self._started or (continuation is not None and continuation.can_resume(worker.context_length)):
                return settings.health_check_timeout_secs
        return most_s or math.inf


def usage_at_end(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """Tokens of prompt, cached prompt and answer, as the end of a response reports them; None where it does not."""
    return _last_number(_PROMPT, tail), _last_number(_CACHED, tail), _last_number(_OUTPUT, tail)


def _last_number(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
