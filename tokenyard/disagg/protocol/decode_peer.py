"""The decode engine's side: asks for KV, has it read, and lets it count only if it was valid until the end."""

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
    """A prefill engine. number: of its connection, None while there is none.

    failures: how many asks in a row failed by its fault; nothing is asked of it before `backoff_until_ns`. load_s: how
    many seconds of prompts wait there, as far as known. stretch: see `Beat`. beaten: the keys of the last `Beat` to it.
    """

    name: str
    number: int | None = None
    open_keys: int = 0
    heard_ns: int = 0
    beat_ns: int = 0
    failures: int = 0
    backoff_until_ns: int = 0
    beat_keys: frozenset[str] = frozenset()
    load_s: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class RemotePrefill:
    """One prompt that is computed elsewhere.

    state: "unsent" (no connection yet), "wanted", "offered", "reading", "validating", or "failed" (its read has to end
    yet). until: when its state is over at the latest. numbers: all answers of the request; the first one loads.
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
    """One decode engine. What it wants done is in `take()`; `counters` counts how asks came to their ends, by cause."""

    def __init__(self, terms: Timeouts, page_size: int) -> None:
        self.counters: Counter[str] = Counter()
        self._timeouts = terms
        self._page_size = page_size
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self._asks: dict[str, RemotePrefill] = {}
        self._by_number: dict[int, RemotePrefill] = {}
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """What is to be done since the last call."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def open_keys(self) -> int:
        """How many prompts are being computed or read elsewhere."""
        return len(self._asks)

    @property
    def offered(self) -> list[int]:
        """The numbers of requests whose KV is offered and has not been asked for by a `Load` yet."""
        return [ask.numbers[0] for ask in self._asks.values() if ask.state == "offered"]

    def peers(self) -> list[Peer]:
        """The prefill engines that are known."""
        return list(self._peers.values())

    # ---- connections -----------------------------------------------------------------------------------------------

    def joined(self, peer: int, name: str, now: int) -> None:
        """There is a connection `peer` to the prefill engine `name`; what waited for it is sent."""
        known = self._peers.setdefault(name, Peer(name))
        known.number, known.heard_ns, known.beat_ns = peer, now, now
        self._by_connection[peer] = known
        for ask in self._asks.values():
            if ask.peer is known and ask.state == "unsent":
                ask.state = "wanted"
                self._actions.append(Send(peer, ask.want))

    def lost(self, peer: int, now: int, why: str = "connection lost") -> None:
        """The connection is gone: whatever was open on it fails."""
        known = self._by_connection.pop(peer, None)
        if known is None:
            return
        known.number = None
        if not known.open_keys:
            del self._peers[known.name]
        asks = [ask for ask in self._asks.values() if ask.peer is known and ask.state not in ("unsent", "failed")]
        for ask in asks:
            self._fail(ask, why, now)
        if asks:
            self._back_off(known, now)

    def unreachable(self, name: str, now: int) -> None:
        """The engine `name` cannot be connected to now."""
        waiting = [ask for ask in self._asks.values() if ask.peer.name == name and ask.state == "unsent"]
        for ask in waiting:
            self._fail(ask, "unreachable", now)

    def healthy_peers(self, now: int) -> list[Peer]:
        """The prefill engines that may be asked, those with the least work first: connected and not at rest."""
        found = [peer for peer in self._peers.values() if peer.number is not None and now >= peer.backoff_until_ns]
        return sorted(found, key=lambda peer: (peer.load_s, peer.open_keys, peer.name))

    # ---- what the own engine says ----------------------------------------------------------------------------------

    def want(
        self, want: Want, numbers: Iterable[int], peer: str, now: int, timeout_ns: int, *, takes_token: bool = True
    ) -> None:
        """Ask `peer`, now or once it is connected. The requests `numbers` wait (`Request.awaits_kv`) and hear by
        `KvAvailable` what came of it, after `timeout_ns` at the latest. takes_token: whether the first token is of use.
        """
        known = self._peers.setdefault(peer, Peer(peer))
        ask = RemotePrefill(want, list(numbers), known, "unsent", now + timeout_ns, takes_token)
        known.open_keys += 1
        self._asks[want.key] = self._by_number[ask.numbers[0]] = ask
        if known.number is None:
            return
        ask.state = "wanted"
        if known.open_keys == 1:
            # Silence counts only while something is open.
            known.heard_ns = known.beat_ns = now
        self._actions.append(Send(known.number, want))

    def loads(self, load: Load, now: int) -> bool:
        """The scheduler has taken pages for a request's KV; False if it is not one that was asked for here."""
        ask = self._by_number.get(load.number)
        if ask is None or ask.state != "offered" or ask.offer is None or ask.peer.number is None:
            return False
        first = load.start // self._page_size
        pages = unpack_ids(ask.offer.pages)[first : first + len(load.pages)]
        if len(pages) < len(load.pages):
            self._fail(ask, "wrong offer", now)
            return False
        ask.load, ask.state, ask.until = load, "reading", now + self._timeouts.lease_ns
        self._actions.append(Read(ask.want.key, ask.peer.number, load, pages, first, ask.offer.ticket))
        return True

    def read_ended(self, key: str, why: str, now: int) -> None:
        """Nothing writes to the pages of a read any more; `why` it failed, "" if it did not."""
        ask = self._asks.get(key)
        if ask is None or ask.load is None:
            return
        if ask.state == "failed":
            self._arrive(ask, 0)
        elif why or ask.peer.number is None:
            self._send(ask, Drop(key))
            self._back_off(ask.peer, now)
            self._count(ask, why)
            self._arrive(ask, 0)
        else:
            ask.state, ask.until = "validating", now + self._timeouts.silence_ns
            self._send(ask, Done(key))

    def ended(self, number: int, now: int) -> None:
        """A request has ended, or goes on without its offer. A read of its KV goes on, as its pages are still held."""
        ask = self._by_number.get(number)
        if ask is None:
            return
        if ask.state in ("reading", "validating"):
            self._give_up(ask)
            return
        if ask.state != "failed":
            self._send(ask, Drop(ask.want.key))
            self._forget(ask)

    # ---- what the prefill side says --------------------------------------------------------------------------------

    def received(self, peer: int, message: Message, now: int) -> None:
        """Take in a message; one that makes no sense here is ignored."""
        known = self._by_connection.get(peer)
        if known is None:
            return
        known.heard_ns = now
        if isinstance(message, Beat):
            self._heard(known, message, now)
            return
        ask = self._asks.get(message.key)
        if ask is None or ask.peer is not known:
            if isinstance(message, Offer):
                self._actions.append(Send(peer, Drop(message.key)))
            return
        match message:
            case Offer() if ask.state == "wanted":
                self._offered(ask, message, now)
            case Done() if ask.state == "validating" and ask.load is not None:
                known.failures = 0
                self.counters["transferred"] += 1
                self._arrive(ask, ask.load.start + len(ask.load.pages) * self._page_size)
            case Gone() if ask.state != "failed":
                if ask.state == "wanted":
                    self._back_off(known, now)
                self._fail(ask, message.why, now)

    def _offered(self, ask: RemotePrefill, offer: Offer, now: int) -> None:
        if len(offer.pages) % 4 or offer.tokens < 0 or len(offer.pages) // 4 * self._page_size < offer.tokens:
            self._fail(ask, "wrong offer", now)
            return
        token = offer.token if ask.takes_token else -1
        ask.offer, ask.state, ask.until = offer, "offered", now + self._timeouts.admission_ns
        self._actions.append(KvAvailable(ask.numbers[0], offer.tokens, token))
        self._release_others(ask)
        if not offer.tokens:
            ask.peer.failures = 0
            self._forget(ask)

    def _heard(self, peer: Peer, beat: Beat, now: int) -> None:
        peer.load_s, peer.slowdown = beat.load_s, beat.slowdown
        known = set(beat.keys)
        for key in peer.beat_keys - known:
            ask = self._asks.get(key)
            # A key that is being validated may have ended there by that, with an answer on its way.
            if ask is not None and ask.state in ("wanted", "offered", "reading"):
                self._fail(ask, "unknown there", now)

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Beat, give up engines that are silent, and fail what has taken too long."""
        for peer in list(self._peers.values()):
            if peer.number is None or not peer.open_keys:
                continue
            if now - peer.heard_ns >= self._timeouts.silence_ns:
                self._actions.append(Close(peer.number, "silent"))
                self.lost(peer.number, now, "silent")
            elif now - peer.beat_ns >= self._timeouts.beat_ns:
                self._beat(peer, now)
        for ask in [ask for ask in self._asks.values() if now >= ask.until and ask.state != "failed"]:
            self._send(ask, Drop(ask.want.key))
            if ask.state != "offered":
                self._back_off(ask.peer, now)
            self._fail(ask, f"{ask.state} for too long", now)

    def next_ns(self) -> int | None:
        """When to call `tick` next; None for no such time."""
        times = [ask.until for ask in self._asks.values() if ask.state != "failed"]
        for peer in self._peers.values():
            if peer.number is not None and peer.open_keys:
                times += [peer.beat_ns + self._timeouts.beat_ns, peer.heard_ns + self._timeouts.silence_ns]
        return min(times, default=None)

    def _beat(self, peer: Peer, now: int) -> None:
        keys = [ask.want.key for ask in self._asks.values() if ask.peer is peer and ask.state != "unsent"]
        peer.beat_ns = now
        peer.beat_keys = frozenset(keys)
        assert peer.number is not None
        self._actions.append(Send(peer.number, Beat(keys)))

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _fail(self, ask: RemotePrefill, why: str, now: int) -> None:
        """The prompt is computed here, as far as its KV is not here yet."""
        self._count(ask, why)
        if ask.state in ("unsent", "wanted"):
            self._actions.append(KvAvailable(ask.numbers[0], 0))
            self._release_others(ask)
            self._forget(ask)
        elif ask.state == "offered":
            self._forget(ask)
        else:
            self._give_up(ask)

    def _give_up(self, ask: RemotePrefill) -> None:
        """The pages of a read do not count; they are free once the read has ended."""
        if ask.state == "reading":
            ask.state = "failed"
            self._actions.append(StopRead(ask.want.key))
        elif ask.state == "validating":
            self._send(ask, Drop(ask.want.key))
            self._arrive(ask, 0)

    def _arrive(self, ask: RemotePrefill, tokens: int) -> None:
        assert ask.load is not None
        self._actions.append(KvLoaded(ask.load.number, max(tokens, ask.load.start)))
        self._forget(ask)

    def _release_others(self, ask: RemotePrefill) -> None:
        for number in ask.numbers[1:]:
            self._actions.append(KvAvailable(number, 0))

    def _count(self, ask: RemotePrefill, why: str) -> None:
        self.counters[f"failed: {why}"] += 1

    def _back_off(self, peer: Peer, now: int) -> None:
        """Ask nothing of a peer for a while: it failed, and each failure in a row doubles the time."""
        pause_ns = FIRST_BACK_OFF_NS << min(peer.failures, 5)
        peer.failures += 1
        peer.backoff_until_ns = now + min(pause_ns, MAX_BACK_OFF_NS)

    def _send(self, ask: RemotePrefill, message: Message) -> None:
        if ask.peer.number is not None:
            self._actions.append(Send(ask.peer.number, message))

    def _forget(self, ask: RemotePrefill) -> None:
        ask.peer.open_keys -= 1
        if not ask.peer.open_keys:
            # It says nothing while nothing is open, so what it said last would stand for ever.
            ask.peer.load_s, ask.peer.slowdown = 0.0, 1.0
        del self._asks[ask.want.key]
        del self._by_number[ask.numbers[0]]
