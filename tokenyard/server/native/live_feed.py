"""`GET /v1/live`: the state of the server as server-sent events, four per second, the same for all clients.

The schedulers are polled once for all clients, and not at all without clients. An event is one JSON object; each
request and each bin is an array in the order of `ROW` and `BIN`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from tokenyard.base import EngineDeadError, OverloadedError, TokenyardError
from tokenyard.base.version import __version__
from tokenyard.engine.frontend.data_parallel_controller import merge_counters
from tokenyard.engine.frontend.input_processor import LEVEL_NAMES
from tokenyard.engine.scheduler_process.health.step_history import BIN_NS, MAX_BINS
from tokenyard.server.http.streaming import HttpResponse, Receive, Scope, Send, while_connected
from tokenyard.server.state import ServerState

PERIOD_S = 0.25
PREFIXES_EVERY = 8
"""One event in this many has the hot prefixes, the most expensive part."""

REPEATED_BINS = 8
"""Each event repeats the latest bins, so that a client that misses a few events misses no bin."""

ROW = ("state", "level", "tenant", "age_ms", "prompt", "hit", "computed", "known", "limit", "paused")
"""Fields of a request in an event's `rows`, after its id."""

BIN = ("index", "steps", "prefill", "decode", "busy_ms", "longest_ms", "predicted_ms")
"""Fields of a bin. `tokenyard/ui/server.js` reads them by position."""

TOTALS = (
    "prompt_tokens",
    "hit_tokens",
    "generated_tokens",
    "finished",
    "aborted",
    "rejected",
    "preempted",
    "retracted",
    "evicted_sessions",
)
SESSIONS = ("active_sessions", "resident_sessions")
COUNTS = ("waiting", "loading", "prefilling", "running")
POLICY = ("policy", "policy_options", "policy_note", "overtaking", "paused", "step_time_error", "evicted_tokens")


class LiveFeed:
    """Polls the schedulers and sends events to all clients. It runs while there is a client."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._followers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one client."""
        reply = HttpResponse(send)
        if scope["method"] == "HEAD":
            await reply.event(b"")
            await reply.end()
            return
        await while_connected(receive, self._answer(reply))

    async def _answer(self, reply: HttpResponse) -> None:
        async with aclosing(self.follow()) as events:
            async for event in events:
                await reply.event(event)
        await reply.end()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the server has drained or the engine has died; the first one has the last minute.

        A client that reads slowly misses events.
        """
        yield _event(await self._poll(prefixes=True, bins=MAX_BINS) | {"server": self._about()})
        self._followers += 1
        if self._task is None:
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
        try:
            while event := await asyncio.shield(self._next_event()):
                yield event
        finally:
            self._followers -= 1
            if not self._followers and self._task is not None:
                self._task.cancel()
                self._task = None

    def _next_event(self) -> asyncio.Future[bytes]:
        assert self._next is not None
        return self._next

    async def _run(self) -> None:
        """Poll every `PERIOD_S` and publish an event; empty bytes mark the end."""
        round_number, due = 0, time.monotonic()
        while True:
            round_number += 1
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            event = await self._poll(prefixes=round_number % PREFIXES_EVERY == 0, bins=REPEATED_BINS)
            over = event["phase"] in ("dead", "drained")
            done, self._next = self._next_event(), asyncio.get_running_loop().create_future()
            done.set_result(_event(event))
            if over:
                self._next.set_result(b"")
                return

    async def _poll(self, *, prefixes: bool, bins: int) -> dict[str, Any]:
        """The current state as plain data."""
        state = self._state
        event: dict[str, Any] = {"at": time.time(), "now": time.monotonic_ns() // BIN_NS, "phase": state.phase}
        if state.phase == "draining" and not state.open_requests:
            event["phase"] = "drained"
        try:
            views = await state.control.watch(prefixes=prefixes, bins=bins)
        except EngineDeadError as error:
            return event | {"phase": "dead", "why": error.message}
        except (OverloadedError, TokenyardError) as error:
            return event | {"why": error.message}
        counters = merge_counters([view["counters"] for view in views])
        return event | self._served() | _scheduler_part(counters) | self._views(views)

    def _views(self, views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The views of all ranks, merged."""
        groups = [list(group.values()) for view in views for group in view["groups"]]
        rows = [
            [self._state.control.rid_of(row["number"]) or f"#{row['number']}", *(row[name] for name in ROW)]
            for view in views
            for row in view["rows"]
        ]
        merged = {
            "groups": groups,
            "rows": rows,
            "kv": merge_counters([view["kv"] for view in views]),
            "bins": _merged_bins(one for view in views for one in view["bins"]),
            "budget_ms": _in_ms(views[0]["step_budget_s"]),
            "budget_tokens": views[0]["step_budget_tokens"],
        }
        if views[0]["prefixes"] is not None:
            merged["prefixes"] = [prefix for view in views for prefix in view["prefixes"]]
            merged["prefixes_cut"] = any(view["prefixes_cut"] for view in views)
        return merged

    def _served(self) -> dict[str, Any]:
        """SLO attainment and goodput since the start, by service class level."""
        counters = self._state.metrics.counters
        return {
            "slo": {
                level: [int(counters.get(("slo_requests", (level, met)), 0)) for met in ("yes", "no")]
                for level in LEVEL_NAMES
            },
            "goodput": {level: int(counters.get(("goodput_tokens", (level,)), 0)) for level in LEVEL_NAMES},
        }

    def _about(self) -> dict[str, Any]:
        """Facts that do not change while the server runs."""
        options = self._state.options
        loading = self._state.phase == "loading"
        return {
            "model": options.model_name,
            "version": __version__,
            "levels": LEVEL_NAMES,
            "policies": options.policies,
            "started": self._state.created_s,
            "context": None if loading else self._state.generator.context_length,
        }


def _scheduler_part(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, totals, sessions and the policy, from the schedulers' counters."""
    totals, measures = counters.get("counters", {}), counters.get("measures", {})
    kv_stores = kv_stores_of(counters.get("kv_store", {}))
    return {
        "counts": {name: counters.get(name, 0) for name in COUNTS},
        "totals": {name: totals.get(name, 0) for name in TOTALS},
        "sessions": {name: measures.get(name, 0) for name in SESSIONS},
        **{name: counters.get(name) for name in POLICY},
        "kv_store": kv_stores,
        # The key's name until the next release.
        "tiers": kv_stores,
    }


def kv_stores_of(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Tokens, bytes and running loads of all ranks' KV stores, by back end (disk, host and others)."""
    found: dict[str, dict[str, int]] = {}
    for rank in described.values():
        store = found.setdefault(str(rank["backend"]), {"tokens": 0, "bytes": 0, "loading": 0})
        store["tokens"] += rank["blocks"] * rank["block_tokens"]
        store["bytes"] += rank["stored_bytes"]
        store["loading"] += rank["loading"]
    return found


def _merged_bins(bins: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """The bins of all ranks, merged by index: sums, and the maximum of `longest_ms`."""
    found: dict[int, dict[str, Any]] = {}
    for one in bins:
        merged = found.setdefault(one["index"], {**dict.fromkeys(BIN, 0), "index": one["index"]})
        for name in BIN[1:]:
            merged[name] = max(merged[name], one[name]) if name == "longest_ms" else merged[name] + one[name]
    return [[round(found[index][name], 3) for name in BIN] for index in sorted(found)]


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
