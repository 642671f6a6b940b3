"""`tokenyard explain`: shows where the time of a request on a running server went."""

import argparse
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from http.client import HTTPException
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base import TokenyardError

TIMEOUT_S = 35.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores the environment's proxy, as `tokenyard bench` does: a proxy resolves 127.0.0.1 to its own machine."""

KEY_VARIABLES = ("TOKENYARD_ADMIN_API_KEY", "TOKENYARD_API_KEY")


def explain(namespace: argparse.Namespace) -> int:
    """Print how one request spent its time, as a table for each of its answers or as JSON."""
    found = fetch(namespace.url, namespace.id, namespace.key)
    if namespace.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console(highlight=False)
    for answer in found["answers"]:
        console.print(answer_table(found["id"], answer))
        console.print(f"  {escape(answer['summary'])}\n")
    if "cache" in found:
        console.print(f"  {escape(cache_line(found))}\n")
    return 0


CAUSES = {
    "first": "no earlier turn of this session is known here",
    "other_salt": "the turn before had another cache salt",
    "other_adapter": "the turn before had another adapter",
    "hit": "all of the turn before was cached",
    "elsewhere": "earlier turns were answered by another engine, before a restart or too long ago",
    "template": "the turn before is in this request, but the chat template writes it differently now, for instance "
    "without earlier reasoning",
    "lost": "the turn before stands in this prompt, but its KV is at another engine or rank",
    "unknown": "the answer has not ended",
}


def cache_line(found: dict[str, Any]) -> str:
    """One sentence that says why a turn's prompt was cached as far as it was."""
    cache = found["cache"]
    if cache["cause"] == "evicted":
        why = eviction(cache)
    else:
        why = CAUSES.get(cache["cause"]) or f"{cache['part']} differs from the turn before, {cache['before']}" + (
            f" ({cache['how']})" if cache.get("how") else ""
        )
    tokens = f"{cache['cached_tokens']} of {cache['prompt_tokens']} prompt tokens were cached"
    return f"turn {found.get('turn', 0)} of session {found.get('session', '')}: {tokens}; {why}"


def eviction(cache: dict[str, Any]) -> str:
    """When KV of the turn before was evicted and for which requests, and what keeps it longer."""
    at = datetime.fromtimestamp(cache["evicted_at"]).strftime("%H:%M:%S")
    started = ", ".join(cache["evicted_for"])
    return (
        f"{cache['evicted_tokens']} of {cache['before_tokens']} tokens of the turn before were evicted until {at}"
        + (f", when {started} started" if started else ", when running answers grew")
        + "; --schedule-policy session lets fewer sessions take turns at once, and --radix-eviction-policy reuse "
        "evicts by the expected return"
    )


def fetch(url: str, request_id: str, key: str | None) -> dict[str, Any]:
    """The server's explanation. Raises TokenyardError with the server's message, or if it cannot be reached."""
    key = key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    address = f"{url.rstrip('/')}/v1/requests/{urllib.parse.quote(request_id, safe='')}/explain"
    try:
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
        with DIRECT.open(request, timeout=TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise TokenyardError(error_message(error)) from error
    except (OSError, ValueError, HTTPException) as error:
        raise TokenyardError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def error_message(error: urllib.error.HTTPError) -> str:
    """The server's message, or the status where the body is not one of our errors."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code}"


def answer_table(request_id: str, answer: dict[str, Any]) -> Table:
    """One answer as a table of its stages and of what delayed it."""
    title = escape(f"{request_id}: {answer['finish_reason'] or answer['state']}")
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("stage")
    table.add_column("value", justify="right")
    for stage, time_ms in answer["stages_ms"].items():
        table.add_row(stage, f"{time_ms:.1f} ms")
    behind, lost = answer["waited_behind"], answer.get("retracted") or answer["lost_its_place"]
    rows = {
        "prompt tokens, of these from the cache": f"{answer['prompt_tokens']}, {answer['cached_tokens']}",
        "prefill chunks": answer["prefill_chunks"],
        "interrupted: preempted, out of pages, paused": "{preempted}, {out_of_pages}, {paused}".format(**lost),
        "tokens computed again": lost["recomputed_tokens"],
        "ahead at arrival: running, waiting": f"{behind['admitted_at_arrival']}, {behind['waiting_at_arrival']}",
        "earlier arrivals that started first": _starts(behind["earlier"]),
        "later arrivals that overtook it": _starts(behind["later"]),
        "policy": behind["policy"],
        "what may overtake under this policy": behind["overtaking"],
    }
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    return table


def _starts(starts: dict[str, Any]) -> str:
    if not starts["requests"]:
        return "none"
    more = ", ..." if starts["requests"] > len(starts["latest_ids"]) else ""
    return f"{starts['requests']} ({starts['tokens']} tokens): {', '.join(starts['latest_ids'])}{more}"
