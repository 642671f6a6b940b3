"""When a decode engine looks up and dials prefill engines, again and again while one is not connected."""

from dataclasses import dataclass, field

from tokenyard.base import NS_PER_S

MIN_BACKOFF_NS = NS_PER_S // 2
MAX_BACKOFF_NS = 10 * NS_PER_S
WARN_INTERVAL_NS = 60 * NS_PER_S
"""Time between two warnings about the same problem with the same engine."""


@dataclass(slots=True)
class _Engine:
    """An engine that is looked up by its HTTP address."""

    addresses: set[str] = field(default_factory=set)
    """Where its ranks were found."""
    due_ns: int = 0
    """When it may be looked up again."""
    backoff_ns: int = MIN_BACKOFF_NS
    """How long after the next lookup it may not be looked up."""


class RedialSchedule:
    """The engines `urls` with the addresses of their ranks, and single addresses that requests want."""

    def __init__(self, urls: list[str]) -> None:
        self._engines = {url: _Engine() for url in urls}
        self._connected: set[str] = set()
        self._wanted: dict[str, None] = {}
        self._warned_ns: dict[tuple[str, str], int] = {}

    def want(self, address: str) -> bool:
        """A request needs an address; whether that has to be dialled."""
        if address in self._connected:
            return False
        self._wanted[address] = None
        return True

    def take_wanted(self) -> list[str]:
        """The addresses to dial now, each once. Some were dialled since a request wanted them."""
        wanted = [address for address in self._wanted if address not in self._connected]
        self._wanted.clear()
        return wanted

    def due(self, now: int) -> list[str]:
        """The engines to look up at `now` (ns): those with a rank that is not connected, after their backoff.

        The backoff doubles with each lookup, until the engine was stable for the longest backoff.
        """
        found = []
        for url, engine in self._engines.items():
            complete = bool(engine.addresses) and engine.addresses <= self._connected
            if complete or now < engine.due_ns:
                continue
            if engine.due_ns and now - engine.due_ns > MAX_BACKOFF_NS:
                engine.backoff_ns = MIN_BACKOFF_NS
            engine.due_ns = now + engine.backoff_ns
            engine.backoff_ns = min(2 * engine.backoff_ns, MAX_BACKOFF_NS)
            found.append(url)
        return found

    def found(self, url: str, addresses: list[str]) -> list[str]:
        """An engine's ranks are at `addresses`; returns those to dial."""
        self._engines[url].addresses = set(addresses)
        return [address for address in addresses if address not in self._connected]

    def connected(self, address: str) -> None:
        """An address is connected."""
        self._connected.add(address)

    def lost(self, address: str, why: str, now: int) -> bool:
        """The connection to an address has ended; whether to warn about it."""
        self._connected.discard(address)
        if now - self._warned_ns.get((address, why), -WARN_INTERVAL_NS) < WARN_INTERVAL_NS:
            return False
        self._warned_ns = {(address, why): now}
        return True
