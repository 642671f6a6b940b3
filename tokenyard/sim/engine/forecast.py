"""A forecast of the next seconds of a running scheduler: open requests, future arrivals, and the cache.

It differs from the real future:

- Output lengths are unknown. Each is drawn from the latest answers; for a running request, from those longer than its
  output so far.
- Future requests are drawn from those of the last minute, recent ones more often, with their shared prefixes. A request
  for several answers counts as a request for one.
- The cache holds the prompts of the latest requests to end, without their answers, up to the number of tokens that it
  held. Prompts are known in whole blocks of 128 tokens.
- A request whose prompt is half computed waits, with the computed half in the cache. A running request counts as a
  prompt of the tokens that it has computed.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tokenyard.base import NS_PER_MS, NS_PER_S, Float64Array, Int32Array, Int64Array, Request, SamplingParams, Slo
from tokenyard.cost import LinearCost, unloaded_prefill_s
from tokenyard.policy import NO_DEADLINE, NO_PRIORITY
from tokenyard.scheduler.lookahead_state import LOOKAHEAD_BLOCK_TOKENS, LookaheadState, RequestArrived, RequestEnded
from tokenyard.scheduler.row_state import RowState
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, UNIQUE_STREAM, stream_tokens

TRAFFIC_WINDOW_NS = 60 * NS_PER_S
HALF_LIFE_S = 20.0
"""An arrival this long ago is drawn half as often as one now."""

MAX_ARRIVALS = 4096
MAX_ENDED = 512
MAX_OPEN = 20_000
DEFAULT_OUTPUT_TOKENS = 200
NO_BLOCKS = np.empty(0, np.int64)


class RecentTraffic:
    """The requests of the last minute, the open requests, and the latest ones to end."""

    def __init__(self) -> None:
        self.arrivals: deque[RequestArrived] = deque(maxlen=MAX_ARRIVALS)
        self.open: dict[int, RequestArrived] = {}
        self.ended: deque[tuple[RequestArrived | None, RequestEnded]] = deque(maxlen=MAX_ENDED)
        self._first_ns: int | None = None

    def take(self, event: RequestArrived | RequestEnded) -> None:
        """Record the arrival or the end of a request."""
        if isinstance(event, RequestEnded):
            self.ended.append((self.open.pop(event.number, None), event))
            return
        self._first_ns = event.arrival_ns if self._first_ns is None else self._first_ns
        self.arrivals.append(event)
        for number in range(event.number, event.number + event.answers):
            self.open[number] = event
        while len(self.open) > MAX_OPEN:
            del self.open[next(iter(self.open))]

    def forget(self, now: int) -> None:
        """Drop arrivals that are older than a minute."""
        while self.arrivals and self.arrivals[0].arrival_ns < now - TRAFFIC_WINDOW_NS:
            self.arrivals.popleft()

    def since_ns(self) -> int:
        """The time (ns) since which every arrival of the last minute is known."""
        if self._first_ns is None or len(self.arrivals) == MAX_ARRIVALS:
            return self.arrivals[0].arrival_ns
        return self._first_ns

    def outputs(self) -> Int64Array:
        """Lengths of the latest complete answers, in ascending order; a guess if there is none."""
        found = [ended.output_tokens for _, ended in self.ended if ended.whole]
        return np.array(sorted(found) or [DEFAULT_OUTPUT_TOKENS], np.int64)


@dataclass(slots=True)
class SampledFuture:
    """The future that all candidates share: requests as columns by their number in it, and the cached prompts.

    answers: int64[m], lengths of earlier answers.
    running, waiting: number of running and of waiting requests.
    requests: the running requests, then the waiting ones, then future arrivals.
    due_ns: when the first token of each request is due.
    tpot_ns: target time per further token.
    written: output tokens so far.
    first_ns: when the first token came, 0 if it has not.
    outputs: output tokens still to come.
    cached: the prompts in the cache.
    """

    answers: Int64Array
    running: int = 0
    waiting: int = 0
    requests: list[Request] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)
    tpot_ns: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    cached: list[Int32Array] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)


def forecast(traffic: RecentTraffic, state: LookaheadState, horizon_s: float, number: int) -> SampledFuture:
    """Draw future number `number` of the `horizon_s` seconds after `state`. Equal arguments give equal futures."""
    return _Forecaster(traffic, state, horizon_s, number).future()


class _Forecaster:
    """Draws one future."""

    def __init__(self, traffic: RecentTraffic, state: LookaheadState, horizon_s: float, number: int) -> None:
        traffic.forget(state.now)
        self._traffic, self._state, self._horizon_s = traffic, state, horizon_s
        self._settings = state.settings
        self._rng = np.random.default_rng(number)
        self._outputs = traffic.outputs()
        self._cost = LinearCost(state.terms)
        self._unloaded_ns: dict[int, float] = {}
        self._future = SampledFuture(self._outputs)

    def future(self) -> SampledFuture:
        """The drawn future."""
        future, rows = self._future, self._state.rows
        for index in np.flatnonzero(rows["state"] == RowState.RUNNING).tolist():
            self._add_running({name: int(column[index]) for name, column in rows.items()})
        future.running = len(future)
        for index in np.flatnonzero(rows["state"] != RowState.RUNNING).tolist():
            self._add_waiting({name: int(column[index]) for name, column in rows.items()})
        future.waiting = len(future) - future.running
        for at_ns, template in self._draw_arrivals():
            self._add_arrival(at_ns, template)
        self._fill_cache()
        return future

    def _add_running(self, row: dict[str, int]) -> None:
        written = row["planned"] - row["prompt_tokens"]
        # The last chunk may still be in flight; then the first token comes now.
        first_ns = row["first_token_ns"] or self._state.now
        self._add_open(row, row["planned"], written, first_ns)

    def _add_waiting(self, row: dict[str, int]) -> None:
        written = row["known"] - row["prompt_tokens"]
        ids = self._add_open(row, row["known"], written, row["first_token_ns"])
        if row["planned"]:
            self._future.cached.append(ids[: row["planned"]])

    def _add_open(self, row: dict[str, int], tokens: int, written: int, first_ns: int) -> Int32Array:
        """Add an open request as a prompt of `tokens` tokens, `written` of which belong to its answer."""
        arrived = self._traffic.open.get(row["number"])
        ids = self._prompt(arrived.blocks if arrived is not None else NO_BLOCKS, tokens, row["prompt_tokens"])
        most = row["limit"] - tokens + 1
        arrival_ns, deadline_ns = row["arrival_ns"], row["deadline_ns"]
        self._add(
            ids,
            most,
            arrival_ns,
            priority=None if row["priority"] == NO_PRIORITY else row["priority"],
            arrived=arrived,
            prompt_tokens=row["prompt_tokens"],
            deadline_ns=0 if deadline_ns == NO_DEADLINE else deadline_ns - arrival_ns,
            targets_ns=(row["ttft_ns"], row["tpot_ns"]),
            written=written,
            first_ns=first_ns,
        )
        return ids

    def _add_arrival(self, at_ns: int, template: RequestArrived) -> None:
        shared = template.blocks[: self._shared_blocks(template)]
        ids = self._prompt(shared, template.prompt_tokens, template.prompt_tokens)
        self._add(
            ids,
            template.max_new_tokens,
            at_ns,
            priority=template.priority,
            arrived=template,
            prompt_tokens=template.prompt_tokens,
            deadline_ns=template.deadline_ns,
            targets_ns=(template.ttft_ns, template.tpot_ns),
        )

    def _add(
        self,
        ids: Int32Array,
        most: int,
        arrival_ns: int,
        *,
        priority: int | None,
        arrived: RequestArrived | None,
        prompt_tokens: int,
        deadline_ns: int,
        targets_ns: tuple[int, int],
        written: int = 0,
        first_ns: int = 0,
    ) -> None:
        """Add a request with a deadline (ns after arrival) and targets (ttft, tpot) in ns; 0 means none."""
        future, number = self._future, len(self._future)
        most, (ttft_ns, tpot_ns) = max(most, 1), targets_ns
        if not ttft_ns:
            ttft_ns = deadline_ns or self._class_ttft_ns(prompt_tokens)
        request = Request(
            number=number,
            rid="",
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=most, temperature=0.0, seed=number),
            arrival_ns=arrival_ns,
            priority=priority,
            service_class=(arrived.service_class or None) if arrived is not None else None,
            tenant=arrived.tenant if arrived is not None else "",
            deadline_ns=deadline_ns or None,
            # The class's target depends on the original prompt, which may be shorter than the prompt here.
            slo=Slo(ttft_ns, tpot_ns or None),
        )
        future.requests.append(request)
        future.due_ns.append(arrival_ns + (min(ttft_ns, deadline_ns) if deadline_ns else ttft_ns))
        future.tpot_ns.append(tpot_ns or round(self._settings.slo_tpot_ms * NS_PER_MS))
        future.written.append(written)
        future.first_ns.append(first_ns)
        future.outputs.append(min(self._draw_rest(written), most))

    def _draw_rest(self, written: int) -> int:
        """Output tokens still to come after `written`. An answer longer than all others is predicted to double.

        The draw is always made, so that later draws do not depend on this one.
        """
        share, outputs = float(self._rng.random()), self._outputs
        longer = int(np.searchsorted(outputs, written, side="right"))
        if longer == len(outputs):
            return max(written, 1)
        return int(outputs[longer + int(share * (len(outputs) - longer))]) - written

    def _draw_arrivals(self) -> list[tuple[int, RequestArrived]]:
        """Arrivals at the weighted rate of the last minute, evenly spaced, each a copy of a recent one."""
        traffic, now = self._traffic, self._state.now
        if not traffic.arrivals:
            return []
        ages = np.array([now - one.arrival_ns for one in traffic.arrivals]) / NS_PER_S
        weights: Float64Array = 0.5 ** (ages / HALF_LIFE_S)
        span_s = min(max(now - traffic.since_ns(), NS_PER_S), TRAFFIC_WINDOW_NS) / NS_PER_S
        weighted_s = (1.0 - 0.5 ** (span_s / HALF_LIFE_S)) * HALF_LIFE_S / np.log(2.0)
        count = int(self._rng.poisson(min(weights.sum() / weighted_s * self._horizon_s, MAX_ARRIVALS)))
        times = np.sort(self._rng.uniform(0.0, self._horizon_s, count))
        chosen = self._rng.choice(len(ages), count, p=weights / weights.sum())
        return [
            (now + round(time * NS_PER_S), traffic.arrivals[index])
            for time, index in zip(times.tolist(), chosen.tolist(), strict=True)
        ]

    def _shared_blocks(self, arrived: RequestArrived) -> int:
        """Number of leading blocks that another request of the last minute had too."""
        alone = [block not in self._common_blocks for block in arrived.blocks.tolist()]
        return alone.index(True) if True in alone else len(alone)

    @cached_property
    def _common_blocks(self) -> set[int]:
        """Blocks that several requests of the last minute had."""
        blocks, times = np.unique(np.concatenate([one.blocks for one in self._traffic.arrivals]), return_counts=True)
        return set(blocks[times > 1].tolist())

    def _prompt(self, blocks: Int64Array, tokens: int, prompt_tokens: int) -> Int32Array:
        """Token ids of a prompt that begins with `blocks`, continues with unique ids, and ends with its own answer."""
        number = len(self._future)
        shared = min(len(blocks) * LOOKAHEAD_BLOCK_TOKENS, tokens)
        ids = np.empty(tokens, np.int32)
        streams = np.repeat(blocks, LOOKAHEAD_BLOCK_TOKENS)[:shared]
        ids[:shared] = stream_tokens(streams, np.arange(shared) % LOOKAHEAD_BLOCK_TOKENS)
        ids[shared:prompt_tokens] = stream_tokens(UNIQUE_STREAM + number, np.arange(shared, min(prompt_tokens, tokens)))
        ids[prompt_tokens:] = stream_tokens(ANSWER_STREAM + number, np.arange(max(tokens - prompt_tokens, 0)))
        return ids

    def _class_ttft_ns(self, prompt_tokens: int) -> int:
        """The TTFT target of a request without its own."""
        unloaded_ns = self._unloaded_ns.get(prompt_tokens)
        if unloaded_ns is None:
            unloaded_ns = unloaded_prefill_s(self._cost, prompt_tokens) * NS_PER_S
            self._unloaded_ns[prompt_tokens] = unloaded_ns
        settings = self._settings
        return round(max(settings.slo_ttft_ms * NS_PER_MS, settings.slo_ttft_scale * unloaded_ns))

    def _fill_cache(self) -> None:
        """Fill the cache with the prompts of the latest requests to end, in the order in which they ended."""
        room, found, seen = self._state.cached_tokens, [], set[int]()
        for arrived, ended in reversed(self._traffic.ended):
            if room <= 0:
                break
            if arrived is None or not ended.whole:
                continue
            blocks = arrived.blocks
            new = sum(block not in seen for block in blocks.tolist())
            seen.update(blocks.tolist())
            room -= new * LOOKAHEAD_BLOCK_TOKENS + arrived.prompt_tokens % LOOKAHEAD_BLOCK_TOKENS
            found.append(self._prompt(blocks, len(blocks) * LOOKAHEAD_BLOCK_TOKENS, arrived.prompt_tokens))
        self._future.cached = found[::-1] + self._future.cached
