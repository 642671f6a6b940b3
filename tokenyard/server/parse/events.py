"""Events of the output parser, and messages assembled from them."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ContentText:
    """More of the answer itself."""

    text: str


@dataclass(slots=True)
class ReasoningText:
    """More of what the model thinks before its answer."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A tool call begins. `index` counts the calls of one answer from 0; `id` is "" unless the text holds one."""

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
    """All arguments of a call have come, or the text ended within them."""

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
