"""`GET /v1/live`: what happens now, as one stream of events four times a second, the same for each client.

The scheduler is asked once for all clients, and not at all while there is none. An event is one JSON object; lists of
single requests and of bins are arrays, in the order of `ROW` and `BIN`.
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
"""Hot prefixes come with every so manieth event, as finding them costs most."""

REPEATED_BINS = 8
"""Each event repeats the latest bins, so that a client that misses a few events misses no bin."""

ROW = ("state", "level", "tenant", "age_ms", "prompt", "hit", "computed", "known", "limit", "paused")
"""What follows the id of a request in an event's `rows`."""

BIN = ("index", "steps", "prefill", "decode", "busy_ms", "longest_ms", "predicted_ms")
TOTALS = (
    "prompt_tokens",
    "hit_tokens",
    "generated_tokens",
    "finished",
    "aborted",
    "rejected",
    "preempted",
    "retracted",
)
COUNTS = ("waiting", "loading", "prefilling", "running")
POLICY = ("policy", "policy_options", "policy_note", "overtaking", "paused", "step_time_error", "evicted_tokens")


class LiveFeed:
    """The one source of events. It runs while anybody follows."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._followers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a client that watches, as an ASGI endpoint."""
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
        """Events from now on, the first with the whole last minute, until the server has drained or the engine died.
        A client that reads slowly misses events.
        """
        yield _event(await self._look(prefixes=True, bins=MAX_BINS) | {"server": self._about()})
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
        """Look four times a second; empty bytes are the end."""
        turn, due = 0, time.monotonic()
        while True:
            turn += 1
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            told = await self._look(prefixes=turn % PREFIXES_EVERY == 0, bins=REPEATED_BINS)
            over = told["phase"] in ("dead", "drained")
            done, self._next = self._next_event(), asyncio.get_running_loop().create_future()
            done.set_result(_event(told))
            if over:
                self._next.set_result(b"")
                return

    async def _look(self, *, prefixes: bool, bins: int) -> dict[str, Any]:
        """One moment as plain data."""
        state = self._state
        told: dict[str, Any] = {"at": time.time(), "now": time.monotonic_ns() // BIN_NS, "phase": state.phase}
        if state.phase == "draining" and not state.open_requests:
            told["phase"] = "drained"
        try:
            views = await state.control.watch(prefixes=prefixes, bins=bins)
        except EngineDeadError as error:
            return told | {"phase": "dead", "why": error.message}
        except (OverloadedError, TokenyardError) as error:
            return told | {"why": error.message}
        counters = merge_counters([view["counters"] for view in views])
        return told | self._served() | _scheduler_part(counters) | self._views(views)

    def _views(self, views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The views of all ranks as one."""
        groups = [list(group.values()) for view in views for group in view["groups"]]
        rows = [
            [self._state.control.rid_of(row["number"]) or f"#{row['number']}", *(row[name] for name in ROW)]
            for view in views
            for row in view["rows"]
        ]
        told = {
            "groups": groups,
            "rows": rows,
            "kv": merge_counters([view["kv"] for view in views]),
            "bins": _merged_bins(one for view in views for one in view["bins"]),
            "budget_ms": _in_ms(views[0]["step_budget_s"]),
            "budget_tokens": views[0]["step_budget_tokens"],
        }
        if views[0]["prefixes"] is not None:
            told["prefixes"] = [prefix for view in views for prefix in view["prefixes"]]
            told["prefixes_cut"] = any(view["prefixes_cut"] for view in views)
        return told

    def _served(self) -> dict[str, Any]:
        """What the API process has counted since the start, by level."""
        counters = self._state.metrics.counters
        return {
            "slo": {
                level: [int(counters.get(("slo_requests", (level, met)), 0)) for met in ("yes", "no")]
                for level in LEVEL_NAMES
            },
            "goodput": {level: int(counters.get(("goodput_tokens", (level,)), 0)) for level in LEVEL_NAMES},
        }

    def _about(self) -> dict[str, Any]:
        """What does not change while the server runs."""
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
    """Counts and the policy, from the schedulers' counters."""
    totals = counters.get("counters", {})
    return {
        "counts": {name: counters.get(name, 0) for name in COUNTS},
        "totals": {name: totals.get(name, 0) for name in TOTALS},
        **{name: counters.get(name) for name in POLICY},
        "tiers": tiers_of(counters.get("tiers", {})),
    }


def tiers_of(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """KV below the device by store (disk, host and the like), of all ranks: tokens, bytes, and loads under way."""
    found: dict[str, dict[str, int]] = {}
    for rank in described.values():
        tier = found.setdefault(str(rank["backend"]), {"tokens": 0, "bytes": 0, "loading": 0})
        tier["tokens"] += rank["blocks"] * rank["block_tokens"]
        tier["bytes"] += rank["stored_bytes"]
        tier["loading"] += rank["loading"]
    return found


def _merged_bins(bins: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """The bins of all ranks by their index: work adds up, and the longest step is that of any."""
    found: dict[int, dict[str, Any]] = {}
    for one in bins:
        there = found.setdefault(one["index"], {**dict.fromkeys(BIN, 0), "index": one["index"]})
        for name in BIN[1:]:
            there[name] = max(there[name], one[name]) if name == "longest_ms" else there[name] + one[name]
    return [[round(found[index][name], 3) for name in BIN] for index in sorted(found)]


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(told) + b"\n\n"
