"""Prefill and decode engines with the transfer protocol between them, in virtual time.

It plays the part that `disagg.transfer_manager` and `engine.scheduler_process.attachments.disagg` play with sockets,
threads and clocks. The protocol's state machines and decisions are the same code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from tokenyard.base import NS_PER_S, Cancel, CostModel, Event, Finish, KvLoaded, KvMove, Request, SamplingParams, Submit
from tokenyard.disagg.protocol import Close, Prefill, Read, Send, Want
from tokenyard.disagg.protocol.decisions import MAX_OFFER_TIMEOUT_S, RemotePrefillRule, want_of
from tokenyard.disagg.protocol.messages import Message, StopRead
from tokenyard.disagg.protocol.redial import MIN_BACKOFF_NS
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.kv.links import LinkDirection, LinkScheduler, Transfer
from tokenyard.sim.kv.sim_peer import FIRST_NUMBER, SimPeer, request_for
from tokenyard.sim.kv.transfer_figures import TransferTimes
from tokenyard.sim.traces.prompt_ids import EOS_TOKEN
from tokenyard.tape.recorder import Core

MIN_TICK_NS = NS_PER_S // 1000
FAULT_STREAM = 2
FIRST_PREFILL_NUMBER = FIRST_NUMBER << 1
"""Prompts that a router sends to a prefill engine have numbers from here on, apart from those that engines send."""


class EngineAccess(Protocol):
    """The schedulers, and the clock, of the simulation around the network."""

    def at(self, when_ns: int, call: Callable[[int], None]) -> None:
        """Have `call(now)` run at `when_ns`."""

    def apply(self, number: int, event: Event, now: int) -> None:
        """Apply an event to scheduler `number`."""


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Sizes of the workload and of the fleet. `answering`: number of engines that answer."""

    requests: int
    answering: int
    page_tokens: int
    kv_bytes_per_token: int
    state_bytes: int = 0


