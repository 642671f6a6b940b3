"""One engine of a simulated network: its scheduler and the state machines of the transfer protocol."""

from dataclasses import dataclass, field

from tokenyard.base import CostModel, Finish, Handover, KvMove, Load, Request
from tokenyard.disagg.protocol import DecodePeer, Prefill, PrefillPeer, Timeouts
from tokenyard.disagg.protocol.messages import unpack_ids
from tokenyard.sim.kv.links import LinkDirection, Transfer
from tokenyard.tape.recorder import Core

FIRST_NUMBER = 1 << 42
"""Prompts that are computed for others have numbers from here on; those of the workload are counted from 0."""

TICKET = b"ticket"


@dataclass(slots=True, eq=False)
class SimPeer:
    """An engine in the simulated network: its scheduler, its link, and both protocol state machines.

    boot: counts its lives.
    stopped_until: time (ns) until which it is stalled.
    tick_ns: time (ns) of the next tick of its state machines, 0 for never.
    computing: on a prefill engine, the prompts from a router: scheduler's number -> request of the workload.
    asked: on an engine that answers, the requests whose KV comes from another engine.
    """

    number: int
    core: Core
    cost: CostModel
    way_in: LinkDirection
    way_out: LinkDirection
    terms: Timeouts
    page_size: int
    boot: int = 0
    alive: bool = True
    stopped_until: int = 0
    tick_ns: int = 0
    decode_peer: DecodePeer = field(init=False)
    prefill_peer: PrefillPeer = field(init=False)
    computing: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    reads: dict[str, Transfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decode_peer = DecodePeer(self.terms, self.page_size)
        self.prefill_peer = PrefillPeer(self.terms, self.boot_id, FIRST_NUMBER, lambda: TICKET)

    @property
    def name(self) -> str:
        """The name by which peers know it."""
        return f"r{self.number}"

    @property
    def boot_id(self) -> str:
        """The name of this life."""
        return f"{self.name}-{self.boot}"

    @property
    def next_ns(self) -> int | None:
        """Time (ns) of the next tick that its state machines need."""
        times = [when for when in (self.decode_peer.next_ns(), self.prefill_peer.next_ns()) if when is not None]
        return min(times, default=None)

    @property
    def open_keys(self) -> int:
        """Number of keys that either state machine holds state for."""
        return self.decode_peer.open_keys + self.prefill_peer.open_keys

    def take(self, moves: list[KvMove], now: int) -> list[Load]:
        """Start the moves that the scheduler requested; returns loads whose offer is gone."""
        gone: list[Load] = []
        for move in moves:
            if isinstance(move, Handover):
                self.prefill_peer.handed_over(move, now)
            elif isinstance(move, Load) and not self.decode_peer.loads(move, now):
                gone.append(move)
        for number in self.decode_peer.offered if self.asked else ():
            if not self.core.awaits_admission(number):
                self.ended(number, now)
        return gone

    def ended(self, number: int, now: int) -> None:
        """A request has ended, or continues without the KV that was offered for it."""
        if number in self.asked:
            self.asked.discard(number)
            self.decode_peer.ended(number, now)

    def computed(self, finish: Finish, first_token: int, now: int) -> None:
        """A prompt for another engine has ended; `first_token` is its token if that ended the answer, else -1."""
        if finish.reason != "handover":
            why = (finish.cause or "aborted") if finish.reason == "abort" else ""
            self.prefill_peer.finished(finish.number, why, first_token, now)


def request_for(prefill: Prefill, now: int) -> Request:
    """The request that computes a prefill for another engine."""
    want = prefill.want
    return Request(
        number=prefill.number,
        rid=want.key,
        prompt_ids=unpack_ids(want.prompt),
        sampling=want.sampling,
        arrival_ns=now,
        priority=want.priority,
        service_class=want.service_class,
        tenant=want.tenant,
        cache_salt=want.cache_salt,
        handover=True,
    )
