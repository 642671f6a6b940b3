"""Figures of PD disaggregation: the queue on each side, the links, and how long transfers took."""

from collections import Counter
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, Event, Finish, Float64Array, Int64Array, KvAvailable, KvLoaded, Load
from tokenyard.sim.kv.links import Transfer
from tokenyard.sim.kv.sim_peer import SimPeer

SHARES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


class TransferTimes:
    """Times of each request's last transfer, as columns by request number: int64[n] in ns, 0 for a stage never reached.

    prefill: int32[n], engine that computes the prompt, -1 for none.
    sent_ns, admitted_ns, computed_ns: when the prompt arrived there, was admitted and was computed.
    offered_ns: when the engine that answers received the offer.
    asked_ns: when that engine had pages for the KV.
    begin_ns, end_ns: when the links carried the KV.
    arrived_ns: when the scheduler received it.
    """

    def __init__(self, requests: int) -> None:
        self.prefill = np.full(requests, -1, np.int32)
        columns = [np.zeros(requests, np.int64) for _ in range(8)]
        self.sent_ns, self.admitted_ns, self.computed_ns, self.offered_ns = columns[:4]
        self.asked_ns, self.begin_ns, self.end_ns, self.arrived_ns = columns[4:]
        self.counters: Counter[str] = Counter()
        self.wires: list[dict[str, float]] = []
        self.moved_tokens = 0
        self._half: dict[int, int] = {}

    def sent(self, index: int, number: int, engine: int, now: int) -> None:
        """The prompt of request `index` arrives at a prefill engine, under `number`."""
        self._half[number] = index
        self.prefill[index] = engine
        self.sent_ns[index] = now
        for column in (self.admitted_ns, self.computed_ns, self.offered_ns, self.asked_ns):
            column[index] = 0
        for column in (self.begin_ns, self.end_ns, self.arrived_ns):
            column[index] = 0

    def computed(self, finish: Finish) -> None:
        """Record the end of a prompt on its prefill engine."""
        index = self._half.pop(finish.number, None)
        if index is not None and finish.reason != "abort":
            self.admitted_ns[index], self.computed_ns[index] = finish.admitted_ns, finish.finished_ns

    def event(self, event: Event, now: int) -> None:
        """Record an event that is applied to the scheduler of an engine that answers."""
        if isinstance(event, KvAvailable) and event.tokens:
            self.offered_ns[event.number] = now
        elif isinstance(event, KvLoaded):
            self.arrived_ns[event.number] = now

    def read(self, load: Load, transfer: Transfer, tokens: int) -> None:
        """Record that the KV of a request, `tokens` tokens, was read."""
        self.begin_ns[load.number], self.end_ns[load.number] = transfer.begin_ns, transfer.end_ns
        self.moved_tokens += tokens

    def count(self, node: SimPeer) -> None:
        """Add the counters of an engine's state machines over one life."""
        self.counters.update(node.decode_peer.counters)
        self.counters.update({name: number for name, number in node.prefill_peer.counters.items() if number})


def quantiles_s(begin_ns: Int64Array, end_ns: Int64Array) -> dict[str, float] | None:
    """Mean, p50, p99 and max of the spans with both ends, in seconds; None if there is none."""
    known = (begin_ns > 0) & (end_ns >= begin_ns)
    if not known.any():
        return None
    spans: Float64Array = (end_ns - begin_ns)[known] / NS_PER_S
    found = {"mean": float(spans.mean())}
    return found | {name: float(np.quantile(spans, share)) for name, share in SHARES}


def transfer_figures(transfers: TransferTimes, sim_seconds: float) -> dict[str, Any]:
    """The figures as JSON. Times in seconds, shares from 0 to 1; None where nothing was moved."""
    seconds = max(sim_seconds, 1e-9)
    return {
        "asked": int((transfers.prefill >= 0).sum()),
        "transferred": transfers.counters["transferred"],
        "failed": {
            name.removeprefix("failed: "): number
            for name, number in sorted(transfers.counters.items())
            if name.startswith("failed: ")
        },
        "moved_tokens": transfers.moved_tokens,
        "prefill_queue_s": quantiles_s(transfers.sent_ns, transfers.admitted_ns),
        "prefill_s": quantiles_s(transfers.admitted_ns, transfers.computed_ns),
        "decode_queue_s": quantiles_s(transfers.offered_ns, transfers.asked_ns),
        "link_queue_s": quantiles_s(transfers.asked_ns, transfers.begin_ns),
        "transfer_s": quantiles_s(transfers.asked_ns, transfers.arrived_ns),
        "links": [
            {
                "engine": wire["engine"],
                "out": wire["out_ns"] / NS_PER_S / seconds,
                "in": wire["in_ns"] / NS_PER_S / seconds,
                "sent_bytes": int(wire["sent"]),
                "received_bytes": int(wire["received"]),
            }
            for wire in transfers.wires
        ],
    }
