"""Which ids belong to which numbers, for requests that are open or ended not long ago."""

from collections import OrderedDict

from tokenyard.engine.streams import Stream

MOST_RECENT = 4096


class RecentRequests:
    """The latest requests by id and by number. An id that is used again stands for its latest request."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, list[int]] = OrderedDict()
        self._rids: OrderedDict[int, str] = OrderedDict()

    def add(self, stream: Stream) -> None:
        """A request has come; the oldest one is forgotten if there are too many."""
        self._numbers.pop(stream.rid, None)
        self._numbers[stream.rid] = stream.numbers
        self._rids.update(dict.fromkeys(stream.numbers, stream.rid))
        if len(self._numbers) > MOST_RECENT:
            self._numbers.popitem(last=False)
        while len(self._rids) > MOST_RECENT + stream.answers:
            self._rids.popitem(last=False)

    def rids(self) -> list[str]:
        """All ids, oldest first."""
        return list(self._numbers)

    def numbers(self, rid: str) -> list[int]:
        """The numbers of a request's answers; none if it is not known."""
        return self._numbers.get(rid, [])

    def rid(self, number: int) -> str | None:
        """The id of the request that an answer belongs to; None if it is not known."""
        return self._rids.get(number)
