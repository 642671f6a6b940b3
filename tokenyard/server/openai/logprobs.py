"""Log-probabilities in the shapes of the APIs, and tokens as strings and bytes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenyard.base import TokenLogprobs

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's table by which byte-level BPE writes bytes as printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenNames:
    """Single tokens as bytes and text. Without a tokenizer, the text of a token is its id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(getattr(tokenizer, "decoder", None))
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """The token's bytes, which may be incomplete UTF-8 characters."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def text(self, token: int) -> str:
        """The token's bytes as text, with replacement characters for incomplete UTF-8 characters."""
        return self.raw(token).decode("utf-8", "replace")

    def _spell(self, token: int) -> bytes:
        """Compute the bytes of a token that is not cached yet."""
        piece = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if piece is None:
            return f"token_id:{token}".encode()
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: one entry per output token."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": logprob, "bytes": list(names.raw(token))}

    content = []
    for entry in entries:
        tops = zip(entry.top_tokens, entry.top_logprobs, strict=True)
        content.append({**item(entry.token, entry.logprob), "top_logprobs": [item(*top) for top in tops]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], names: TokenNames, *, offset: int = 0, first_token: int | None = None
) -> dict[str, Any]:
    """The `logprobs` object of a text completion, as four parallel lists.

    offset: where the first token's text begins. Below 0 for a token such as BOS that is not part of the text; its
        offset is reported as 0.
    first_token: the prompt's first token. It has no log-probability and gets null, as in OpenAI's API.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if first_token is not None:
        tokens.append(names.text(first_token))
        logprobs.append(None)
        tops.append(None)
        offsets.append(max(0, offset))
        offset += len(tokens[0])
    for entry in entries:
        tokens.append(names.text(entry.token))
        logprobs.append(entry.logprob)
        tops.append(_top_by_text(entry, names))
        offsets.append(max(0, offset))
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _top_by_text(entry: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """Top tokens by text, and the token itself. Of two tokens with the same text the likelier one counts."""
    top: dict[str, float] = {}
    for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True):
        top.setdefault(names.text(token), logprob)
    top.setdefault(names.text(entry.token), entry.logprob)
    return top


def native_logprobs(
    entries: Sequence[TokenLogprobs], names: TokenNames, *, with_text: bool
) -> tuple[list[Any], list[Any]]:
    """(token log-probabilities, top ones) in SGLang's shape: [logprob, token id, text or null] each."""

    def item(token: int, logprob: float) -> list[Any]:
        return [logprob, token, names.text(token) if with_text else None]

    own = [item(entry.token, entry.logprob) for entry in entries]
    top = [[item(*pair) for pair in zip(entry.top_tokens, entry.top_logprobs, strict=True)] for entry in entries]
    return own, top
