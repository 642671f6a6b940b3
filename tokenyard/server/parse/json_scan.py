"""Incremental JSON scanning: the end of a value, and calls written as objects. Text is passed on unchanged."""

import re
from dataclasses import dataclass, field

from tokenyard.server.parse.argument_types import loads_lenient

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
SPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True)
class ValueScan:
    """Finds the end of one JSON value. Invalid JSON ends at a "<" outside of strings, where a marker begins."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    begun: bool = False
    done: bool = False

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from `at`; returns the end of the part that belongs to the value, and sets `done` at its end.

        A number or word has no end marker: `done` is set at the first character that cannot belong to it.
        """
        size = len(text)
        while at < size and not self.done:
            if self.in_string:
                at = self._in_string(text, at)
            elif not self.depth and self.begun:
                at = self._in_word(text, at)
            else:
                at = self._outside(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self.escaped:
            self.escaped = False
            return at + 1
        match = _IN_STRING.search(text, at)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self.escaped = True
        else:
            self.in_string = False
            self.done = self.depth == 0
        return match.end()

    def _in_word(self, text: str, at: int) -> int:
        while at < len(text) and text[at] not in ',]}{["<' and text[at] not in SPACE:
            at += 1
        self.done = at < len(text)
        return at

    def _outside(self, text: str, at: int) -> int:
        if not self.begun:
            self.begun = True
            if text[at] not in '"{[':
                self.done = text[at] in ",]}"
                return at
        match = _STRUCTURE.search(text, at)
        if match is None:
            return len(text)
        if match[0] == "<":
            self.done = True
            return match.start()
        if match[0] == '"':
            self.in_string = True
        elif match[0] in "{[":
            self.depth += 1
        else:
            self.depth -= 1
            self.done = self.depth == 0
        return match.end()


@dataclass(slots=True)
class ToolCallPiece:
    """Output of `ObjectScan`: the name, once it is known, or more text of the arguments."""

    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ObjectScan:
    """Scans `{"name": ..., "arguments": {...}}`, with its keys in any order, and streams the arguments.

    The arguments may also be named parameters, and may be a string that contains JSON.

    name: the tool's name, once it is known.
    call_id: the call's id, "" for none.
    broken: the text is not such an object.
    done: the object is complete.
    """

    name: str | None = None
    call_id: str = ""
    broken: bool = False
    done: bool = False
    _state: str = "open"
    _key: str = ""
    _text: str = ""
    _held: str = ""
    _passes: bool = False
    _value: ValueScan = field(default_factory=ValueScan)

    def scan(self, text: str, at: int, out: list[ToolCallPiece]) -> int:
        """Scan `text` from `at` and append to `out`; returns where the scan stopped."""
        size = len(text)
        while at < size and not self.done and not self.broken:
            if self._state in ("key", "value"):
                at = self._read_value(text, at, out)
            elif text[at] in SPACE:
                at += 1
            else:
                self._take_mark(text[at])
                at += not (self._state == "value" or self.broken)
        return at

    def _take_mark(self, mark: str) -> None:
        """Consume a character between keys and values; before a value it is the value's first character."""
        match (self._state, mark):
            case ("open", "{"):
                self._state = "first"
            case ("first" | "next", '"'):
                self._state, self._text, self._value = "key", '"', ValueScan(in_string=True, begun=True)
            case ("first" | "after", "}"):
                self.done = True
                self.broken = not self.name
            case ("colon", ":"):
                self._state = "before"
            case ("before", _):
                self._state, self._text, self._value = "value", "", ValueScan()
                self._passes = mark == "{" and self._key in ARGUMENT_KEYS
            case ("after", ","):
                self._state = "next"
            case _:
                self.broken = True

    def _read_value(self, text: str, at: int, out: list[ToolCallPiece]) -> int:
        end = self._value.scan(text, at)
        piece = text[at:end]
        if self._state == "value" and self._passes:
            self._pass_on(piece, out)
        else:
            self._text += piece
        if self._value.done:
            self._end_value(out)
        return end

    def _pass_on(self, piece: str, out: list[ToolCallPiece]) -> None:
        """Pass on arguments immediately if the name is known; hold them back otherwise."""
        if self.name is None:
            self._held += piece
        elif piece:
            out.append(ToolCallPiece(arguments=piece))

    def _end_value(self, out: list[ToolCallPiece]) -> None:
        if self._state == "key":
            self._key, self._state = _string(self._text) or "", "colon"
            return
        self._state = "after"
        if self._key == "name":
            name = _string(self._text)
            if not name or self.name is not None:
                self.broken = True
                return
            self.name = name
            out.append(ToolCallPiece(name=name, arguments=self._held))
        elif self._key in ARGUMENT_KEYS and not self._passes:
            self._pass_on(plain_arguments(self._text), out)
        elif self._key == "id":
            self.call_id = _string(self._text) or ""


def plain_arguments(text: str) -> str:
    """The JSON text of arguments that are not an object: a string is unquoted, null means no arguments."""
    try:
        value = loads_lenient(text)
    except (ValueError, RecursionError):
        return text.strip()
    return "" if value is None else value.strip() if isinstance(value, str) else text.strip()


def _string(text: str) -> str | None:
    """The content of a JSON string, None for anything else."""
    try:
        value = loads_lenient(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
