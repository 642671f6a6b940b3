"""Chat templates: Jinja source that turns a list of messages into a prompt, rendered as HF transformers does.

Templates come with a model and are untrusted code: they run in Jinja's immutable sandbox, and `render_with_timeout`
ends one that takes too long or writes too much. What it cannot interrupt is a single operation inside an expression, so
products and powers of a size that no prompt has are refused.
"""

import asyncio
import ctypes
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from tokenyard.base import ConfigError, ContextLengthError, InvalidRequestError
from tokenyard.engine.text.chat_messages import (
    Message,
    TemplateFeatures,
    alternating,
    normalize_messages,
    template_features,
)
from tokenyard.engine.text.model_files import read_json
from tokenyard.engine.text.tokenizer_files import special_tokens

logger = logging.getLogger(__name__)

MARK = "<<the last message ends here>> "
"""Ends with a space, which shows whether the template trims content."""

MAX_PROMPT_CHARS = 64_000_000
MAX_INTEGER_BITS = 100_000
RENDER_TIMEOUT_S = 10.0


class TooSlowError(Exception):
    """Raised inside a thread whose template takes too long."""


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's part for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Node:
        """Return the body as a separate block: variables set in it stay local, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without products and powers that take long: they run in C, where no deadline ends them.

    Jinja does not compute what is intercepted while it compiles.
    """

    intercepted_binops = frozenset({"*", "**"})

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if (bits * right if operator == "**" else bits + more) > MAX_INTEGER_BITS:
                raise SecurityError("a number in it is too large")
        elif operator == "*" and max(_repeated(left, right), _repeated(right, left)) > MAX_PROMPT_CHARS:
            raise SecurityError("a repetition in it is too long")
        return super().call_binop(context, operator, left, right)


def _repeated(value: Any, times: Any) -> int:
    """Length of a sequence that is repeated; 0 where that is no repetition."""
    return len(value) * times if isinstance(value, Sized) and isinstance(times, int) else 0


