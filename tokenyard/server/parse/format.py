"""How a family of models writes reasoning and tool calls, as data for the output parser and the grammars.

A format is a set of regions. Each region says what its text is and which markers lead from it to other regions:

    start      only whitespace has come; the first other text decides where to go
    content    the answer
    reasoning  what the model thinks
    skip       text between markers that means nothing
    header     text up to a marker that decides by `routes` where to go (harmony's channels)
    name       a tool's name; `pattern` takes the name (and an id) out of the text
    id         a call's id
    arguments  JSON arguments, passed on as they stand
    objects    JSON objects with name and arguments, one or several
    pythonic   [name(key=value, ...), ...]
    key        the name of one argument
    value      its value, typed by the tool's schema

A marker inside of a JSON string is text. No marker of a region may be the beginning of another one of it.
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
    "key",
    "value",
]


@dataclass(frozen=True)
class Region:
    """A stretch of text of one kind.

    edges: marker -> the region behind it. bare: first character -> region, for calls that begin without a marker; the
    character is not consumed. then: where `start` goes for other text. routes: (pattern of the header, region) in
    order. in_call: for `skip`, whether the call goes on behind it. known: only names of the request's tools count.
    """

    kind: Kind
    edges: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    then: str = "content"
    routes: tuple[tuple[str, str], ...] = ()
    pattern: str = ""
    in_call: bool = False
    known: bool = False


@dataclass(frozen=True)
class ToolCallShape:
    """How calls are written, for grammars that force one: `begin`, calls with `between` in between, `end`.

    A call is `before`, the tool's name, `middle`, its arguments and `after`. With `parameter` the arguments are not
    JSON but one such piece for each: text before its key, before its value, behind its value.
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
    """One family's way of writing.

    detect: all of these stand in the source of chat templates of the family. opened: (pattern of the prompt's end,
    region in which the answer then begins). thinks: marker that opens reasoning and the one that ends it.
    id_style: how ids of calls are made up.
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
        """All markers, which the detokenizer must not drop where they are special tokens."""
        return {marker for region in self.regions.values() for marker in region.edges}
