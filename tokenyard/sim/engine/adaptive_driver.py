"""Policy `adaptive` in virtual time: looks ahead every few seconds and changes the policy as a server would."""

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
    """Looks ahead for one replica. Looks take no virtual time."""

    def __init__(self, settings: SchedulerSettings, replica: SimScheduler) -> None:
        self._replica = replica
        self._adaptive_options = AdaptiveOptions.of(settings)
        self.selector = CandidateSelector(self._adaptive_options.candidates)
        self._traffic = RecentTraffic()
        self._blocks = not settings.disable_radix_cache
        self._pacer = LookaheadPacer(self._adaptive_options, replica.now)
        replica.scheduler.apply(self.selector.begin(), replica.now)

    def submitted(self, request: Request, now: int) -> None:
        """A request was given to the replica."""
        self._pacer.next_ns = max(self._pacer.next_ns, now)
        self._traffic.take(RequestArrived.of(request, now, blocks=self._blocks))

    def finished(self, finish: Finish) -> None:
        """A request has ended."""
        self._traffic.take(RequestEnded.of(finish))

    def advance(self, until: int, *, to_arrival: bool) -> None:
        """`SimScheduler.advance`, with the looks that are due while there is work."""
        while self._pacer.next_ns < until:
            self._replica.advance(self._pacer.next_ns)
            if not self._replica.scheduler.has_work:
                break
            self._run_lookahead(self._pacer.next_ns)
        self._replica.advance(until, to_arrival=to_arrival)

    @property
    def due_ns(self) -> int:
        """See `SimScheduler.due_ns`; while there is work a look is due, too."""
        replica = self._replica
        return min(replica.due_ns, self._pacer.next_ns) if replica.scheduler.has_work else replica.due_ns

    def turn(self) -> None:
        """Look if it is time, else let the replica have its turn."""
        now = self._pacer.next_ns
        if now > self._replica.due_ns or not self._replica.scheduler.has_work:
            self._replica.turn()
            return
        self._replica.advance(now)
        if self._replica.scheduler.has_work:
            self._run_lookahead(now)

    def advance_to(self, now: int) -> None:
        """Bring the replica to `now`, at which something from outside happens to it."""
        self._replica.advance_to(now)

    def _run_lookahead(self, now: int) -> None:
        moment, selector = self._replica.scheduler.lookahead_state(now), self.selector
        scores = look_ahead(self._traffic, moment, selector.wanted(), self._adaptive_options.horizon_s, selector.looks)
        event = selector.take(scores, now)
        if event is not None:
            self._replica.scheduler.apply(event, now)
        cpu_s = sum(FORK_S + REQUEST_S * score.requests + STEP_S * score.steps for score in scores)
        self._pacer.record_lookahead(now, cpu_s)