def _environment() -> ImmutableSandboxedEnvironment:
    # Constants are not computed ahead: for a long chain of subscripts that takes the cube of its length.
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False}
    environment = _Environment(extensions=[_GenerationTag, loopcontrols], **options)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One or several named templates and the special tokens they may mention.

    Raises ConfigError where a template is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._wants: dict[str, TemplateFeatures] = {}
        self.special_tokens = dict(special_tokens)
        self.sources = dict(sources)
        self.response_template: Any = None
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._wants[name] = template_features(environment, source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
            except (RecursionError, SyntaxError, ValueError) as error:  # of the Python that Jinja makes of it
                raise ConfigError(f"chat template {name!r} cannot be compiled: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> str:
        """Return the prompt. With tools the template named "tool_use" is taken if there is one.

        `continue_final_message` cuts the prompt right behind the last message's content, for the model to go on.
        Content may be a string or a list of text parts. A template that refuses the messages gets them as turns that
        alternate.
        Raises InvalidRequestError if there is no template, or with the message of a template that refuses, and
        ContextLengthError once it has written more than `max_chars`.
        """
        if continue_final_message:
            messages = _marked(messages)
        wants = self._wants.get(self._choose(tools), TemplateFeatures())

        def rendered(messages: list[Message]) -> str:
            variables = {
                "documents": None,
                **(chat_template_kwargs or {}),
                **self.special_tokens,
                "messages": normalize_messages(messages, wants),
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
            return self.render_variables(variables, max_chars)

        try:
            text = rendered(messages)
        except ContextLengthError:
            raise
        except InvalidRequestError:
            turns = alternating(messages)
            if turns == messages:
                raise
            text = rendered(turns)
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, tools: Any) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def render_variables(self, variables: Mapping[str, Any], max_chars: int = MAX_PROMPT_CHARS) -> str:
        """Render with exactly these variables; raises as `render` does."""
        template = self._templates.get(self._choose(variables.get("tools")))
        if template is None:
            raise InvalidRequestError("this model has no chat template: use /v1/completions, or give --chat-template")
        pieces, length = [], 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > max_chars:
                    raise ContextLengthError(
                        f"the prompt of the conversation has more than {max_chars} characters, which cannot fit",
                        param="messages",
                    )
        except (InvalidRequestError, TooSlowError, MemoryError):
            raise
        except Exception as error:  # a template fails with whatever its expressions raise
            raise InvalidRequestError(f"the chat template refused: {error}", param="messages") from error
        return "".join(pieces)


def _marked(messages: list[Message]) -> list[Message]:
    """The messages with a mark behind the last one's content. Raises InvalidRequestError if it has none."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + MARK}]
    parts = list(content) if isinstance(content, list) else []
    for place in reversed(range(len(parts))):
        if "text" in parts[place]:
            parts[place] = {**parts[place], "text": parts[place]["text"] + MARK}
            return [*before, {**last, "content": parts}]
    raise InvalidRequestError("there is no last message to continue", param="messages")


def _cut_at_mark(text: str) -> str:
    """Cut a prompt at the mark; a template that trims content also trims the spaces before the mark."""
    at = text.rfind(MARK.strip())
    if at < 0:
        raise InvalidRequestError("the chat template leaves no last message to continue", param="messages")
    return text[:at] if text[at:].startswith(MARK) else text[:at].rstrip()


class _Deadline:
    """Interrupts the thread that works inside `with deadline`, once `expire` is called from elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None

    def __enter__(self) -> None:
        self._thread_id = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        # While `expire` holds the lock we wait, so an interrupt is never delivered after this block.
        with self._lock:
            self._thread_id = None

    def expire(self) -> None:
        """Raise TooSlowError in the thread at work, if any."""
        with self._lock:
            if self._thread_id is not None:
                thread_id = ctypes.c_ulong(self._thread_id)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TooSlowError))


async def render_with_timeout(
    template: ChatTemplate, messages: list[Message], timeout_s: float = RENDER_TIMEOUT_S, **options: Any
) -> str:
    """Render off the event loop; `options` are those of `ChatTemplate.render`.

    Raises InvalidRequestError also for a template that takes longer than `timeout_s`; its thread is freed.
    """
    deadline = _Deadline()

    def work() -> str:
        with deadline:
            return template.render(messages, **options)

    timer = asyncio.get_running_loop().call_later(timeout_s, deadline.expire)
    try:
        return await asyncio.to_thread(work)
    except TooSlowError as error:
        raise InvalidRequestError(f"the chat template took longer than {timeout_s:g} s") from error
    finally:
        timer.cancel()


def load_chat_template(folder: Path, override: str = "") -> ChatTemplate:
    """Load a model's templates: the file `override`, else those next to its tokenizer.

    There, chat_template.jinja and additional_chat_templates/NAME.jinja go before tokenizer_config.json, and that before
    chat_template.json. A model may have none; rendering then raises. Raises ConfigError for files that are missing
    or broken.
    """
    config = read_json(folder / "tokenizer_config.json")
    tokens = special_tokens(folder)
    if override:
        if not Path(override).is_file():
            raise ConfigError(f"--chat-template: there is no file {override}")
        return ChatTemplate({"default": _read_template(Path(override))}, tokens)
    value = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    sources = _named_sources(value, folder)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_template(file)
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = _read_template(folder / "chat_template.jinja")
    template = ChatTemplate(sources, tokens)
    if "default" not in sources:
        logger.warning("%s has no chat template: messages are refused, prompts are not (see --chat-template)", folder)
    template.response_template = config.get("response_template")
    return template


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error}") from error


def _named_sources(value: Any, folder: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(source, str) for source in value.values()):
        return dict(value)
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"chat_template in {folder / 'tokenizer_config.json'} is no template") from error
