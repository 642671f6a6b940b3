"""How many lines of batches an engine may have open, so that there is room for those who arrive. Pure."""

SHARE = 0.5
"""The part of rows and of the KV pool that lines may have."""

MAX_USED_SHARE = 0.75
"""Lines start only while less than this share of the KV pool is used by all."""

FIRST_SHARE = 1 / 8
"""The part of the KV pool that a line is taken to need before one has ended."""

SMOOTHING = 0.2
"""Weight of the line that ended last in the mean of their tokens."""

DEFAULT_ROWS = 256
"""Rows of an engine that does not report its own."""

LINES_AT_ONCE = 16
"""Most lines that start in one turn."""


class LineBudget:
    """The lines that fit, learned from the sizes of those that have ended."""

    def __init__(self) -> None:
        self._tokens_of_line = 0.0

    def line_ended(self, tokens: int) -> None:
        """A line has ended, with so many tokens of prompt and answer."""
        before = self._tokens_of_line or tokens
        self._tokens_of_line = before + SMOOTHING * (tokens - before)

    def max_lines(self, rows: int, pool_tokens: int, used_tokens: float) -> int:
        """Lines that may be open at an engine.

        rows: requests that it runs at a time, 0 if unknown.
        pool_tokens, used_tokens: size of its KV pool, 0 if unknown, and how much of it is used.
        """
        most = max(1, int(SHARE * (rows or DEFAULT_ROWS)))
        if not pool_tokens:
            return most
        if used_tokens > MAX_USED_SHARE * pool_tokens:
            return 0
        fit = int(SHARE * pool_tokens / (self._tokens_of_line or FIRST_SHARE * pool_tokens))
        return min(most, max(fit, 1))
