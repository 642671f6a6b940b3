"""What the parsing machine finds in a model's text, and messages put together from it."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of what the model thinks before its answer."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of one answer from 0; `id` is "" unless the text holds one."""

    index: int
    name: str
    id: str = ""


@dataclass(slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """All arguments of a call have come, or the text ended within them."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """An answer taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take in events in their order."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name, call_id):
                    self.calls.append(Call(name, id=call_id))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd():
                    pass
