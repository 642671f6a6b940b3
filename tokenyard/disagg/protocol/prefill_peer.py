"""The prefill engine's side: computes prompts for other engines and holds the pages of their KV."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import Cancel, Handover, PagesReleased
from tokenyard.disagg.protocol.messages import (
    MAX_KEY_CHARS,
    Action,
    Beat,
    Done,
    Drop,
    Gone,
    Message,
    Offer,
    Prefill,
    Send,
    Timeouts,
    Want,
    pack_ids,
)

ENDED_KEPT = 1024


@dataclass(slots=True)
class PrefillJob:
    """The state of one key.

    lease_until: when the lease ends, in ns.
    peer: connection of the decode engine that asked for it; None before one has asked.
    number: of the request that computes it; None before it has arrived.
    offer: the offer, once the KV is computed.
    for_client: whether the request comes from one of this engine's clients.
    """

    key: str
    lease_until: int
    peer: int | None = None
    number: int | None = None
    offer: Offer | None = None
    for_client: bool = False


class PrefillPeer:
    """One prefill engine. It numbers the requests that it submits from `first_number` up.

    `take()` returns its actions. `counters` counts offers, refusals, and ended keys by cause.
    """

    def __init__(self, timeouts: Timeouts, boot_id: str, first_number: int, new_ticket: Callable[[], bytes]) -> None:
        self.counters = {"offers": 0, "handed_over": 0, "dropped": 0, "leases_over": 0, "refused": 0}
        self._timeouts = timeouts
        self._boot_id = boot_id
        self._next_number = first_number
        self._new_ticket = new_ticket
        self._jobs: dict[str, PrefillJob] = {}
        self._by_number: dict[int, PrefillJob] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._actions: list[Action] = []
        self.load_s, self.slowdown = 0.0, 1.0

    def take(self) -> list[Action]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_keys(self) -> int:
        """How many keys are open."""
        return len(self._jobs)

    @property
    def held_keys(self) -> int:
        """How many open keys hold pages."""
        return sum(job.offer is not None for job in self._jobs.values())

    def owns(self, number: int) -> bool:
        """Whether a request computes a prompt for another engine."""
        return number in self._by_number

    def valid(self, key: str, ticket: bytes, now: int) -> Offer | None:
        """The offer under a key if its lease holds and the ticket is right; None otherwise."""
        job = self._jobs.get(key)
        if job is None or job.offer is None or job.offer.ticket != ticket or now >= job.lease_until:
            return None
        return job.offer

    # ---- messages from the decode side -----------------------------------------------------------------------------

    def received(self, peer: int, message: Message, now: int) -> None:
        """Handle a message; an unexpected one is ignored."""
        match message:
            case Want():
                self._handle_want(peer, message, now)
            case Done():
                self._handle_done(peer, message.key, now)
            case Drop():
                if self._of(peer, message.key) is not None:
                    self._drop(message.key, "dropped")
            case Beat():
                self._renew(peer, message, now)

    def lost(self, peer: int, now: int) -> None:
        """Handle the end of a connection: drop what was held for its reader."""
        for job in [job for job in self._jobs.values() if job.peer == peer]:
            self._drop(job.key, "dropped")

    def _handle_want(self, peer: int, want: Want, now: int) -> None:
        job = self._jobs.get(want.key)
        if want.boot_id not in ("", self._boot_id):
            self._refuse(peer, want.key, "restarted")
        elif not 0 < len(want.key) <= MAX_KEY_CHARS:
            self._refuse(peer, want.key[:MAX_KEY_CHARS], "bad key")
        elif job is not None and job.peer is None:
            self._attach(job, peer, now)
        elif job is not None and job.peer == peer:
            self._send_offer(job)
        elif job is not None:
            self._refuse(peer, want.key, "the key is in use")
        elif want.key in self._ended:
            self._refuse(peer, want.key, self._ended[want.key])
        elif len(self._jobs) >= self._timeouts.max_open:
            self._refuse(peer, want.key, "busy")
        else:
            job = self._jobs[want.key] = PrefillJob(want.key, now + self._timeouts.lease_ns, peer)
            if not want.attach:
                self._set_number(job, self._next_number)
                self._actions.append(Prefill(self._next_number, want))
                self._next_number += 1

    def _attach(self, job: PrefillJob, peer: int, now: int) -> None:
        """Attach the reader of a key to the request that a client sent."""
        job.peer, job.lease_until = peer, now + self._timeouts.lease_ns
        self._send_offer(job)

    def _send_offer(self, job: PrefillJob) -> None:
        """Send the offer if there is one, also a second time."""
        if job.offer is not None and job.peer is not None:
            self._actions.append(Send(job.peer, job.offer))
            if not job.offer.tokens:
                self._forget(job, "ended")

    def _handle_done(self, peer: int, key: str, now: int) -> None:
        """Handle the end of a read: report whether the lease held throughout, and release the pages."""
        job = self._of(peer, key)
        if job is None or job.offer is None or now >= job.lease_until:
            self._actions.append(Send(peer, Gone(key, self._ended.get(key, "the lease is over"))))
            return
        self._actions.append(Send(peer, Done(key)))
        self._drop(key, "handed_over")

    def _renew(self, peer: int, beat: Beat, now: int) -> None:
        known = [key for key in beat.keys if self._of(peer, key) is not None]
        for key in known:
            if now < self._jobs[key].lease_until:
                self._jobs[key].lease_until = now + self._timeouts.lease_ns
        self._actions.append(Send(peer, Beat(known, self.load_s, self.slowdown)))

    def _of(self, peer: int, key: str) -> PrefillJob | None:
        job = self._jobs.get(key)
        return job if job is not None and job.peer == peer else None

    def _refuse(self, peer: int, key: str, why: str) -> None:
        self.counters["refused"] += 1
        self._actions.append(Send(peer, Gone(key, why)))

    # ---- calls from this engine's scheduler ------------------------------------------------------------------------

    def expect(self, key: str, number: int, now: int) -> bool:
        """Register a client's request whose KV a decode engine will ask for under `key`; False if the key is in use."""
        job = self._jobs.get(key)
        if key in self._ended or (job is not None and job.number is not None):
            return False
        if job is None:
            job = self._jobs[key] = PrefillJob(key, now + self._timeouts.lease_ns)
        job.for_client = True
        self._set_number(job, number)
        return True

    def handed_over(self, handover: Handover, now: int, weights: str = "") -> None:
        """Offer the KV of a request, which the scheduler has computed by these `weights` and holds."""
        job = self._by_number.get(handover.number)
        if job is None:
            self._actions.append(PagesReleased(handover.number))
            return
        pages = pack_ids(handover.pages)
        self._offer(job, handover.tokens, handover.token, pages, weights, now, handover.state_slot)

    def finished(self, number: int, why: str, token: int, now: int, weights: str = "") -> None:
        """Handle a request that ended without a handover: `why` it failed, "" if its first `token`, by these `weights`,
        ended the answer.
        """
        job = self._by_number.get(number)
        if job is None or job.offer is not None:
            return
        if why:
            if job.peer is not None:
                self._refuse(job.peer, job.key, why)
            self._forget(job, why)
        else:
            self._offer(job, 0, token, b"", weights, now)

    def _offer(
        self, job: PrefillJob, tokens: int, token: int, pages: bytes, weights: str, now: int, state_slot: int = -1
    ) -> None:
        lease_ns = self._timeouts.lease_ns
        job.lease_until = now + lease_ns
        ticket = self._new_ticket()
        job.offer = Offer(job.key, self._boot_id, tokens, token, pages, ticket, lease_ns, weights, state_slot)
        self.counters["offers"] += 1
        self._send_offer(job)

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Drop keys whose lease has expired."""
        for job in [job for job in self._jobs.values() if now >= job.lease_until]:
            if job.peer is None and job.offer is None:
                # Its prompt waits in this engine's queue, which has its own timeouts.
                job.lease_until = now + self._timeouts.lease_ns
                continue
            if job.peer is not None:
                self._actions.append(Send(job.peer, Gone(job.key, "the lease is over")))
            self._drop(job.key, "leases_over")

    def next_ns(self) -> int | None:
        """When to call `tick` next; None if not needed."""
        return min((job.lease_until for job in self._jobs.values()), default=None)

    def _set_number(self, job: PrefillJob, number: int) -> None:
        job.number = number
        self._by_number[number] = job

    def _drop(self, key: str, counted: str) -> None:
        """Release the pages of a key, or cancel its request unless a client sent it."""
        job = self._jobs[key]
        self.counters[counted] += 1
        if job.number is not None:
            held = job.offer is not None and job.offer.tokens
            if held:
                self._actions.append(PagesReleased(job.number))
            elif job.offer is None and not job.for_client:
                self._actions.append(Cancel([job.number], "the engine that wanted it does not any more", "client_gone"))
        self._forget(job, "handed over" if counted == "handed_over" else "the lease is over")

    def _forget(self, job: PrefillJob, why: str) -> None:
        del self._jobs[job.key]
        if job.number is not None:
            del self._by_number[job.number]
        self._ended[job.key] = why
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
