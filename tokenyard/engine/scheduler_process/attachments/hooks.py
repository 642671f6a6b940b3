"""Calls the hooks of the attachments."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenyard.base import Event, KvMove, Request, SetPolicy, TokenBatch
from tokenyard.engine.scheduler_process.attachments.base import Attachment, AttachmentError, VerbHandler
from tokenyard.engine.scheduler_process.health.liveness import LoopState

logger = logging.getLogger(__name__)

INWARD = ("submitted", "accepted", "poll", "while_device_runs", "policy_changed", "before_flush")
"""Hooks for what enters the scheduler, called in the order of the attachments."""

OUTWARD = ("take", "on_output", "sent")
"""Hooks for what leaves it, called in the reverse order, as in middleware: the attachment that had the last word on a
request is the first to see its moves and output.
"""

STATE = ("busy", "wakeup_ns", "held_reasons", "describe")
"""Hooks that only read; in the order of the attachments."""

Calls = list[tuple[Attachment, Callable[..., Any]]]


class AttachmentHooks:
    """The attachments of a loop, with one list per hook of those that override it.

    `state` names the attachment during each call, so that the watchdog can. `Attachment` documents the hooks and what
    happens if one raises.
    """

    def __init__(self, attachments: Sequence[Attachment], state: LoopState) -> None:
        self._state = state
        self._calls: dict[str, Calls] = {hook: _overriding(hook, attachments) for hook in (*INWARD, *STATE)}
        self._calls |= {hook: _overriding(hook, attachments[::-1]) for hook in OUTWARD}
        self._attachments = attachments

    def of(self, hook: str) -> list[str]:
        """The names of the attachments that a hook is called of, in order."""
        return [attachment.name for attachment, _ in self._calls[hook]]

    def submitted(self, request: Request, now: int) -> Request:
        """The request for the scheduler. Raises what an attachment raises that refuses it."""
        for attachment, call in self._calls["submitted"]:
            request = self._attributed(attachment, call, request, now)
        return request

    def accepted(self, request: Request, now: int) -> None:
        """Raises what an attachment raises."""
        for attachment, call in self._calls["accepted"]:
            self._attributed(attachment, call, request, now)

    def poll(self, now: int) -> list[Event]:
        """Events for the scheduler, before a plan."""
        return self._events("poll", now)

    def while_device_runs(self, now: int) -> list[Event]:
        """Events for the scheduler, while a step runs."""
        return self._events("while_device_runs", now)

    def before_flush(self, now: int) -> list[Event]:
        """Events that release pages, before the prefix cache is emptied."""
        return self._events("before_flush", now)

    @property
    def move_kv(self) -> bool:
        """Whether any attachment takes KV moves."""
        return bool(self._calls["take"])

    def take(self, moves: list[KvMove]) -> None:
        """Start KV moves; those that no attachment takes are dropped."""
        for attachment, call in self._calls["take"]:
            if not moves:
                return
            try:
                moves = self._attributed(attachment, call, moves)
            except Exception as error:
                self._failed(attachment, "take", error)

    def on_output(self, batch: TokenBatch) -> None:
        """Show, and let change, the output."""
        self._each("on_output", batch)

    def sent(self, batch: TokenBatch) -> None:
        """The output was sent."""
        self._each("sent", batch)

    def policy_changed(self, event: SetPolicy, now: int) -> None:
        """The policy was changed, not by an attachment."""
        self._each("policy_changed", event, now)

    def verbs(self, own: Mapping[str, VerbHandler]) -> dict[str, VerbHandler]:
        """The handlers of all calls, with the driver's `own`. Raises ValueError if a call has two."""
        found = dict(own)
        for attachment in self._attachments:
            for verb, handler in attachment.verbs().items():
                if verb in found:
                    raise ValueError(f"the attachment {attachment.name} answers {verb!r}, which is answered already")
                found[verb] = partial(self._attributed, attachment, handler)
        return found

    @property
    def busy(self) -> bool:
        """Whether requests wait for something that arrives later."""
        return any(self._each("busy"))

    def wakeup_ns(self) -> int | None:
        """The earliest time at which a poll is due; None if none is."""
        return min((due for due in self._each("wakeup_ns") if due is not None), default=None)

    def held_reasons(self) -> dict[str, str]:
        """What requests wait for, by cause; two reasons for one cause are joined."""
        found: dict[str, str] = {}
        for reasons in self._each("held_reasons"):
            for cause, text in reasons.items():
                found[cause] = f"{found[cause]} or {text}" if cause in found else text
        return found

    def describe(self, now: int) -> dict[str, Any]:
        """What the attachments add to the scheduler's snapshot."""
        found: dict[str, Any] = {}
        for part in self._each("describe", now):
            found |= part
        return found

    def _events(self, hook: str, now: int) -> list[Event]:
        return [event for events in self._each(hook, now) for event in events]

    def _each(self, hook: str, *arguments: Any) -> list[Any]:
        """Call a hook of all that have it; returns what they returned."""
        calls = self._calls[hook]
        if not calls:
            return []
        found = []
        for attachment, call in calls:
            self._state.enter(attachment.name)
            try:
                found.append(call(*arguments))
            except Exception as error:
                self._failed(attachment, hook, error)
        self._state.enter("host")
        return found

    def _attributed(self, attachment: Attachment, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call something of an attachment while the loop's state names it."""
        self._state.enter(attachment.name)
        try:
            return call(*arguments, **named)
        finally:
            self._state.enter("host")

    def _failed(self, attachment: Attachment, hook: str, error: Exception) -> None:
        """Call an optional attachment no more. Raises AttachmentError for any other."""
        what = f"the attachment {attachment.name} failed in {hook}: {error}"
        if not attachment.optional:
            raise AttachmentError(what) from error
        logger.error("%s; the engine goes on without it", what, exc_info=error)
        self._calls = {hook: [one for one in calls if one[0] is not attachment] for hook, calls in self._calls.items()}


def _overriding(hook: str, attachments: Sequence[Attachment]) -> Calls:
    """The attachments that override a hook, with what to call."""
    default = getattr(Attachment, hook)
    found: Calls = []
    for attachment in attachments:
        if getattr(type(attachment), hook) is not default:
            is_property = isinstance(default, property)
            found.append((attachment, partial(getattr, attachment, hook) if is_property else getattr(attachment, hook)))
    return found
