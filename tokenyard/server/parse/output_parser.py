"""The streaming parser of a model's text, driven by an `OutputFormat`.

Any split of a text into pieces gives the same message: decisions depend only on the text up to a point, not on where a
piece ends. Text that may still become a marker, and white space that may precede a call, is held back.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tokenyard.server.parse.argument_types import as_json, is_text, parameter_schema
from tokenyard.server.parse.braces import BracesScan
from tokenyard.server.parse.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tokenyard.server.parse.format import OutputFormat, Region
from tokenyard.server.parse.json_scan import SPACE, ObjectScan, ToolCallPiece, ValueScan, plain_arguments
from tokenyard.server.parse.pythonic import ListScan, read_calls

SEPARATORS = SPACE + ",;[]"
PLAIN: dict[str, type[ContentText] | type[ReasoningText]] = {"content": ContentText, "reasoning": ReasoningText}
CALL_KINDS = frozenset({"name", "id", "arguments", "objects", "pythonic", "braces", "key", "value"})


class Searcher:
    """Searches for the markers of a region. `first` finds characters with which any of them begins."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        firsts = "".join(sorted({re.escape(marker[0]) for marker in markers}))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self.pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self.beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._longest = max(map(len, self.beginnings), default=0)

    def held_back(self, text: str) -> int:
        """The number of characters at the end of `text` that may begin a marker."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self.beginnings:
                return size
        return 0


@lru_cache(maxsize=512)
def _searcher(markers: tuple[str, ...]) -> Searcher:
    return Searcher(markers)


class OutputParser:
    """Parses one answer: SGLang's `FunctionCallParser` and `ReasoningParser`, vLLM's tool and reasoning parsers.

    `tools` maps the name of each tool of the request to the schema of its parameters. Without `calls` tool calls stay
    content; without `reasoning` reasoning stays content, with its markers.
    """

    def __init__(
        self,
        form: OutputFormat,
        prompt: str = "",
        *,
        tools: Mapping[str, Any] | None = None,
        calls: bool = True,
        reasoning: bool = True,
    ) -> None:
        self._tools = tools or {}
        self._regions = _cut(form, calls, reasoning)
        self._events: list[Event] = []
        self._text = ""
        self._raw = ""
        self._space = ""
        self._dropped = ""
        self._after_region = False
        self._calls = 0
        self._open_call = ""
        self._name = ""
        self._sent = ""
        self._argument_count = 0
        begin = form.begins_in(prompt)
        self._enter(begin if begin in self._regions else "start")

    def feed(self, text: str) -> list[Event]:
        """Parse more text; returns the events that it completes."""
        # Most pieces are plain text after plain text: nothing is held back and nothing begins.
        kind = self._plain
        held = self._text or self._space or self._after_region
        if kind is not None and text and not held and text[-1] not in SPACE and not self._search.first.search(text):
            return [kind(text)]
        self._text += text
        self._work(final=False)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """End the text; returns what was held back."""
        self._work(final=True)
        if self._open_call:
            self._cut_call()
        elif self._raw and self._region.kind in CALL_KINDS and not self._calls:
            # A call without a name is not a call: its text is content. Behind another call it is one that was cut.
            self._treat_as_content()
        if self._space and not self._after_region and self._region.kind != "reasoning":
            self._events.append(ContentText(self._space))
        events, self._events = self._events, []
        return events

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._calls > 0

    # ---- regions -----------------------------------------------------------------------------------------------

    def _work(self, *, final: bool) -> None:
        """Parse until no more progress is possible."""
        moved = True
        while moved:
            match self._region.kind:
                case "start":
                    moved = self._read_start(final)
                case "arguments":
                    moved = self._read_arguments(final)
                case "objects":
                    moved = self._read_objects(final)
                case "pythonic":
                    moved = self._read_pythonic(final)
                case "braces":
                    moved = self._read_braces(final)
                case _:
                    moved = self._read_marked(final)

    def _enter(self, name: str, marker: str = "") -> None:
        """Enter a region. A call that does not continue in it ends."""
        region = self._regions[name]
        inside = region.kind in ("arguments", "braces", "key", "value") or region.in_call
        if not inside:
            self._end_call()
        if region.kind in ("reasoning", "skip", "header") or region.kind in CALL_KINDS:
            self._dropped = "" if self._after_region else self._space
            self._space, self._after_region = "", True
        if region.kind == "id":
            self._raw += marker
        else:
            self._raw = marker if not self._open_call and region.kind in CALL_KINDS else ""
        self._region = region
        self._capture = ""
        self._scan: Any = None
        self._count_in_region = 0
        self._search = _searcher(tuple(region.edges))
        self._plain = PLAIN.get(region.kind)
        if region.kind == "arguments":
            self._scan = ValueScan()
        elif region.kind == "pythonic":
            self._scan = ListScan()
        elif region.kind == "braces":
            self._scan = BracesScan(region.quote)

    def _read_start(self, final: bool) -> bool:
        """Select the region by the first text that is not white space."""
        text = self._text.lstrip(SPACE)
        if not text:
            if final:
                self._space, self._text = self._space + self._text, ""
            return False
        for marker, target in self._region.edges.items():
            if text.startswith(marker):
                self._text = text[len(marker) :]
                self._enter(target, marker)
                return True
            if marker.startswith(text) and not final:
                return False
        target = self._region.bare.get(text[0], "")
        if target:
            self._space, self._text = self._space + self._text[: len(self._text) - len(text)], text
        self._enter(target or self._region.then)
        return True

    def _read_marked(self, final: bool) -> bool:
        """Parse text up to the next marker, in a region of any kind."""
        text, self._text = self._text, ""
        if self._search.first.search(text) is None:
            self._take(text)
            return False
        match = self._search.pattern.search(text)
        if match is not None:
            self._take(text[: match.start()])
            self._text = text[match.end() :]
            self._leave(match[0])
            return True
        shown = len(text) - (0 if final else self._search.held_back(text))
        self._text = text[shown:]
        self._take(text[:shown])
        return False

    def _take(self, text: str) -> None:
        """Handle text of the region without markers."""
        if not text:
            return
        match self._region.kind:
            case "content":
                self._content(text)
            case "reasoning":
                self._trimmed(text, ReasoningText)
            case "value":
                self._raw_value(text)
            case "name" | "id" | "key" | "header":
                self._capture += text
                self._raw += text

    def _leave(self, marker: str) -> None:
        """Leave the region at a marker."""
        target, captured = self._region.edges[marker], self._capture.strip()
        match self._region.kind:
            case "name":
                name, call_id = _named(captured, self._region.pattern)
                if name:
                    self._name = name
                    if self._regions[target].kind != "id":
                        self._start_call(name, call_id)
                        self._in_json = self._regions[target].kind in ("arguments", "braces")
                else:
                    self._raw += marker
                    self._treat_as_content()
                    return
            case "id":
                self._start_call(self._name, captured)
            case "key":
                self._begin_value(captured)
            case "value":
                self._end_value()
            case "header":
                self._route(captured, marker)
                return
            case "reasoning":
                self._space, self._after_region = "", True
        self._enter(target, marker)

    def _route(self, header: str, marker: str) -> None:
        """Enter the region that a header selects; a header with a tool's name begins a call."""
        for pattern, target in self._region.routes:
            match = re.search(pattern, header)
            if match is not None:
                if match.groups() and self._regions[target].kind == "arguments":
                    self._end_call()
                    self._start_call(match[1], "")
                self._enter(target, marker)
                return
        self._enter(self._region.edges[marker], marker)

    # ---- text --------------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        """Emit content without the white space next to other regions."""
        self._trimmed(text, ContentText)

    def _trimmed(self, text: str, kind: type[ContentText] | type[ReasoningText]) -> None:
        text = self._space + text
        if self._after_region:
            text = text.lstrip(SPACE)
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._after_region = False
            self._events.append(kind(shown))

    # ---- calls -------------------------------------------------------------------------------------------------

    def _start_call(self, name: str, call_id: str) -> None:
        self._events.append(ToolCallStart(self._calls, name, call_id))
        self._calls += 1
        self._count_in_region += 1
        self._open_call, self._sent, self._argument_count = name, "", 0
        self._in_json = True

    def _arguments(self, text: str) -> None:
        if text:
            self._sent = self._sent or text
            self._events.append(ToolCallArguments(self._calls - 1, text))

    def _end_call(self) -> None:
        """End the open call; if it has no arguments, they are `{}`."""
        if not self._open_call:
            return
        if not self._in_json and self._argument_count:
            self._arguments("}")
        elif not self._sent:
            self._arguments("{}")
        self._events.append(ToolCallEnd(self._calls - 1))
        self._open_call = ""

    def _cut_call(self) -> None:
        """End the text within a call: an incomplete value stays incomplete."""
        if self._region.kind in ("key", "value"):
            self._events.append(ToolCallEnd(self._calls - 1))
            self._open_call = ""
        else:
            self._end_call()

    def _begin_value(self, key: str) -> None:
        self._arguments(("{" if not self._argument_count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._argument_count += 1
        self._schema = parameter_schema(self._tools.get(self._open_call), key)
        self._streams = is_text(self._schema)
        self._value_begun = False
        self._value = ""

    def _raw_value(self, text: str) -> None:
        """Handle more of a value. A line break at either end is not part of it."""
        self._value += text
        if not self._streams:
            return
        if not self._value_begun:
            self._value_begun = True
            self._value = self._value.removeprefix("\n")
            self._arguments('"')
        shown = self._value.removesuffix("\n")
        self._value = self._value[len(shown) :]
        self._arguments(json.dumps(shown, ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        if self._streams:
            self._arguments('"' if self._value_begun else '""')
        else:
            self._arguments(as_json(self._value.removeprefix("\n").removesuffix("\n"), self._schema))

    # ---- JSON --------------------------------------------------------------------------------------------------

    def _read_arguments(self, final: bool) -> bool:
        """Pass on JSON unchanged. Once it is complete only the next marker counts."""
        scan: ValueScan = self._scan
        if scan.done:
            return self._read_marked(final)
        if not scan.begun:
            self._text = self._text.lstrip(SPACE)
            if self._text and self._text[0] != "{":
                return self._read_other_arguments(final)
        end = scan.scan(self._text, 0)
        self._arguments(self._text[:end])
        self._text = self._text[end:]
        return scan.done

    def _read_other_arguments(self, final: bool) -> bool:
        """Parse arguments that are not an object: everything up to the next marker, and `{}` for null."""
        match = self._search.pattern.search(self._text)
        if match is None and not final:
            return False
        self._arguments(plain_arguments(self._text[: match.start()] if match else self._text))
        self._text = self._text[match.end() :] if match else ""
        if match:
            self._leave(match[0])
        return match is not None

    def _read_objects(self, final: bool) -> bool:
        """Parse calls written as JSON objects, with their separators."""
        if self._scan is None:
            return self._read_between(final)
        scan: ObjectScan = self._scan
        pieces: list[ToolCallPiece] = []
        end = scan.scan(self._text, 0, pieces)
        if not self._open_call:
            self._raw += self._text[:end]
        self._text = self._text[end:]
        for piece in pieces:
            if piece.name is not None:
                if self._region.known and piece.name not in self._tools:
                    return self._treat_as_content()
                self._start_call(piece.name, scan.call_id)
                self._raw = ""
            self._arguments(piece.arguments)
        if scan.broken:
            return self._skip_rest() if self._open_call or self._count_in_region else self._treat_as_content()
        if scan.done:
            self._end_call()
            self._scan = None
        return scan.done

    def _read_between(self, final: bool) -> bool:
        """Parse between two objects: separators, the next object, a marker, or the end of all calls."""
        text = self._text.lstrip(SEPARATORS)
        match = self._search.pattern.match(text)
        if not self._count_in_region:
            self._raw += self._text[: len(self._text) - len(text)]
        self._text = text
        if match is not None:
            self._text = text[match.end() :]
            if not self._count_in_region:
                self._content(self._raw + match[0])
            self._enter(self._region.edges[match[0]], match[0])
            return True
        if not text or (text in self._search.beginnings and not final):
            return False
        if text[0] == "{":
            self._scan = ObjectScan()
            return True
        return self._skip_rest() if self._count_in_region else self._treat_as_content()

    def _read_pythonic(self, final: bool) -> bool:
        """Parse a list of calls, once it is complete."""
        scan: ListScan = self._scan
        if scan.done:
            return self._read_marked(final)
        if not self._capture:
            space = len(self._text) - len(self._text.lstrip(SPACE))
            self._raw, self._text = self._raw + self._text[:space], self._text[space:]
            if self._text and self._text[0] != "[":
                return self._treat_as_content()
        end = scan.scan(self._text, 0)
        self._capture += self._text[:end]
        self._raw += self._text[:end]
        self._text = self._text[end:]
        if not scan.done:
            return False
        calls = read_calls(self._capture)
        if calls is None or (self._region.known and any(name not in self._tools for name, _ in calls)):
            return self._treat_as_content()
        self._raw = ""
        for name, arguments in calls:
            self._start_call(name, "")
            self._arguments(arguments)
            self._end_call()
        if not self._region.edges:
            self._enter("content")
        return True

    def _read_braces(self, final: bool) -> bool:
        """Pass arguments on as JSON. Once they are complete only the next marker counts."""
        scan: BracesScan = self._scan
        if scan.done:
            return self._read_marked(final)
        end, found = scan.scan(self._text, final)
        self._arguments(found if self._sent else "{" + found)
        self._text = self._text[end:]
        return scan.done

    def _treat_as_content(self) -> bool:
        """Emit the text of something that turned out not to be a call as content."""
        raw = self._dropped + self._raw
        self._after_region = False
        self._enter("content")
        self._content(raw)
        return True

    def _skip_rest(self) -> bool:
        """Handle other text after calls: drop it up to the region's end; if the region has no end, it is content."""
        self._end_call()
        if not self._region.edges:
            self._enter("content")
            return True
        self._region = Region("skip", self._region.edges)
        return True


def _named(captured: str, pattern: str) -> tuple[str, str]:
    """(name, id) in the text of a `name` region."""
    if not pattern:
        return captured, ""
    match = re.search(pattern, captured)
    return (match["name"], match["id"]) if match is not None else ("", "")


def _cut(form: OutputFormat, calls: bool, reasoning: bool) -> Mapping[str, Region]:
    """The regions of a format, without those of calls or reasoning if they are disabled."""
    if calls and reasoning:
        return form.regions
    unwanted = {
        title
        for title, region in form.regions.items()
        if (not calls and region.kind in CALL_KINDS | {"skip"}) or (not reasoning and region.kind == "reasoning")
    }
    return {title: _without(region, unwanted) for title, region in form.regions.items() if title not in unwanted}


def _without(region: Region, unwanted: set[str]) -> Region:
    """A copy of a region without edges to unwanted ones."""
    return replace(
        region,
        edges={marker: target for marker, target in region.edges.items() if target not in unwanted},
        bare={char: target for char, target in region.bare.items() if target not in unwanted},
        routes=tuple((pattern, "content" if target in unwanted else target) for pattern, target in region.routes),
    )
