"""From request bodies to grammars, judged by what llguidance makes of them."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.executor.test_grammar import TOKENIZER
from tests.server.fake import FakeManager
from tests.server.parse.texts import TOOLS
from tokenyard.base import InvalidRequestError
from tokenyard.server.openai.structured_outputs import after_reasoning, forced_calls, grammar_of, strict_calls
from tokenyard.server.parse.model_formats import FAMILIES
from tokenyard.server.protocol import ChatRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = [{"name": name, "parameters": parameters} for name, parameters in TOOLS.items()]
TAGS = {"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(TOKENIZER)


def takes(vocabulary, grammar: str, text: str) -> bool:
    """Whether a grammar takes exactly this answer."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def body(**fields) -> ChatRequest:
    return ChatRequest(messages=[], **fields)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": "[0-9]+/x\n?"}, "12/x\n", "x"),
        ({"ebnf": 'root ::= "a" | b\nb ::= [0-9]+'}, "12", "b"),
        ({"ebnf": 'start: "a" B\nB: /[0-9]+/'}, "a12", "12"),
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', '{"b": 1}'),
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a":1}', '{"a":"1"}'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"guided_choice": ["yes", "no"]}, "yes", "y"),
        ({"guided_json": SCHEMA}, '{"a": 1}', "1"),
        ({"structural_tag": TAGS}, 'say <f=a>{"x":1}</f> so', "say <f=b>{}</f>"),
    ],
)
def test_each_format_accepts_what_fits_and_nothing_else(vocabulary, fields, good, bad):
    grammar = grammar_of(body(**fields)).text()
    assert takes(vocabulary, grammar, good)
    assert not takes(vocabulary, grammar, bad)


SLASHED = {"type": "object", "properties": {"a // b": {"type": "string"}}}
SLASHED_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SLASHED}}


@pytest.mark.parametrize(
    ("fields", "one"),
    [
        ({"response_format": SLASHED_FORMAT, "guided_json": SLASHED}, True),
        (
            {
                "response_format": SLASHED_FORMAT,
                "structured_outputs": {"json": json.dumps(SLASHED)},
                "json_schema": SLASHED,
            },
            True,
        ),
        ({"guided_regex": "a+", "regex": "a+"}, True),
        ({"guided_regex": "a+", "regex": "a // b"}, False),
        ({"response_format": SLASHED_FORMAT, "guided_json": {**SLASHED, "required": ["a // b"]}}, False),
        ({"response_format": SLASHED_FORMAT, "guided_regex": "a+"}, False),
    ],
)
def test_one_constraint_may_stand_in_old_and_new_fields(fields, one):
    body = ChatRequest(messages=[], **fields)
    if one:
        assert grammar_of(body) is not None
    else:
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            grammar_of(body)


def test_strict_false_ignores_what_cannot_be_enforced(vocabulary):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA | {"not": {}}, "strict": False}}
    assert takes(vocabulary, grammar_of(body(response_format=form)).text(), '{"a": 1}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"x": {"properties": {f"p{i}": {} for i in range(5000)}}}}, "5000 .* at /properties/x;"),
        (json.loads('{"properties":{"a":' * 60 + "{}" + "}}" * 60), "nested more than 100 levels deep"),
    ],
)
def test_schemas_too_large_to_enforce_are_refused_by_their_size(schema, words):
    with pytest.raises(InvalidRequestError, match=words):
        grammar_of(body(json_schema=schema))


@pytest.mark.parametrize(("structures", "triggers"), [(1025, 1), (1, 65)])
def test_tags_beyond_counting_are_refused(structures, triggers):
    tag = {"begin": "<f>", "schema": {}, "end": "</f>"}
    many = {"structures": [tag] * structures, "triggers": ["<f"] * triggers}
    with pytest.raises(InvalidRequestError, match="at most"):
        grammar_of(body(structural_tag=many))


def test_many_properties_that_are_required_are_no_harm():
    names = [f"p{i}" for i in range(5000)]
    assert grammar_of(body(json_schema={"properties": {name: {} for name in names}, "required": names}))


def test_white_space_is_bounded(vocabulary):
    grammar = grammar_of(body(json_schema=SCHEMA)).text()
    assert takes(vocabulary, grammar, '{\n    "a": 1\n}')
    assert not takes(vocabulary, grammar, '{"a":' + " " * 30 + "1}")


@pytest.mark.parametrize("prompt", ["assistant\n<think>\n", "assistant\n", "assistant\n<think>\n\n</think>\n\n"])
def test_reasoning_comes_before_the_constrained_part(vocabulary, prompt):
    form = FAMILIES["hermes"]
    grammar = after_reasoning(grammar_of(body(json_schema=SCHEMA)), form, prompt, {}).text()
    opened, closed = prompt.endswith("<think>\n"), "</think>" in prompt
    assert takes(vocabulary, grammar, 'so {"x"\n</think>\n\n{"a": 1}') == opened
    assert takes(vocabulary, grammar, '{"a": 1}') == (not opened)
    assert takes(vocabulary, grammar, '<think>x</think>{"a": 1}') == (not closed)


@pytest.mark.parametrize("name", [form.name for form in FAMILIES.values() if form.shape is not None])
def test_forced_calls_are_in_the_familys_own_form(vocabulary, name):
    form = FAMILIES[name]
    shape = form.shape
    if shape.parameter is None:
        arguments = '{"city": "Paris", "days": 3}'
    else:
        before, middle, after = shape.parameter
        arguments = f"{before}city{middle}Paris{after}{before}days{middle}3{after}"
    call = shape.before + "get_weather" + shape.middle + arguments + shape.after
    one, two = shape.begin + call + shape.end, shape.begin + call + shape.between + call + shape.end
    many = forced_calls(form, FUNCTIONS, {}, parallel=True).text()
    single = forced_calls(form, FUNCTIONS, {}, parallel=False).text()
    assert takes(vocabulary, many, one)
    assert takes(vocabulary, many, two)
    assert takes(vocabulary, single, one)
    assert not takes(vocabulary, single, two)
    assert not takes(vocabulary, many, "hello")
    assert not takes(vocabulary, many, one.replace("get_weather", "other"))


def test_strict_tools_hold_calls_to_their_schemas_and_leave_text_free(vocabulary):
    form = FAMILIES["hermes"]
    grammar = strict_calls(form, [{**FUNCTIONS[0], "strict": True}], {}).text()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"days": %s}}\n</tool_call>'
    assert takes(vocabulary, grammar, "just text")
    assert takes(vocabulary, grammar, "see " + call % "3")
    assert not takes(vocabulary, grammar, "see " + call % '"three"')
    assert strict_calls(form, FUNCTIONS, {}) is None


def test_forced_choices_reach_the_engine_as_grammars_and_named_ones_end_with_stop(start):
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    for choice, reason in (
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "now"}}, "stop"),
    ):
        manager = FakeManager()
        manager.answer = ['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>']
        server = start(manager)
        answer = server.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}], "tools": tools, "tool_choice": choice},
        ).json()["choices"][0]
        assert answer["finish_reason"] == reason
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert "tool_call" in manager.specs[0].grammar
        assert ("get_weather" in manager.specs[0].grammar) == (choice == "required")
