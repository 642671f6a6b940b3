"""How a model family writes reasoning and tool calls, as data for the output parser and the grammars.

A format is a set of regions. Each region defines the kind of its text and the markers that lead to other regions:

    start      only whitespace so far; the first other text selects the next region
    content    the answer
    reasoning  the model's reasoning
    skip       text between markers without meaning
    header     text before a marker; `routes` select the next region by it (harmony's channels)
    name       a tool's name; `pattern` extracts the name (and an id) from the text
    id         a call's id
    arguments  JSON arguments, passed on unchanged
    objects    one or more JSON objects with name and arguments
    pythonic   [name(key=value, ...), ...]
    braces     arguments key:value, ... after their first brace, with strings between `quote`
    key        the name of one argument
    value      its value, typed by the tool's schema

A marker inside a JSON string is text. No marker of a region may be a prefix of another marker of that region.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "start",
    "content",
    "reasoning",
    "skip",
    "header",
    "name",
    "id",
    "arguments",
    "objects",
    "pythonic",
    "braces",
    "key",
    "value",
]


@dataclass(frozen=True)
class Region:
    """A stretch of text of one kind.

    kind: see the module's docstring.
    edges: marker -> the region after it.
    bare: first character -> region, for calls that begin without a marker. The character is not consumed.
    then: the region after `start` for other text.
    routes: (pattern of the header, region), in order.
    pattern: for `name`, the pattern of the name and an id.
    in_call: for `skip`, whether the call continues after it.
    known: only names of the request's tools count.
    quote: for `braces`, what begins and ends a string.
    """

    kind: Kind
    edges: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    then: str = "content"
    routes: tuple[tuple[str, str], ...] = ()
    pattern: str = ""
    in_call: bool = False
    known: bool = False
    quote: str = ""


@dataclass(frozen=True)
class ToolCallShape:
    """How calls are written, for grammars that force one (SGLang's `StructureInfo`).

    begin: before the first call.
    before: before a tool's name.
    middle: between the name and the arguments.
    after: after the arguments.
    between: between two calls.
    end: after the last call.
    parameter: (text before the key, before the value, after the value) of each argument. None if arguments are JSON.
    """

    before: str
    middle: str
    after: str
    begin: str = ""
    end: str = ""
    between: str = ""
    parameter: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class OutputFormat:
    """The output format of one model family: what SGLang's detectors and vLLM's tool and reasoning parsers implement.

    name: accepted by `detect.named`.
    regions: by name.
    detect: strings that all occur in the source of the family's chat templates.
    opened: (pattern of the prompt's end, region in which the answer then begins).
    shape: how calls are written, None if a grammar cannot force them.
    thinks: the markers that begin and end reasoning.
    id_style: the format of generated call ids.
    """

    name: str
    regions: Mapping[str, Region]
    detect: tuple[str, ...] = ()
    opened: tuple[tuple[str, str], ...] = ()
    shape: ToolCallShape | None = None
    thinks: tuple[str, str] | None = None
    id_style: Literal["openai", "mistral"] = "openai"

    def begins_in(self, prompt: str) -> str:
        """The region in which an answer to `prompt` begins."""
        tail = prompt[-400:]
        for pattern, region in self.opened:
            if re.search(pattern, tail):
                return region
        return "start"

    @property
    def markers(self) -> set[str]:
        """All markers. The detokenizer must keep those that are special tokens."""
        quotes = {region.quote for region in self.regions.values() if region.quote}
        return quotes | {marker for region in self.regions.values() for marker in region.edges}
