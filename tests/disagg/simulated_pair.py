"""Two mock engines with the protocol between them, in virtual time: every fault at every moment, and no real second.

KV marks of the mock move with the pages, so a decode row that reads anything but its own history fails its step.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    Handover,
    KvLoaded,
    Request,
    SamplingParams,
    SchedulerSettings,
    StateGroup,
    Submit,
)
from tokenyard.disagg.protocol import Close, DecodePeer, Prefill, PrefillPeer, Read, Send, Timeouts, Want
from tokenyard.disagg.protocol.messages import StopRead, pack_ids, unpack_ids

MS = 1_000_000
PAGE = 16
CONTEXT = 512
FIRST = 1 << 40
TURN_NS = 5 * MS
LATENCY_NS = 5 * MS
READ_NS = 40 * MS
TERMS = Timeouts(lease_ns=2000 * MS, beat_ns=200 * MS, silence_ns=600 * MS, admission_ns=1500 * MS, max_open=64)
PATIENCE_NS = 3000 * MS


STATES = StateGroup(8, track_interval=64)


def make_yard(pages: int = 64, states: StateGroup | None = None, **changes) -> Yard:
    settings = SchedulerSettings(
        **{"page_size": PAGE, "context_length": CONTEXT, "max_running_requests": 6, "chunked_prefill_size": 64}
        | changes
    )
    return Yard(settings, make_info(pages, PAGE, 7, CONTEXT, states=states), answer_tokens=(8, 20))


class Engine:
    """One engine: a scheduler, a mock device, and both machines."""

    def __init__(self, world: "World", boot_id: str, **changes) -> None:
        self.world, self.boot_id = world, boot_id
        self.yard = make_yard(**changes)
        self.decode_peer = DecodePeer(TERMS, PAGE)
        self.prefill_peer = PrefillPeer(TERMS, boot_id, FIRST, lambda: b"ticket")
        self.inbox: list[tuple[int, Callable[[int], None]]] = []
        self.runs = True
        self.dead = False
        self.busy_until = 0
        self._told: set[int] = set()

    def turn(self, now: int) -> None:
        """Everything that happens here in one turn."""
        if not self.runs or self.dead:
            return
        self.yard.now = max(now, self.yard.now)
        due = [call for when, call in self.inbox if when <= now]
        self.inbox = [(when, call) for when, call in self.inbox if when > now]
        for call in due:
            call(now)
        self._act(now)
        if now >= self.busy_until:
            self.yard.launch()
            self.yard.commit()
            self.yard.check()
        self._tell(now)
        self.decode_peer.tick(now)
        self.prefill_peer.tick(now)
        self._act(now)

    def _tell(self, now: int) -> None:
        for wanted in self.yard.scheduler.drain_moves():
            if isinstance(wanted, Handover):
                self.prefill_peer.handed_over(wanted, now)
            elif not self.decode_peer.loads(wanted, now):
                self.yard.apply(KvLoaded(wanted.number, wanted.start))
        for number, finish in self.yard.finished.items():
            if number in self._told:
                continue
            self._told.add(number)
            if number < FIRST:
                self.decode_peer.ended(number, now)
            elif finish.reason != "handover":
                why = finish.cause or "aborted" if finish.reason == "abort" else ""
                self.prefill_peer.finished(number, why, (self.yard.tokens.get(number) or [-1])[-1], now)
        for number in self.decode_peer.offered:
            if not self.yard.scheduler.awaits_admission(number):
                self.decode_peer.ended(number, now)

    def _act(self, now: int) -> None:
        while actions := self.decode_peer.take() + self.prefill_peer.take():
            for action in actions:
                match action:
                    case Send():
                        self.world.post(self, action)
                    case Close():
                        self.world.cut(now)
                    case Prefill():
                        want = action.want
                        request = Request(action.number, "", unpack_ids(want.prompt), want.sampling, handover=True)
                        self.yard.apply(Submit(request))
                    case Read():
                        self.world.read(self, action, now)
                    case StopRead():
                        self.world.stopped_reads.add(action.key)
                    case _:
                        self.yard.apply(action)


class World:
    """A prefill engine `p`, a decode engine `d` and a link. `fault(sender, message)` says what becomes of a message:
    "lost", "doubled" or anything else. states: the model's layers with a recurrent state.
    """

    def __init__(
        self,
        fault=lambda sender, message: "",
        p: dict | None = None,
        d: dict | None = None,
        states: StateGroup | None = None,
    ) -> None:
        self.states = states
        self.now = 1
        self.fault = fault
        self.p, self.d = (
            Engine(self, boot_id, states=states, **(changes or {})) for boot_id, changes in (("p1", p), ("d1", d))
        )
        self.linked = False
        self.connection = 0
        self.stopped_reads: set[str] = set()
        self.reading = 0
        self.said: list[tuple[str, str]] = []
        self.read_fault = ""
        self.at: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.connect()

    def connect(self) -> None:
        """A new connection from `d` to `p`."""
        self.connection += 1
        self.linked = True
        self.d.decode_peer.joined(self.connection, "p", self.now)

    def cut(self, now: int) -> None:
        """The connection ends; each side notices when it runs."""
        if self.linked:
            self.linked = False
            number = self.connection
            for engine, machine in ((self.d, self.d.decode_peer), (self.p, self.p.prefill_peer)):
                engine.inbox.append((now + LATENCY_NS, lambda at, m=machine, n=number: m.lost(n, at)))

    def post(self, sender: Engine, send: Send) -> None:
        """Carry a message, or not."""
        name = "d" if sender is self.d else "p"
        kind = type(send.message).__name__
        fate = self.fault(name, send.message)
        self.said.append((name, kind))
        if not self.linked or send.peer != self.connection or fate == "lost":
            return
        to, machine = (self.p, self.p.prefill_peer) if sender is self.d else (self.d, self.d.decode_peer)
        for _ in range(2 if fate == "doubled" else 1):
            call = lambda at, m=machine, s=send: m.received(s.peer, s.message, at)  # noqa: E731
            to.inbox.append((self.now + LATENCY_NS, call))

    def read(self, reader: Engine, read: Read, now: int) -> None:
        """Copy the pages when the read ends, with their contents at that time: as late as possible."""
        self.reading += 1
        source = self.p

        def end(at: int) -> None:
            self.reading -= 1
            why = self.read_fault or ("gone" if source.dead else "")
            if read.key in self.stopped_reads:
                why = "stopped"
            elif not source.dead:
                copy_marks(source.yard, read, reader.yard)
            reader.decode_peer.read_ended(read.key, why, at)

        reader.inbox.append((now + READ_NS, end))

    def ask(self, tokens: list[int], max_new: int = 12, key: str = "") -> int:
        """A client's request at `d`, whose prompt is to be computed by `p`. key: that of the prompt, if not its own."""
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0)
        number = self.d.yard.submit(tokens, sampling=sampling, awaits_kv=True)
        want = Want(key or f"{self.d.boot_id}-{number}", pack_ids(np.array(tokens, np.int32)), sampling)
        self.d.decode_peer.want(want, [number], "p", self.now, PATIENCE_NS)
        return number

    def when(self, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do something once, as soon as a condition holds."""
        self.at.append((condition, then))

    def run(self, until: Callable[[], bool], most_s: float = 30.0) -> None:
        """Let time pass until a condition holds."""
        end = self.now + round(most_s * 1000) * MS
        while not until():
            assert self.now < end, f"it waits without end: {self.said[-8:]}"
            self.turn()

    def turn(self) -> None:
        """One turn of both engines."""
        self.now += TURN_NS
        for condition, then in list(self.at):
            if condition():
                self.at.remove((condition, then))
                then()
        for engine in (self.p, self.d):
            engine.turn(self.now)

    def settle(self) -> None:
        """Let all leases run out and check the accounts of each live engine: no hold, no page and no key is left."""
        self.run(lambda: not self.at, 10)
        end = self.now + 6000 * MS
        self.run(lambda: self.now > end, 10)
        for engine in (self.p, self.d):
            if engine.dead:
                continue
            memory = engine.yard.scheduler.state.memory
            assert engine.runs
            assert engine.yard.scheduler.idle() is None
            assert not memory.holds
            assert (engine.decode_peer.open_keys, engine.prefill_peer.open_keys, self.reading) == (0, 0, 0)
            assert engine.yard.scheduler.flush(engine.yard.now)
            assert memory.allocator.available == memory.num_pages


def copy_marks(source: Yard, read: Read, target: Yard) -> None:
    """Move the marks of KV and of a state, by the addresses that the executors give."""
    there, here = source.executor, target.executor
    moves = [(there.pieces(read.pages), here.pieces(read.load.pages))]
    if read.load.state_slot >= 0:
        slots = np.array([[read.state_slot], [read.load.state_slot]], np.int32)
        moves.append((there.state_pieces(slots[0]), here.state_pieces(slots[1])))
    for origin, to in moves:
        for a, b in zip(origin.addresses.ravel().tolist(), to.addresses.ravel().tolist(), strict=True):
            ctypes.memmove(b, a, to.nbytes)
