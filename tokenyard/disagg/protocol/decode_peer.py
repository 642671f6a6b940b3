"""The decode engine's side: requests KV, has it read, and uses it only if it was valid until the read ended."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tokenyard.base import KvAvailable, KvLoaded, Load
from tokenyard.disagg.protocol.messages import (
    Action,
    Beat,
    Close,
    Done,
    Drop,
    Gone,
    Message,
    Offer,
    Read,
    Send,
    StopRead,
    Timeouts,
    Want,
    unpack_ids,
)

FIRST_BACK_OFF_NS = 1_000_000_000
MAX_BACK_OFF_NS = 30_000_000_000


@dataclass(slots=True)
class Peer:
    """A prefill engine.

    name: its address.
    number: the number of its connection; None without one.
    open_keys: prompts that this engine has open there.
    last_message_ns, beat_ns: times of its last message and of the last `Beat` to it.
    failures: consecutive requests that failed because of it; it gets none before `backoff_until_ns`.
    beat_keys: the keys of the last `Beat` to it.
    load_s: seconds of queued prompts there, by its last `Beat`.
    slowdown: see `Beat`.
    """

    name: str
    number: int | None = None
    open_keys: int = 0
    last_message_ns: int = 0
    beat_ns: int = 0
    failures: int = 0
    backoff_until_ns: int = 0
    beat_keys: frozenset[str] = frozenset()
    load_s: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class RemotePrefill:
    """One prompt that another engine computes.

    want: the message that requests it.
    numbers: all answers of the request; the first one loads.
    peer: the prefill engine.
    state: "unsent" (no connection yet), "wanted", "offered", "reading", "validating", or "failed" (its read has not
        ended yet).
    until: the deadline of its state.
    takes_token: whether the request uses the first token.
    """

    want: Want
    numbers: list[int]
    peer: Peer
    state: str
    until: int
    takes_token: bool = True
    offer: Offer | None = None
    load: Load | None = None


class DecodePeer:
    """One decode engine. `take()` returns its actions; `counters` counts ended requests for KV by cause."""

    def __init__(self, timeouts: Timeouts, page_size: int) -> None:
        self.counters: Counter[str] = Counter()
        self._timeouts = timeouts
        self._page_size = page_size
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self.prefills: dict[str, RemotePrefill] = {}
        self._by_number: dict[int, RemotePrefill] = {}
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_keys(self) -> int:
        """How many prompts other engines compute, or are being read from them."""
        return len(self.prefills)

    @property
    def offered(self) -> list[int]:
        """The numbers of requests whose KV is offered and for which no `Load` has come yet."""
        return [job.numbers[0] for job in self.prefills.values() if job.state == "offered"]

    def peers(self) -> list[Peer]:
        """All known prefill engines."""
        return list(self._peers.values())

    # ---- connections -----------------------------------------------------------------------------------------------

    def joined(self, peer: int, name: str, now: int) -> None:
        """Register connection `peer` to the prefill engine `name` and send what waited for it."""
        known = self._peers.setdefault(name, Peer(name))
        known.number, known.last_message_ns, known.beat_ns = peer, now, now
        self._by_connection[peer] = known
        for job in self.prefills.values():
            if job.peer is known and job.state == "unsent":
                job.state = "wanted"
                self._actions.append(Send(peer, job.want))

    def lost(self, peer: int, now: int, why: str = "connection lost") -> None:
        """Handle the end of a connection: everything open on it fails."""
        known = self._by_connection.pop(peer, None)
        if known is None or known.number != peer:
            # There is a newer connection.
            return
        known.number = None
        if not known.open_keys:
            del self._peers[known.name]
        jobs = [job for job in self.prefills.values() if job.peer is known and job.state not in ("unsent", "failed")]
        for job in jobs:
            self._fail(job, why, now)
        if jobs:
            self._back_off(known, now)

    def unreachable(self, name: str, now: int) -> None:
        """Handle a failed attempt to connect to the engine `name`."""
        waiting = [job for job in self.prefills.values() if job.peer.name == name and job.state == "unsent"]
        for job in waiting:
            self._fail(job, "unreachable", now)

    def healthy_peers(self, now: int) -> list[Peer]:
        """The prefill engines that are connected and not in backoff, those with the least work first."""
        found = [peer for peer in self._peers.values() if peer.number is not None and now >= peer.backoff_until_ns]
        return sorted(found, key=lambda peer: (peer.load_s, peer.open_keys, peer.name))

    # ---- calls from this engine ------------------------------------------------------------------------------------

    def want(
        self, want: Want, numbers: Iterable[int], peer: str, now: int, timeout_ns: int, *, takes_token: bool = True
    ) -> None:
        """Send `want` to `peer`, now or once it is connected.

        The requests `numbers` wait (`Request.awaits_kv`) until `KvAvailable` reports the result, at the latest after
        `timeout_ns`. takes_token: whether the request uses the first token.
        A prompt is sent once: where its key is open already, as that of a room that is named twice, they compute it.
        """
        if want.key in self.prefills:
            self.counters["failed: open already"] += 1
            self._actions += [KvAvailable(number, 0) for number in numbers]
            return
        known = self._peers.setdefault(peer, Peer(peer))
        job = RemotePrefill(want, list(numbers), known, "unsent", now + timeout_ns, takes_token)
        known.open_keys += 1
        self.prefills[want.key] = self._by_number[job.numbers[0]] = job
        if known.number is None:
            return
        job.state = "wanted"
        if known.open_keys == 1:
            # Silence counts only while something is open.
            known.last_message_ns = known.beat_ns = now
        self._actions.append(Send(known.number, want))

    def loads(self, load: Load, now: int) -> bool:
        """Begin a load into pages that the scheduler allocated; False if the request has no KV on offer here."""
        job = self._by_number.get(load.number)
        if job is None or job.state != "offered" or job.offer is None or job.peer.number is None:
            return False
        first = load.start // self._page_size
        pages = unpack_ids(job.offer.pages)[first : first + len(load.pages)]
        if len(pages) < len(load.pages) or (load.state_slot >= 0) != (job.offer.state_slot >= 0):
            self._fail(job, "wrong offer", now)
            return False
        job.load, job.state, job.until = load, "reading", now + self._timeouts.lease_ns
        offer = job.offer
        self._actions.append(Read(job.want.key, job.peer.number, load, pages, first, offer.ticket, offer.state_slot))
        return True

    def read_ended(self, key: str, why: str, now: int) -> None:
        """Handle the end of a read, after which nothing writes to its pages; `why` it failed, "" if it succeeded."""
        job = self.prefills.get(key)
        if job is None or job.load is None:
            return
        if job.state == "failed":
            self._end_load(job, 0)
        elif why or job.peer.number is None:
            self._send(job, Drop(key))
            self._back_off(job.peer, now)
            self._count(job, why)
            self._end_load(job, 0)
        else:
            job.state, job.until = "validating", now + self._timeouts.silence_ns
            self._send(job, Done(key))

    def ended(self, number: int, now: int) -> None:
        """Handle a request that ends or goes on without its offer. A read in progress continues."""
        job = self._by_number.get(number)
        if job is None:
            return
        if job.state in ("reading", "validating"):
            self._give_up(job)
            return
        if job.state != "failed":
            self._send(job, Drop(job.want.key))
            self._forget(job)

    # ---- messages from the prefill side ----------------------------------------------------------------------------

    def received(self, peer: int, message: Message, now: int) -> None:
        """Handle a message; an unexpected one is ignored."""
        known = self._by_connection.get(peer)
        if known is None:
            return
        known.last_message_ns = now
        if isinstance(message, Beat):
            self._handle_beat(known, message, now)
            return
        job = self.prefills.get(message.key)
        if job is None or job.peer is not known:
            if isinstance(message, Offer):
                self._actions.append(Send(peer, Drop(message.key)))
            return
        match message:
            case Offer() if job.state == "wanted":
                self._handle_offer(job, message, now)
            case Done() if job.state == "validating" and job.load is not None:
                known.failures = 0
                self.counters["transferred"] += 1
                self._end_load(job, job.load.start + len(job.load.pages) * self._page_size)
            case Gone() if job.state != "failed":
                if job.state == "wanted":
                    self._back_off(known, now)
                self._fail(job, message.why, now)

    def _handle_offer(self, job: RemotePrefill, offer: Offer, now: int) -> None:
        if len(offer.pages) % 4 or offer.tokens < 0 or len(offer.pages) // 4 * self._page_size < offer.tokens:
            self._fail(job, "wrong offer", now)
            return
        if offer.weights != job.want.weights:
            # One of the two engines has changed its weights, or is about to.
            self._fail(job, "other weights", now)
            return
        token = offer.token if job.takes_token else -1
        job.offer, job.state, job.until = offer, "offered", now + self._timeouts.admission_ns
        self._actions.append(KvAvailable(job.numbers[0], offer.tokens, token))
        self._release_others(job)
        if not offer.tokens:
            job.peer.failures = 0
            self._forget(job)

    def _handle_beat(self, peer: Peer, beat: Beat, now: int) -> None:
        peer.load_s, peer.slowdown = beat.load_s, beat.slowdown
        known = set(beat.keys)
        for key in peer.beat_keys - known:
            job = self.prefills.get(key)
            # Validation may have ended a key there already; the answer is then still in transit.
            if job is not None and job.state in ("wanted", "offered", "reading"):
                self._fail(job, "unknown there", now)

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Send heartbeats, give up silent engines, and fail jobs past their deadline."""
        for peer in list(self._peers.values()):
            if peer.number is None or not peer.open_keys:
                continue
            if now - peer.last_message_ns >= self._timeouts.silence_ns:
                self._actions.append(Close(peer.number, "silent"))
                self.lost(peer.number, now, "silent")
            elif now - peer.beat_ns >= self._timeouts.beat_ns:
                self._beat(peer, now)
        for job in [job for job in self.prefills.values() if now >= job.until and job.state != "failed"]:
            self._send(job, Drop(job.want.key))
            if job.state != "offered":
                self._back_off(job.peer, now)
            self._fail(job, f"{job.state} for too long", now)

    def next_ns(self) -> int | None:
        """When to call `tick` next; None if not needed."""
        times = [job.until for job in self.prefills.values() if job.state != "failed"]
        for peer in self._peers.values():
            if peer.number is not None and peer.open_keys:
                times += [peer.beat_ns + self._timeouts.beat_ns, peer.last_message_ns + self._timeouts.silence_ns]
        return min(times, default=None)

    def _beat(self, peer: Peer, now: int) -> None:
        keys = [job.want.key for job in self.prefills.values() if job.peer is peer and job.state != "unsent"]
        peer.beat_ns = now
        peer.beat_keys = frozenset(keys)
        assert peer.number is not None
        self._actions.append(Send(peer.number, Beat(keys)))

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _fail(self, job: RemotePrefill, why: str, now: int) -> None:
        """Fail a job: this engine computes the part of the prompt whose KV is missing."""
        self._count(job, why)
        if job.state in ("unsent", "wanted"):
            self._actions.append(KvAvailable(job.numbers[0], 0))
            self._release_others(job)
            self._forget(job)
        elif job.state == "offered":
            self._forget(job)
        else:
            self._give_up(job)

    def _give_up(self, job: RemotePrefill) -> None:
        """Discard the pages of a read; they are freed once the read has ended."""
        if job.state == "reading":
            job.state = "failed"
            self._actions.append(StopRead(job.want.key))
        elif job.state == "validating":
            self._send(job, Drop(job.want.key))
            self._end_load(job, 0)

    def _end_load(self, job: RemotePrefill, tokens: int) -> None:
        assert job.load is not None
        self._actions.append(KvLoaded(job.load.number, max(tokens, job.load.start)))
        self._forget(job)

    def _release_others(self, job: RemotePrefill) -> None:
        for number in job.numbers[1:]:
            self._actions.append(KvAvailable(number, 0))

    def _count(self, job: RemotePrefill, why: str) -> None:
        self.counters[f"failed: {why}"] += 1

    def _back_off(self, peer: Peer, now: int) -> None:
        """Send no requests to a failed peer for a while; each consecutive failure doubles the time."""
        pause_ns = FIRST_BACK_OFF_NS << min(peer.failures, 5)
        peer.failures += 1
        peer.backoff_until_ns = now + min(pause_ns, MAX_BACK_OFF_NS)

    def _send(self, job: RemotePrefill, message: Message) -> None:
        if job.peer.number is not None:
            self._actions.append(Send(job.peer.number, message))

    def _forget(self, job: RemotePrefill) -> None:
        job.peer.open_keys -= 1
        if not job.peer.open_keys:
            # It sends no heartbeats while no key is open, so its last values would become stale.
            job.peer.load_s, job.peer.slowdown = 0.0, 1.0
        del self.prefills[job.want.key]
        del self._by_number[job.numbers[0]]