class Network:
    """All engines of a simulation, those that answer first, and the messages between them."""

    def __init__(self, disagg: DisaggSettings, engines: EngineAccess, sizes: NetworkSizes, seed: int) -> None:
        self.figures = TransferTimes(sizes.requests)
        self.leg_ended: Callable[[int, int, bool], None] = lambda index, now, computed: None
        """Called when a prompt that a router sent to a prefill engine is computed or lost: (request, ns, whether it is
        computed).
        """
        self._disagg, self._engines = disagg, engines
        self._answering, self._page = sizes.answering, sizes.page_tokens
        self._page_bytes, self._state_bytes = sizes.page_tokens * sizes.kv_bytes_per_token, sizes.state_bytes
        self._latency_ns = round(disagg.latency_s * NS_PER_S)
        self._nodes: list[SimPeer] = []
        self._traffic = LinkScheduler()
        self._connections: dict[int, tuple[SimPeer, SimPeer]] = {}
        self._links: dict[tuple[int, int], int] = {}
        self._legs: dict[int, tuple[SimPeer, int]] = {}
        self._next_connection, self._next_half, self._attempts = count(1), count(FIRST_PREFILL_NUMBER), count()
        self._draws = np.random.default_rng([seed, FAULT_STREAM])

    # ---- engines ---------------------------------------------------------------------------------------------------

    def add(self, core: Core, cost: CostModel, *, alive: bool = True) -> None:
        """Add the next engine. One that is not alive joins later (`opened`)."""
        speed = self._disagg.link.bytes_per_s
        wires = (LinkDirection.of(speed), LinkDirection.of(speed))
        node = SimPeer(len(self._nodes), core, cost, *wires, self._disagg.terms, self._page, alive=alive)
        self._nodes.append(node)

    def start(self) -> None:
        """Connect all engines that are alive."""
        for answering in self._nodes[: self._answering]:
            for prefill in self._nodes[self._answering :]:
                self._join(answering, prefill, 0)

    def killed(self, number: int, core: Core, now: int) -> None:
        """An engine died, with all its open transfers; `core` is the scheduler of its next life."""
        old = self._nodes[number]
        old.alive = False
        node = replace(old, core=core, boot=old.boot + 1, computing={}, asked=set(), reads={}, tick_ns=0)
        node.stopped_until = 0
        self._nodes[number] = node
        self.figures.count(old)
        for key in list(old.reads):
            self._stop_read(old, key, now)
        for index in [index for index, leg in self._legs.items() if leg[0] is old]:
            self._leg_over(index, self._legs[index], now, computed=False)
        for connection in [one for one, pair in self._connections.items() if old in pair]:
            self._cut(connection, now)

    def opened(self, number: int, now: int) -> None:
        """An engine is up again, or for the first time."""
        node = self._nodes[number]
        if not node.alive:
            node.alive = True
            self._dial(node, now)

    def stopped(self, number: int, until: int) -> None:
        """An engine is stalled until `until` (ns). Reads of its KV continue, as with RDMA."""
        self._nodes[number].stopped_until = until

    # ---- connections -----------------------------------------------------------------------------------------------

    def _join(self, answering: SimPeer, prefill: SimPeer, now: int) -> None:
        pair = (answering.number, prefill.number)
        if pair in self._links or not (answering.alive and prefill.alive):
            return
        connection = self._links[pair] = next(self._next_connection)
        self._connections[connection] = (answering, prefill)
        answering.decode_peer.joined(connection, prefill.name, now)
        self._act(answering, now)

    def _dial(self, node: SimPeer, now: int) -> None:
        """Connect an engine to all engines of the other side after a delay."""
        here = node.number < self._answering
        others = self._nodes[self._answering :] if here else self._nodes[: self._answering]
        for other in others:
            pair = (node, other) if here else (other, node)
            self._engines.at(now + MIN_BACKOFF_NS, partial(self._rejoin, pair[0].number, pair[1].number))

    def _rejoin(self, answering: int, prefill: int, now: int) -> None:
        pair = self._nodes[answering], self._nodes[prefill]
        awake_ns = max(node.stopped_until for node in pair)
        if now < awake_ns:
            self._engines.at(awake_ns, partial(self._rejoin, answering, prefill))
        else:
            self._join(*pair, now)

    def _cut(self, connection: int, now: int) -> None:
        """A connection ends. Both sides are notified, and it is made again."""
        pair = self._connections.pop(connection, None)
        if pair is None:
            return
        answering, prefill = pair
        del self._links[answering.number, prefill.number]
        self._later(answering, now, lambda at: answering.decode_peer.lost(connection, at))
        self._later(prefill, now, lambda at: prefill.prefill_peer.lost(connection, at))
        self._engines.at(now + MIN_BACKOFF_NS, partial(self._rejoin, answering.number, prefill.number))

    def _later(self, node: SimPeer, now: int, call: Callable[[int], None]) -> None:
        """Run `call` after the latency, or when a stalled engine continues."""

        def happen(at: int) -> None:
            if self._nodes[node.number] is not node:
                return
            if at < node.stopped_until:
                self._engines.at(node.stopped_until, happen)
                return
            call(at)
            self._act(node, at)

        self._engines.at(now + self._latency_ns, happen)

    # ---- requests --------------------------------------------------------------------------------------------------

    def submitted(self, number: int, request: Request, partner: int, now: int) -> Request:
        """A request arrives at an engine that answers; returns the request to submit to its scheduler.

        partner: the prefill engine that a router named, which gets the prompt at the same time; -1 for none.
        """
        node = self._nodes[number]
        if self._disagg.mode == "both":
            return self._decide(node, request, now)
        return request if partner < 0 else self._start_bootstrap(node, self._nodes[partner], request, now)

    def _decide(self, node: SimPeer, request: Request, now: int) -> Request:
        """Ask a prefill engine if that is faster."""
        peers, cached = node.decode_peer.healthy_peers(now), node.core.cached_tokens(request)
        tokens, bytes_per_token = len(request.prompt_ids), self._page_bytes // self._page
        rule = RemotePrefillRule(self._disagg.mode, node.cost, self._page, bytes_per_token, self._state_bytes)
        chosen = rule.choose(peers, tokens, cached, lambda cost: node.core.prefill_load(cost, now))
        if chosen is None:
            return request
        return self._ask(node, want_of(request, node.boot_id), request, chosen.peer.name, chosen.timeout_s, now)

    def _start_bootstrap(self, node: SimPeer, partner: SimPeer, request: Request, now: int) -> Request:
        """Both halves of a request arrive at the same time and meet in a bootstrap room, as the router sends them."""
        room, half = f"{request.number}-{next(self._attempts)}", next(self._next_half)
        self._legs[request.number] = (partner, half)
        self._later(partner, now - self._latency_ns, partial(self._begin_half, partner, room, half, request))
        want = Want(room, b"", SamplingParams(), attach=True)
        if (node.number, partner.number) not in self._links:
            self._later(node, now, partial(self._try, node, partner.number))
        return self._ask(node, want, request, partner.name, MAX_OFFER_TIMEOUT_S, now)

    def _try(self, node: SimPeer, partner: int, now: int) -> None:
        """Connect to a prefill engine, or report it as lost if it is down."""
        other = self._nodes[partner]
        if other.alive:
            self._join(node, other, now)
        else:
            node.decode_peer.unreachable(other.name, now)

    def _begin_half(self, partner: SimPeer, room: str, half: int, request: Request, now: int) -> None:
        """The prefill half of a request arrives."""
        index = request.number
        if self._legs.get(index) != (partner, half):
            return
        partner.computing[half] = index
        partner.prefill_peer.expect(room, half, now)
        self.figures.sent(index, half, partner.number, now)
        self._engines.apply(partner.number, Submit(replace(request, number=half, arrival_ns=now, handover=True)), now)

    def _ask(self, node: SimPeer, want: Want, request: Request, peer: str, most_s: float, now: int) -> Request:
        node.asked.add(request.number)
        node.decode_peer.want(want, [request.number], peer, now, round(most_s * NS_PER_S))
        self._act(node, now)
        return replace(request, awaits_kv=True)

    def dropped(self, index: int, now: int) -> None:
        """A router no longer needs the prefill half of a request."""
        leg = self._legs.pop(index, None)
        if leg is not None and self._nodes[leg[0].number] is leg[0]:
            self._later(leg[0], now, lambda at: self._apply(leg[0], Cancel([leg[1]], "", "client_gone"), at))

    # ---- events from schedulers ------------------------------------------------------------------------------------

    def turned(self, number: int, moves: list[KvMove], now: int) -> None:
        """A scheduler has had its turn and requests `moves`."""
        node = self._nodes[number]
        for load in node.take(moves, now):
            self._apply(node, KvLoaded(load.number, load.start), now)
        self._act(node, now)

    def finished(self, number: int, finish: Finish, now: int) -> None:
        """A request has ended at scheduler `number`."""
        node = self._nodes[number]
        if number < self._answering:
            node.ended(finish.number, now)
            return
        # Only answers of one token end without a handover; no other token ends them.
        node.computed(finish, EOS_TOKEN if finish.reason == "stop" else -1, now)
        self.figures.computed(finish)
        index = node.computing.pop(finish.number, None)
        if index is not None:
            self._leg_over(index, (node, finish.number), now, computed=True)

    def _leg_over(self, index: int, leg: tuple[SimPeer, int], now: int, *, computed: bool) -> None:
        """A prefill half has ended; ignored if the request has another one by now."""
        if self._legs.get(index) == leg:
            del self._legs[index]
            self.leg_ended(index, now, computed)

    # ---- effects of the state machines -----------------------------------------------------------------------------

    def _act(self, node: SimPeer, now: int) -> None:
        while actions := node.decode_peer.take() + node.prefill_peer.take():
            for action in actions:
                match action:
                    case Send():
                        self._post(node, action, now)
                    case Close():
                        self._cut(action.peer, now)
                    case Prefill():
                        self.figures.sent(action.want.sampling.seed or 0, action.number, node.number, now)
                        self._apply(node, Submit(request_for(action, now)), now)
                    case Read():
                        self._read(node, action, now)
                    case StopRead():
                        if self._stop_read(node, action.key, now):
                            node.decode_peer.read_ended(action.key, "stopped", now)
                    case _:
                        self.figures.event(action, now)
                        self._apply(node, action, now)
        self._set_tick(node, now)

    def _apply(self, node: SimPeer, event: Event, now: int) -> None:
        self._engines.apply(node.number, event, now)

    def _post(self, node: SimPeer, send: Send, now: int) -> None:
        pair = self._connections.get(send.peer)
        if pair is None:
            return
        times = 1
        if self._disagg.lost or self._disagg.doubled:
            drawn = float(self._draws.random())
            times = 0 if drawn < self._disagg.lost else 2 if drawn > 1.0 - self._disagg.doubled else 1
        other = pair[1] if node is pair[0] else pair[0]
        for _ in range(times):
            self._later(other, now, partial(self._deliver, other, send.peer, send.message))

    def _deliver(self, node: SimPeer, connection: int, message: Message, now: int) -> None:
        if connection not in self._connections:
            return
        if node.number < self._answering:
            node.decode_peer.received(connection, message, now)
            return
        node.prefill_peer.load_s, node.prefill_peer.slowdown = node.core.prefill_load(node.cost, now)
        node.prefill_peer.received(connection, message, now)

    def _read(self, node: SimPeer, read: Read, now: int) -> None:
        """Read KV over the links of both engines."""
        pair = self._connections.get(read.peer)
        if pair is None:
            node.decode_peer.read_ended(read.key, "connection lost", now)
            return
        source, pages = pair[1], len(read.load.pages)
        self.figures.asked_ns[read.load.number] = now

        def ends(transfer: Transfer) -> None:
            node.reads[read.key] = transfer
            end = partial(self._read_ended, node, source, read, transfer.end_ns)
            self._engines.at(transfer.end_ns + self._latency_ns, end)

        num_bytes = pages * self._page_bytes + self._state_bytes
        self._traffic.carry(source.way_out, node.way_in, num_bytes, now, ends)

    def _read_ended(self, node: SimPeer, source: SimPeer, read: Read, end: int, now: int) -> None:
        transfer = node.reads.get(read.key)
        if transfer is None or transfer.end_ns != end:
            return
        if now < node.stopped_until:
            self._engines.at(node.stopped_until, partial(self._read_ended, node, source, read, end))
            return
        del node.reads[read.key]
        self.figures.read(read.load, transfer, len(read.load.pages) * self._page)
        node.decode_peer.read_ended(read.key, "" if source.alive else "gone", now)
        self._act(node, now)

    def _stop_read(self, node: SimPeer, key: str, now: int) -> bool:
        """Close the socket of a read, so that nothing writes to its pages any more; False if it has ended."""
        transfer = node.reads.pop(key, None)
        if transfer is None:
            return False
        self._traffic.stop(transfer, now)
        return True

    # ---- time ------------------------------------------------------------------------------------------------------

    def _set_tick(self, node: SimPeer, now: int) -> None:
        """Schedule the next tick of the state machines."""
        due = node.next_ns
        if due is None:
            return
        due = max(due, now + MIN_TICK_NS, node.stopped_until)
        if not now < node.tick_ns <= due:
            node.tick_ns = due
            self._engines.at(due, partial(self._tick, node, due))

    def _tick(self, node: SimPeer, due: int, now: int) -> None:
        if self._nodes[node.number] is not node or node.tick_ns != due:
            return
        node.tick_ns = 0
        if now >= node.stopped_until:
            node.decode_peer.tick(now)
            node.prefill_peer.tick(now)
        self._act(node, now)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> TransferTimes:
        """The figures of all transfers, at the end of the simulation."""
        for node in self._nodes:
            self.figures.count(node)
            out, into = node.way_out, node.way_in
            self.figures.wires.append(
                {
                    "engine": node.number,
                    "out_ns": out.busy_ns,
                    "in_ns": into.busy_ns,
                    "sent": out.moved_bytes,
                    "received": into.moved_bytes,
                }
            )
        return self.figures

    def at_rest(self) -> dict[str, int]:
        """What is still open: keys, reads, prefill halves. All are 0 at the end of a simulation."""
        return {
            "keys": sum(node.open_keys for node in self._nodes),
            "reads": sum(len(node.reads) for node in self._nodes),
            "halves": sum(len(node.computing) for node in self._nodes) + len(self._legs),
            "asked": sum(len(node.asked) for node in self._nodes),
        }
