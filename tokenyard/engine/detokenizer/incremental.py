"""Tokens to text, one token at a time. Incomplete characters are held back."""

from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokenyard.base import Int32Array

CONTEXT_TOKENS = 6
"""Prompt tokens that the decoder sees first, so that the answer's first piece gets its leading space right."""

MAX_HELD_TOKENS = 64
"""Tokens without text (special ones, broken bytes) after which the decoder restarts to stay fast."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one answer as it grows.

    The pieces concatenate to the text of the answer as decoded after its prompt. A character with missing bytes is held
    back until they arrive, or until `flush`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Int32Array,
        skip_special_tokens: bool,
        keep_ids: Collection[int] = (),
    ) -> None:
        """`keep_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and not keep_ids
        self._dropped = _special_ids(tokenizer).difference(keep_ids) if skip_special_tokens and keep_ids else None
        self._shown: list[int] = prompt_ids[-CONTEXT_TOKENS:].tolist()
        self._held: list[int] = []
        # After a prompt that ends inside a character, the decoder would repeat the prompt's text.
        if self._decode(self._shown).endswith(REPLACEMENT):
            self._shown = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=self._skip)

    def add(self, token: int) -> str:
        """Return the text that `token` completes, "" if none."""
        if self._dropped is not None and token in self._dropped:
            return ""
        self._held.append(token)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # the library raises a bare Exception where a token changes text already shown
            return self.flush()
        if piece is None:
            return "" if len(self._held) < MAX_HELD_TOKENS else self.flush()
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """Return the text of all tokens held back, incomplete characters as U+FFFD, and restart after it."""
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._held)
        piece = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        if piece:
            self._shown = [] if piece.endswith(REPLACEMENT) else self._held
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=self._skip)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special)
