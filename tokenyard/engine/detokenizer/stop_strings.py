"""Exact stop strings on text that comes in pieces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was found: the text before it, and which one it was."""

    before: str
    matched: str


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may be the beginning of one.

    Where several end at the same place, the longest one counts. The text held back is the longest end of the input so
    far that begins a stop string, so a match can be split over any number of pieces.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._inner = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""

    def feed(self, piece: str) -> str | StopHit:
        """Add the next piece; return the text that may be shown now, or the hit."""
        text = self._held + piece
        hit = self._find(text)
        if hit is not None:
            self._held = ""
            return hit
        shown = len(text) - self._held_length(text)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return what is still held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> StopHit | None:
        best_end, best = len(text) + 1, ""
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and at + len(stop) < best_end:
                best_end, best = at + len(stop), stop
        return StopHit(text[: best_end - len(best)], best) if best else None

    def _held_length(self, text: str) -> int:
        # The last character alone rules out most text.
        if not text or text[-1] not in self._inner:
            return 0
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
