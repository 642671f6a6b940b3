"""What stands next to the event loop: an attachment adds a feature without the loop or the scheduler knowing it.

`docs/attachments.md` shows how to add one. `hooks.py` calls the hooks.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tokenyard.base import Event, KvMove, Request, SetPolicy, TokenBatch, TokenyardError

DeferredReply = Future[Any]
"""What a verb returns that is answered later: `set_result` with plain data or `set_exception` with a ConfigError, in
the event loop's thread.
"""

VerbHandler = Callable[..., Any]
"""Called as `handler(now, **arguments)`. Returns plain data or a `DeferredReply`; raises ConfigError to refuse."""


class AttachmentError(TokenyardError):
    """An attachment failed on which answers depend; the process must end and report why."""

    code = "attachment_failed"


class Attachment:
    """A feature next to the event loop. A subclass overrides the hooks that it needs; the others are never called.

    All hooks run in the event loop's thread and must not wait: the requests of the engine wait meanwhile. Threads of an
    attachment send events through the scheduler's inbox. `now` is the loop's time in ns.

    A hook that raises:

    - `submitted`: the request is refused. `accepted`: the request ends with an error. A verb: the call is refused.
    - any other hook of an `optional` attachment: the error is logged, and the engine goes on without the attachment.
    - any other hook of any other attachment: AttachmentError ends the scheduler process, as events, moves or output may
      be lost. Its requests continue in the process that replaces it.
    """

    name = ""
    """In the log, and in the watchdog's report if a hook does not return."""

    optional = False
    """Whether all requests are still answered without this attachment."""

    def submitted(self, request: Request, now: int) -> Request:
        """A request arrives; returns it for the scheduler. Raises an error to refuse it, with InvalidRequestError or
        ConfigError if the request is at fault. `on_output` reports the end of refused requests, too.
        """
        return request

    def accepted(self, request: Request, now: int) -> None:
        """The scheduler has taken a request; it may have ended at once, for example because the queue is full."""

    def poll(self, now: int) -> Sequence[Event]:
        """Return events for the scheduler. Called in each turn of the loop, before the next step is planned."""
        return ()

    def take(self, moves: list[KvMove]) -> list[KvMove]:
        """Start the KV moves that are this attachment's; returns the others. Called after a plan and before output is
        sent, if there are moves.
        """
        return moves

    def while_device_runs(self, now: int) -> Sequence[Event]:
        """Return events for the scheduler. Called while a step runs, so that the time costs nothing, and before a plan
        if the loop has waited for messages.
        """
        return ()

    def on_output(self, batch: TokenBatch) -> None:
        """The scheduler's output since the last call, possibly empty, before it is sent; may be changed."""

    def sent(self, batch: TokenBatch) -> None:
        """The same after it was sent, at the end of a turn of the loop."""

    def policy_changed(self, event: SetPolicy, now: int) -> None:
        """An operator changed the policy, or it stalled; not called for a `SetPolicy` of an attachment."""

    def before_flush(self, now: int) -> Sequence[Event]:
        """Return events that release pages that are held, but not in use. Called before the prefix cache of an engine
        without requests is emptied.
        """
        return ()

    def verbs(self) -> Mapping[str, VerbHandler]:
        """The calls that this attachment answers, by name. Read once."""
        return {}

    def busy(self) -> bool:
        """Whether requests wait for something that arrives later, so that no step may be possible now."""
        return False

    def wakeup_ns(self) -> int | None:
        """When `poll` is due at the latest, in ns; None for any time. A loop without work waits no longer."""
        return None

    def held_reasons(self) -> Mapping[str, str]:
        """What requests wait for, for the log: texts by cause of `Scheduler.held_back`."""
        return {}

    def describe(self, now: int) -> Mapping[str, Any]:
        """What is added to the snapshot of the scheduler, as plain data. Called about four times a second."""
        return {}

    def close(self) -> None:
        """Release all resources. Called once, by who made the attachment; no other hook follows."""
