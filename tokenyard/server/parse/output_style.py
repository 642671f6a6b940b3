"""The output format of a served model, and the parsing of one request's answers."""

import hashlib
import logging
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import InvalidRequestError
from tokenyard.server.parse.detect import detect, knows_tools, named
from tokenyard.server.parse.events import ContentText, Event, ParsedMessage, ReasoningText, ToolCallStart
from tokenyard.server.parse.format import OutputFormat
from tokenyard.server.parse.model_formats import FALLBACK
from tokenyard.server.parse.output_parser import OutputParser
from tokenyard.server.parse.response_template import format_of

log = logging.getLogger(__name__)

MISTRAL_ID_CHARS = 9
ALPHANUMERIC = string.ascii_letters + string.digits
DROPS_TOOLS = "the chat template of this model shows no tools to it: it answers without knowing them"


class OutputStyle:
    """The output format of a model: from `name`, else the checkpoint's response_template, else the sources of its chat
    templates.

    Raises ConfigError for an unknown name.
    """

    def __init__(
        self, sources: Mapping[str, str], tokenizer: Any = None, name: str = "", response_template: Any = None
    ) -> None:
        own = format_of(response_template) if response_template is not None else None
        if response_template is not None and own is None:
            log.warning("the model's response_template is not supported; using the format of its chat template")
        self.form: OutputFormat | None = named(name) if name else own or detect(sources.values())
        self.has_template = bool(sources)
        self.template = sources.get("default", "")
        self.knows_tools = knows_tools(sources.values())
        self.supports_developer_role = any("developer" in source for source in sources.values())
        added = tokenizer.get_added_tokens_decoder() if tokenizer is not None else {}
        self.special = _tokens_apart_from_text(added)
        self.keep_ids = _markers_among(added, self.form)
        self._tokenizer = tokenizer

    @property
    def tool_call_format(self) -> OutputFormat:
        """The format of tool calls; the most common one for models without a format."""
        return self.form if self.form is not None and self.form.shape is not None else FALLBACK

    def roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with `system` in place of `developer` if the template does not support the latter."""
        if self.supports_developer_role or not any(message.get("role") == "developer" for message in messages):
            return messages
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]

    def reading(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        reasoning: bool = True,
        forced: bool = False,
        parallel: bool = True,
    ) -> "ParserOptions | None":
        """How answers to `prompt` are parsed; None for plain text.

        tools: the functions that may be called (name, parameters).
        forced: a grammar forces a call.
        parallel: whether calls after the first one count.
        """
        form = self.form if self.form is not None or not tools else FALLBACK
        if forced:
            form = self.tool_call_format
        if form is None or not (tools or (reasoning and form.thinks is not None)):
            return None
        if tools and not self.knows_tools:
            log.warning("%s", DROPS_TOOLS)
        schemas = {str(tool["name"]): tool.get("parameters") for tool in tools}
        notes = [DROPS_TOOLS] if tools and not self.knows_tools else []
        return ParserOptions(form, prompt, schemas, reasoning, self.count_tokens, notes, parallel, forced=forced)

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text; 0 without a tokenizer."""
        if not text or self._tokenizer is None:
            return 0
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(slots=True)
class ParserOptions:
    """How the answers of one request are parsed.

    form: the model's output format.
    prompt: the rendered prompt; its end selects the first region.
    tools: schema of the parameters by tool name.
    reasoning: whether to separate reasoning from content.
    count_tokens: counts the tokens of a text.
    notes: warnings for the client.
    parallel: whether calls after the first one count.
    forced: a grammar forces a call, so that all text is part of one; what is left of a marker that was cut is dropped.
    id_seed: what call ids are derived from, so that another engine gives the same; "" for ids of chance.
    called_tool: whether an answer has called a tool.
    """

    form: OutputFormat
    prompt: str
    tools: Mapping[str, Any]
    reasoning: bool
    count_tokens: Callable[[str], int]
    notes: list[str] = field(default_factory=list)
    parallel: bool = True
    forced: bool = False
    id_seed: str = ""
    called_tool: bool = False

    def reader(self, said: str = "") -> "OutputReader":
        """A reader for one answer. It continues after `said`, which the client already has."""
        parser = OutputParser(
            self.form, self.prompt, tools=self.tools, calls=bool(self.tools), reasoning=self.reasoning
        )
        reader = OutputReader(parser, self)
        reader.feed(said)
        return reader

    def call_id(self, index: int) -> str:
        """An id for the call with this index, in the style of the model."""
        seed = self.id_seed or secrets.token_hex(16)
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=12).digest()
        if self.form.id_style == "mistral":
            return "".join(ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest[:MISTRAL_ID_CHARS])
        return f"call_{digest.hex()}"


class OutputReader:
    """Parses one streamed answer and keeps the message so far."""

    def __init__(self, parser: OutputParser, reading: ParserOptions) -> None:
        self.message = ParsedMessage()
        self._parser = parser
        self._reading = reading
        self._ids: set[str] = set()

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Parse more text, with `last` the end of the answer; returns the completed events. Each call has an id."""
        events = self._parser.feed(text) if text else []
        if last:
            events += self._parser.finish()
        if not self._reading.parallel:
            events = [event for event in events if isinstance(event, ContentText | ReasoningText) or event.index == 0]
        if self._reading.forced and self._reading.reasoning:
            events = [event for event in events if not isinstance(event, ContentText)]
        for event in events:
            if isinstance(event, ToolCallStart):
                self._reading.called_tool = True
                if not event.id or event.id in self._ids:
                    event.id = self._reading.call_id(event.index)
                self._ids.add(event.id)
        self.message.add(events)
        return events

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens."""
        return self._reading.count_tokens(self.message.reasoning)


def _tokens_apart_from_text(added: Mapping[int, Any]) -> dict[str, int]:
    """Ids, by text, of the added tokens that a grammar must name by id, as its text does not match them.

    llguidance decides this by `special` or by the form <...>: Qwen's <tool_call> and </think> are not special.
    """
    return {
        entry.content: token
        for token, entry in added.items()
        if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
    }


def _markers_among(added: Mapping[int, Any], form: OutputFormat | None) -> list[int]:
    """Ids of the special tokens in a format's markers, which the detokenizer must keep in the text."""
    markers = form.markers if form is not None else set()
    special = {token: entry.content for token, entry in added.items() if entry.special}
    return sorted(token for token, text in special.items() if any(text in marker for marker in markers))


def functions_of(tools: Sequence[Any], param: str = "tools") -> list[dict[str, Any]]:
    """The functions in OpenAI's `tools`. Raises InvalidRequestError, with its position, for an invalid one."""
    functions = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise InvalidRequestError(f"{param}[{place}]: only tools of type function are supported", param=param)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"{param}[{place}].function.name must be a string", param=param)
        if not isinstance(function.get("parameters"), Mapping | None):
            raise InvalidRequestError(f"{param}[{place}].function.parameters must be a JSON schema", param=param)
        functions.append(dict(function))
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"{param} holds a function twice", param=param)
    return functions
