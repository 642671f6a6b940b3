"""Which ids belong to which numbers and schedulers, for requests that are open or ended not long ago."""

from collections import OrderedDict

from tokenyard.engine.frontend.streams import Stream

MAX_RECENT_REQUESTS = 4096


class RecentRequests:
    """The latest requests by id and by number. An id that is reused refers to its latest request."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, tuple[list[int], int]] = OrderedDict()
        self._turns: dict[str, tuple[str, int]] = {}
        self._rids: OrderedDict[int, str] = OrderedDict()

    def add(self, stream: Stream) -> None:
        """Add or update a request that is new or has moved to another scheduler; remove the oldest beyond the limit."""
        self._places.pop(stream.rid, None)
        self._places[stream.rid] = stream.numbers, stream.client.source
        self._rids.update(dict.fromkeys(stream.numbers, stream.rid))
        self._turns.pop(stream.rid, None)
        if stream.request.session:
            self._turns[stream.rid] = stream.request.session, stream.request.turn
        if len(self._places) > MAX_RECENT_REQUESTS:
            self._turns.pop(self._places.popitem(last=False)[0], None)
        while len(self._rids) > MAX_RECENT_REQUESTS + stream.answers:
            self._rids.popitem(last=False)

    def rids(self) -> list[str]:
        """All ids, oldest first."""
        return list(self._places)

    def numbers(self, rid: str) -> list[int]:
        """The numbers of a request's answers; none if it is not known."""
        place = self._places.get(rid)
        return [] if place is None else place[0]

    def source(self, rid: str) -> int:
        """The process number of the scheduler that has or had a request; -1 if it is not known."""
        place = self._places.get(rid)
        return -1 if place is None else place[1]

    def turn(self, rid: str) -> tuple[str, int] | None:
        """The session and the index of the turn that a request is; None if it is none or not known."""
        return self._turns.get(rid)

    def rid(self, number: int) -> str | None:
        """The id of the request that an answer belongs to; None if it is not known."""
        return self._rids.get(number)
