"""Arguments as Gemma 4 writes them, `{key:<|"|>text<|"|>,other:[1,true]}`, as JSON."""

import json
from dataclasses import dataclass, field

from tokenyard.server.parse.json_scan import SPACE


@dataclass
class BracesScan:
    """Turns such arguments into JSON as they come in, behind the first brace.

    quote: what stands at both ends of a string, in which nothing is escaped. JSON's strings are understood too.
    done: whether the last brace was closed, or something came that belongs to no value.
    """

    quote: str
    done: bool = False
    _open: list[str] = field(default_factory=lambda: ["{"])
    _key: bool = True
    _word: str = ""
    _string: str = ""
    _escaped: bool = False

    def scan(self, text: str, final: bool) -> tuple[int, str]:
        """Return how much of `text` was read, and the JSON of it. final: whether no more text follows."""
        at, found = 0, ""
        while at < len(text) and not self.done:
            if self._string == self.quote:
                end = text.find(self.quote, at)
                shown = end if end >= 0 else len(text) - (0 if final else self._begun(text[at:]))
                found += json.dumps(text[at:shown], ensure_ascii=False)[1:-1]
                if end < 0:
                    return shown, found
                found, self._string, at = found + '"', "", end + len(self.quote)
            elif self._string:
                found, at = found + self._in_json(text[at]), at + 1
            elif text.startswith(self.quote, at):
                found, self._string, at = found + '"', self.quote, at + len(self.quote)
            elif self.quote.startswith(text[at:]) and not final:
                break
            elif text[at] == "<":
                self.done = True
            else:
                found, at = found + self._outside(text[at]), at + 1
        return at, found

    def _begun(self, text: str) -> int:
        """How many characters at the end of `text` may begin the quote."""
        return next((size for size in range(len(self.quote) - 1, 0, -1) if text.endswith(self.quote[:size])), 0)

    def _in_json(self, char: str) -> str:
        if self._escaped or char != '"':
            self._escaped = char == "\\" and not self._escaped
        else:
            self._string = ""
        return char

    def _outside(self, char: str) -> str:
        match char:
            case '"':
                self._string = char
                return char
            case "{" | "[":
                self._open.append(char)
                self._key = char == "{"
                return char
            case "}" | "]":
                before, opened = self._value(), self._open.pop()
                self.done, self._key = not self._open, False
                return before + ("}" if opened == "{" else "]")
            case ",":
                before, self._key = self._value(), self._open[-1] == "{"
                return before + ", "
            case ":" if self._key:
                word, self._word, self._key = self._word.strip(SPACE), "", False
                return (json.dumps(word, ensure_ascii=False) if word else "") + ": "
        self._word += char
        return ""

    def _value(self) -> str:
        """The JSON of a value without quotes."""
        word, self._word = self._word.strip(SPACE), ""
        try:
            number = json.loads(word) if word else None
            plain = not isinstance(number, float) or number - number == 0
        except ValueError:
            plain = False
        return word if plain else json.dumps(word, ensure_ascii=False)
