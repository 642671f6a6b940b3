"""Policy `adaptive` in virtual time: runs a lookahead every few seconds and changes the policy, as a server does."""

from tokenyard.base import Finish, Request, SchedulerSettings
from tokenyard.policy.adaptive import AdaptiveOptions, CandidateSelector, LookaheadPacer
from tokenyard.scheduler.lookahead_state import RequestArrived, RequestEnded
from tokenyard.sim.engine.forecast import RecentTraffic
from tokenyard.sim.engine.lookahead import look_ahead
from tokenyard.sim.engine.sim_scheduler import SimScheduler

FORK_S, REQUEST_S, STEP_S = 0.02, 0.0006, 0.00002
"""CPU time that is counted for each candidate of a look, and for each of its requests and steps. It is a fixed
estimate, so looks come about as often as in a server, and at the same times on any machine.
"""


class AdaptiveDriver:
    """Runs the lookahead for one replica. A lookahead takes no virtual time."""

    def __init__(self, settings: SchedulerSettings, replica: SimScheduler) -> None:
        self._replica = replica
        self._adaptive_options = AdaptiveOptions.of(settings)
        self.selector = CandidateSelector(self._adaptive_options.candidates)
        self._traffic = RecentTraffic()
        self._blocks = not settings.disable_radix_cache
        self._pacer = LookaheadPacer(self._adaptive_options, replica.now)
        replica.scheduler.apply(self.selector.begin(), replica.now)

    def submitted(self, request: Request, now: int) -> None:
        """Record a request that is submitted to the replica."""
        self._pacer.next_ns = max(self._pacer.next_ns, now)
        self._traffic.take(RequestArrived.of(request, now, blocks=self._blocks))

    def finished(self, finish: Finish) -> None:
        """Record the end of a request."""
        self._traffic.take(RequestEnded.of(finish))

    def advance(self, until: int, *, to_arrival: bool) -> None:
        """`SimScheduler.advance`, with the lookaheads that are due while there is work."""
        while self._pacer.next_ns < until:
            self._replica.advance(self._pacer.next_ns)
            if not self._replica.scheduler.has_work:
                break
            self._run_lookahead(self._pacer.next_ns)
        self._replica.advance(until, to_arrival=to_arrival)

    @property
    def due_ns(self) -> int:
        """See `SimScheduler.due_ns`. While there is work, a lookahead can be due as well."""
        replica = self._replica
        return min(replica.due_ns, self._pacer.next_ns) if replica.scheduler.has_work else replica.due_ns

    def turn(self) -> None:
        """Run a lookahead if one is due, else run the replica's turn."""
        now = self._pacer.next_ns
        if now > self._replica.due_ns or not self._replica.scheduler.has_work:
            self._replica.turn()
            return
        self._replica.advance(now)
        if self._replica.scheduler.has_work:
            self._run_lookahead(now)

    def advance_to(self, now: int) -> None:
        """Advance the replica to `now`, the time of an external event."""
        self._replica.advance_to(now)

    def _run_lookahead(self, now: int) -> None:
        moment, selector = self._replica.scheduler.lookahead_state(now), self.selector
        scores = look_ahead(self._traffic, moment, selector.wanted(), self._adaptive_options.horizon_s, selector.looks)
        event = selector.take(scores, now)
        if event is not None:
            self._replica.scheduler.apply(event, now)
        cpu_s = sum(FORK_S + REQUEST_S * score.requests + STEP_S * score.steps for score in scores)
        self._pacer.record_lookahead(now, cpu_s)
