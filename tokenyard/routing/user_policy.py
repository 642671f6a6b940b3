"""A guard around a user-defined routing policy (`module:Class`), so that its errors affect no request."""

from collections.abc import Callable, Sequence
from operator import index
from traceback import extract_tb

from typing_extensions import override

from tokenyard.base import ConfigError
from tokenyard.policy.priority_function import load_object
from tokenyard.routing.load import TargetLoad
from tokenyard.routing.policies import REASONS, PolicyOptions, PredictedTtft, Ranking, RequestFeatures, RoutePolicy


class GuardedRoutePolicy(RoutePolicy):
    """Passes on the rankings of `inner` as long as they are valid.

    After the first exception or invalid ranking `predicted_ttft` replaces `inner` for good; `failure` says why, and
    `failed` is called with it once. The time that `inner` takes is not bounded.
    """

    def __init__(
        self, options: PolicyOptions, inner: RoutePolicy, path: str, failed: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(options)
        self.name, self.needs_prefix = path, True
        self.failure = ""
        self._inner, self._usual, self._failed = inner, PredictedTtft(options), failed

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        if not self.failure:
            try:
                return _checked(self._inner.rank(request, targets), len(targets))
            except Exception as error:
                self._fail(error)
        return self._usual.rank(request, targets)

    @override
    def sent(self, request: RequestFeatures, target: TargetLoad) -> None:
        if not self.failure:
            try:
                self._inner.sent(request, target)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" in {frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].name})" if frames else ""
        self.failure = f"{self.name} failed: it raised {error!r}{where}"
        if self._failed is not None:
            self._failed(self.failure)


def _checked(ranking: Ranking, count: int) -> Ranking:
    """The ranking as plain numbers. Raises ValueError unless it ranks each of `count` targets once."""
    order, scores = [index(place) for place in ranking.order], [float(score) for score in ranking.scores]
    if sorted(order) != list(range(count)) or len(scores) != count:
        raise ValueError(f"a ranking of {count} targets must name each once and have a score for each, not {order}")
    if ranking.reason not in REASONS:
        raise ValueError(f"the reason is {ranking.reason!r}; it must be one of {', '.join(REASONS)}")
    return Ranking(order, scores, ranking.reason)


def load_route_policy(path: str, options: PolicyOptions, failed: Callable[[str], None] | None = None) -> RoutePolicy:
    """The policy at `module:Class`, guarded. Raises ConfigError if it cannot be imported, made or is no RoutePolicy."""
    found = load_object(path, "routing policy")
    if not (isinstance(found, type) and issubclass(found, RoutePolicy)):
        raise ConfigError(f"routing policy {path}: it is not a subclass of tokenyard.routing.policies.RoutePolicy")
    try:
        inner = found(options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"routing policy {path}: making it failed: {error}") from error
    return GuardedRoutePolicy(options, inner, path, failed)
