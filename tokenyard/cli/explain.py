"""`tokenyard explain`: shows where the time of a request on a running server went."""

import argparse
import json
import os
import urllib.error
import urllib.parse
import urllib.request
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


def cache_line(found: dict[str, Any]) -> str:
    """Which turn of which session the request is, and why its prompt was cached as far as it was."""
    return f"turn {found.get('turn', 0)} of session {found.get('session', '')}: {found['cache']['summary']}"


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
