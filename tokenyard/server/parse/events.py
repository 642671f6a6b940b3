"""Events of the output parser, and messages assembled from them."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ContentText:
    """More content of the answer."""

    text: str


@dataclass(slots=True)
class ReasoningText:
    """More of the model's reasoning."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A tool call begins.

    index: of the call in the answer, from 0.
    name: the tool's name.
    id: the call's id; "" unless the text contains one.
    """

    index: int
    name: str
    id: str = ""


@dataclass(slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(slots=True)
class ToolCallEnd:
    """The arguments of a call are complete, or the text ended within them."""

    index: int


Event = ContentText | ReasoningText | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ParsedToolCall:
    """One tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A parsed answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add events in their order."""
        for event in events:
            match event:
                case ContentText(text):
                    self.content += text
                case ReasoningText(text):
                    self.reasoning += text
                case ToolCallStart(_, name, call_id):
                    self.calls.append(ParsedToolCall(name, id=call_id))
                case ToolCallArguments(index, text):
                    self.calls[index].arguments += text
                case ToolCallEnd():
                    pass
