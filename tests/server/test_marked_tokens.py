"""Grammars over tokenizers whose markers are added tokens: `special`, as in some published models, or not."""

import functools
import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tests.executor.test_grammar import TOKENIZER
from tests.server.parse.texts import TOOLS
from tokenyard.server.openai.tool_choice import chat_grammar, tool_use
from tokenyard.server.parse.model_formats import FAMILIES
from tokenyard.server.parse.output_style import OutputStyle
from tokenyard.server.protocol import ChatRequest

EOS = 1
SHAPED = [form.name for form in FAMILIES.values() if form.shape is not None]
KINDS = ["special", "added", "text"]
MARKER = re.compile(r"<[^<>\n ]*>|\[/?[A-Z_]+\]")
"""What tokenizers have as one token: whole tags, and Mistral's words in brackets."""


@functools.cache
def tokenizer_of(name: str, kind: str) -> Tokenizer:
    """The demo model's tokenizer with the markers of a family as tokens."""
    tokenizer = Tokenizer.from_str(TOKENIZER)
    form = FAMILIES[name]
    shape = form.shape
    texts = [*form.markers, *(form.thinks or ()), shape.before, shape.middle, shape.after, shape.begin, shape.end]
    texts += [*(shape.parameter or ()), "<|start|>"] if name == "harmony" else shape.parameter or ()
    found = sorted({marker for text in texts for marker in MARKER.findall(text)})
    if kind != "text":
        tokenizer.add_tokens([AddedToken(text, special=kind == "special", normalized=False) for text in found])
    return tokenizer


@functools.cache
def vocabulary_of(name: str, kind: str) -> LLTokenizer:
    return LLTokenizer(tokenizer_of(name, kind).to_str(), eos_token=[EOS])


def takes(name: str, kind: str, grammar: str, text: str) -> bool:
    """Whether a grammar takes exactly this answer in the tokens that the model would write."""
    matcher = LLMatcher(vocabulary_of(name, kind), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer_of(name, kind).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_for(name: str, kind: str, prompt: str = "", *, strict: bool = False, **fields) -> str:
    functions = [
        {"type": "function", "function": {"name": tool, "parameters": parameters, "strict": strict}}
        for tool, parameters in TOOLS.items()
    ]
    body = ChatRequest(messages=[], tools=functions, **fields)
    style = OutputStyle({}, tokenizer_of(name, kind), name)
    return chat_grammar(body, tool_use(body), style, prompt)


def call_of(name: str, *, days: str = "3") -> str:
    """A call as the family writes it."""
    shape = FAMILIES[name].shape
    arguments = f'{{"city": "Paris", "days": {days}}}'
    if shape.parameter is not None:
        before, middle, after = shape.parameter
        arguments = f"{before}city{middle}Paris{after}{before}days{middle}{days}{after}"
    return shape.begin + shape.before + "get_weather" + shape.middle + arguments + shape.after + shape.end


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPED)
def test_a_forced_call_is_written_with_the_models_own_tokens(name, kind):
    grammar = grammar_for(name, kind, tool_choice="required", parallel_tool_calls=False)
    assert takes(name, kind, grammar, call_of(name))
    assert not takes(name, kind, grammar, "hello")
    assert not takes(name, kind, grammar, call_of(name).replace("get_weather", "other"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPED)
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schemas(name, kind):
    prompt = "<|start|>assistant" if name == "harmony" else ""
    grammar = grammar_for(name, kind, prompt, strict=True)
    assert takes(name, kind, grammar, call_of(name))
    assert not takes(name, kind, grammar, call_of(name, days='"three"'))
    assert takes(name, kind, grammar, "<|channel|>final<|message|>hello" if name == "harmony" else "hello\nyou")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SHAPED if FAMILIES[name].thinks is not None])
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"strict": True}])
def test_reasoning_can_be_closed_before_a_call(name, kind, fields):
    begin, end = FAMILIES[name].thinks
    opened, thought = f"assistant\n{begin}\n", f"so {{it}} is\n{end}\n\n"
    assert takes(name, kind, grammar_for(name, kind, opened, **fields), thought + call_of(name))
    assert takes(name, kind, grammar_for(name, kind, "assistant\n", **fields), begin + thought + call_of(name))
    assert takes(name, kind, grammar_for(name, kind, "assistant\n", **fields), call_of(name))


@pytest.mark.parametrize("kind", KINDS)
def test_harmony_thinks_in_its_own_channel_and_answers_in_another(kind):
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    prompt = "<|start|>assistant"
    for fields in ({"tool_choice": "required"}, {"strict": True}):
        grammar = grammar_for("harmony", kind, prompt, **fields)
        assert takes("harmony", kind, grammar, thought + call_of("harmony"))
    form = {"type": "json_object"}
    grammar = grammar_for("harmony", kind, prompt, response_format=form, tool_choice="none")
    assert takes("harmony", kind, grammar, thought + '<|channel|>final<|message|>{"a": 1}')
    assert not takes("harmony", kind, grammar, thought + "<|channel|>final<|message|>so")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_in_a_schema_follows_reasoning(kind):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    grammar = grammar_for("hermes", kind, "assistant\n<think>\n", response_format=form)
    assert takes("hermes", kind, grammar, 'so\n</think>\n\n{"a": 1}')
    assert takes("hermes", kind, grammar, "so\n</think>\n\n" + call_of("hermes"))


@pytest.mark.parametrize("kind", KINDS)
def test_tags_and_choices_of_a_client_may_be_tokens(kind):
    tag = {"begin": "<tool_call>", "schema": {"type": "object"}, "end": "</tool_call>"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["<tool_call>"]}
    grammar = grammar_for("hermes", kind, tool_choice="none", response_format=tags)
    assert takes("hermes", kind, grammar, 'so <tool_call>{"a": 1}</tool_call>.')
    assert not takes("hermes", kind, grammar, "so <tool_call>x</tool_call>.")
    choice = grammar_for("hermes", kind, tool_choice="none", structured_outputs={"choice": ["</tool_call>", "b"]})
    assert takes("hermes", kind, choice, "</tool_call>")


def test_published_flags_of_qwen(qwen_added):
    """Which tokens of Qwen3 grammars name by id, and which the detokenizer must keep."""
    tokenizer = Tokenizer.from_str(TOKENIZER)
    tokens = qwen_added["added_tokens"]
    tokenizer.add_tokens([AddedToken(token["content"], special=token["special"]) for token in tokens])
    style = OutputStyle({}, tokenizer, "hermes")
    assert all(style.special[token["content"]] == tokenizer.token_to_id(token["content"]) for token in tokens)
    assert style.keep_ids == [], "none of the markers is special: the detokenizer keeps them anyway"


@pytest.fixture(params=["qwen3", "qwen3_5"])
def qwen_added(request, pytestconfig):
    path = pytestconfig.rootpath / f"../shared/tokenizers/added_tokens/{request.param}.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    return json.loads(path.read_text())
