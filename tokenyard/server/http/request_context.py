"""What the handlers of one HTTP request share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenyard.server.engine_client import GenerateClient
from tokenyard.server.http.streaming import HttpResponse
from tokenyard.server.parse.output_style import ParserOptions
from tokenyard.server.state import ServerState


@dataclass(slots=True)
class Turn:
    """One turn of a session.

    session: the session, "" for none.
    index: its index in the session, from 0.
    ttl_ns: how long its KV is asked to be kept, -1 for not said.
    wants_details: whether the usage is to say why its prompt was cached as far as it was.
    """

    session: str = ""
    index: int = 0
    ttl_ns: int = -1
    wants_details: bool = False


@dataclass(slots=True)
class RequestContext:
    """An HTTP request being handled.

    state: the server's state.
    manager: the engine.
    body: the whole body.
    headers: by lower-case name.
    reply: the response to write.
    tenant: the tenant whose API key the request carries, here or at the router, "" for none.
    messages, tools: the conversation and its tools, [] for a prompt that is none.
    reading: how the answer to a conversation is parsed, None for plain text.
    turn: the turn of a session that the request is; None before its answers are begun.
    first_rid: the id of its first request, "" before that is begun.
    ended: the requests whose answers have ended by themselves, each with its tenant.
    age_ns: the time it spent at the router.
    """

    state: ServerState
    manager: GenerateClient
    body: bytes
    headers: Mapping[str, str]
    reply: HttpResponse
    tenant: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    reading: ParserOptions | None = None
    turn: Turn | None = None
    first_rid: str = ""
    ended: dict[str, str] = field(default_factory=dict)
    age_ns: int = 0
