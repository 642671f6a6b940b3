"""Lists of the attachments' hooks, which the driver calls."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenyard.base import Event, KvMove, Request, SetPolicy, TokenBatch
from tokenyard.engine.scheduler_process.attachments.base import Attachment, AttachmentError, VerbHandler
from tokenyard.engine.scheduler_process.health.liveness import LoopState

logger = logging.getLogger(__name__)

REFUSING = ("submitted", "accepted")
"""Hooks that may raise; the driver ends the request."""


class AttachmentHooks:
    """One list per hook, of those attachments that override it; `Attachment` documents the hooks.

    What enters the scheduler passes the attachments in their order. What leaves it (`take`, `on_output`, `sent`) passes
    them in the reverse order, as in middleware: the attachment that had the last word on a request is the first to see
    its moves and output. While a hook runs, `state` names its attachment.
    """

    def __init__(self, attachments: Sequence[Attachment], state: LoopState) -> None:
        self._state = state
        self._attachments = list(attachments)
        self._build()

    def _build(self) -> None:
        inward, outward = self._attachments, self._attachments[::-1]
        self.submitted: list[Callable[[Request, int], Request]] = self._calls("submitted", inward)
        self.accepted: list[Callable[[Request, int], None]] = self._calls("accepted", inward)
        self.poll: list[Callable[[int], Sequence[Event]]] = self._calls("poll", inward)
        self.while_device_runs: list[Callable[[int], Sequence[Event]]] = self._calls("while_device_runs", inward)
        self.policy_changed: list[Callable[[SetPolicy, int], None]] = self._calls("policy_changed", inward)
        self.before_flush: list[Callable[[int], Sequence[Event]]] = self._calls("before_flush", inward)
        self.take: list[Callable[[list[KvMove]], list[KvMove]]] = self._calls("take", outward)
        self.on_output: list[Callable[[TokenBatch], None]] = self._calls("on_output", outward)
        self.sent: list[Callable[[TokenBatch], None]] = self._calls("sent", outward)
        self.busy: list[Callable[[], bool]] = self._calls("busy", inward)
        self.wakeup_ns: list[Callable[[], int | None]] = self._calls("wakeup_ns", inward)
        self.held_reasons: list[Callable[[], Mapping[str, str]]] = self._calls("held_reasons", inward)
        self.describe: list[Callable[[int], Mapping[str, Any]]] = self._calls("describe", inward)

    def verbs(self, own: Mapping[str, VerbHandler]) -> dict[str, VerbHandler]:
        """The handlers of all calls, with the driver's `own`. Raises ValueError if a call has two."""
        found = dict(own)
        for attachment in self._attachments:
            for verb, handler in attachment.verbs().items():
                if verb in found:
                    raise ValueError(f"the attachment {attachment.name} answers {verb!r}, which is answered already")
                found[verb] = partial(self._answer, attachment.name, handler)
        return found

    def _answer(self, name: str, handler: VerbHandler, now: int, **arguments: Any) -> Any:
        """Run a handler of the attachment of this name."""
        self._state.attachment = name
        try:
            return handler(now, **arguments)
        finally:
            self._state.attachment = ""

    def _calls(self, hook: str, attachments: Sequence[Attachment]) -> list[Any]:
        default = getattr(Attachment, hook)
        found = []
        for attachment in attachments:
            if getattr(type(attachment), hook) is not default:
                found.append(self._attributed(attachment, hook, getattr(attachment, hook), default))
        return found

    def _attributed(
        self, attachment: Attachment, hook: str, call: Callable[..., Any], default: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`call` as the driver calls it: attributed, and with the rule for a hook that raises."""
        state, name = self._state, attachment.name

        def attributed(*arguments: Any) -> Any:
            state.attachment = name
            try:
                return call(*arguments)
            except Exception as error:
                if hook in REFUSING:
                    raise
                self._failed(attachment, hook, error)
                return default(attachment, *arguments)
            finally:
                state.attachment = ""

        return attributed

    def _failed(self, attachment: Attachment, hook: str, error: Exception) -> None:
        """Call an optional attachment no more. Raises AttachmentError for any other."""
        what = f"the attachment {attachment.name} failed in {hook}: {error}"
        if not attachment.optional:
            logger.critical("%s", what, exc_info=error)
            raise AttachmentError(what) from error
        logger.error("%s; the engine goes on without it", what, exc_info=error)
        self._attachments = [one for one in self._attachments if one is not attachment]
        self._build()
