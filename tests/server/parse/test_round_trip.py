"""What the chat templates of known models write of a call is read back as the call."""

import itertools
import json

import pytest

from tests.engine.test_chat_template import CASES
from tokenyard.base import InvalidRequestError
from tokenyard.engine.text.chat_template import ChatTemplate
from tokenyard.server.parse.events import ParsedMessage
from tokenyard.server.parse.output_style import OutputStyle

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PARAMETERS}}
ARGUMENTS = {"city": 'São "Paulo"', "days": 3}
ASKED = {"role": "user", "content": "hi"}
SAYS = "Let me see."
MIN_TEMPLATES = 7
UNREAD = ("openbmb/MiniCPM3-4B",)
"""They write calls as lines of Python within a code fence, which stay text."""


def templates():
    """(name, template, style) of each template whose calls are known."""
    for line in CASES.read_text(encoding="utf-8").splitlines() if CASES.exists() else ():
        case = json.loads(line)
        style = OutputStyle({"default": case["chat_template"]})
        if style.form is not None and case["name"] not in UNREAD:
            tokens = {name: value for name, value in case["data"].items() if name.endswith("_token")}
            yield case["name"], ChatTemplate({"default": case["chat_template"]}, tokens), style


def answer(template: ChatTemplate, message: dict) -> tuple[str, str]:
    """(prompt, what the model would have to write for the template to render it as it does)."""
    prompt = template.render([ASKED], tools=[TOOL])
    whole = template.render([ASKED, message], tools=[TOOL], add_generation_prompt=False)
    plain = template.render([ASKED, {"role": "assistant", "content": SAYS}], tools=[TOOL], add_generation_prompt=False)
    # Templates may open a reasoning that the history does not have.
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    prompt = prompt[: len(list(same))]
    return prompt, whole[len(prompt) :].removesuffix(plain[plain.rindex(SAYS) + len(SAYS) :])


def read(style: OutputStyle, prompt: str, pieces: list[str]) -> ParsedMessage:
    reader = style.reading(prompt, [TOOL["function"]]).reader()
    for piece in pieces:
        reader.feed(piece)
    reader.feed("", last=True)
    return reader.message


@pytest.mark.parametrize("reasoning", ["", "Hmm."])
@pytest.mark.parametrize("content", ["", SAYS])
@pytest.mark.parametrize(("name", "template", "style"), [pytest.param(*case, id=case[0]) for case in templates()])
def test_calls_are_read_back(name, template, style, content, reasoning):
    # Some templates write only the id, and expect it to hold the name.
    call = {"id": "functions.get_weather:0" if style.form.name == "kimi_k2" else "call12345", "type": "function"}
    calls = [{**call, "function": {"name": "get_weather", "arguments": ARGUMENTS}}]
    thought = {"reasoning_content": reasoning} if reasoning else {}
    try:
        prompt, text = answer(template, {"role": "assistant", "content": content, "tool_calls": calls, **thought})
    except InvalidRequestError as error:
        pytest.skip(f"the template refuses: {error.message}")
    for size in (1, 3, len(text)):
        cuts = itertools.pairwise([*range(0, len(text), size), len(text)])
        message = read(style, prompt, [text[begin:end] for begin, end in cuts])
        (found,) = message.calls
        assert found.name == "get_weather"
        assert json.loads(found.arguments) == ARGUMENTS
        assert message.content.strip() == (content if content in text else "")
        assert message.reasoning.strip() == (reasoning if reasoning and reasoning in text else "")


def test_enough_templates_are_there():
    if not CASES.exists():
        pytest.skip("shared/chat_templates is not next to the checkout")
    assert len(list(templates())) >= MIN_TEMPLATES
