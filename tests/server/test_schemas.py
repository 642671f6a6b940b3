"""Schemas as pydantic, zod and MCP servers write them: taken, and refused in words of the API where nothing helps."""

import json
import time

import pytest
from llguidance import LLTokenizer

from tests.executor.test_grammar import TOKENIZER, VOCABULARY
from tests.server.test_grammars import takes
from tokenyard.base import InvalidRequestError
from tokenyard.executor.grammar import GrammarCache
from tokenyard.server.openai.structured_outputs import Grammar, forced_calls, grammar_of, schema_rule
from tokenyard.server.parse.model_formats import FAMILIES
from tokenyard.server.protocol import ChatRequest

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
NUMBER = {"type": "number"}
CASES = [
    ({"type": "string", "format": "password"}, '"x"', "1"),
    ({"type": "integer", "format": "int32"}, "7", '"7"'),
    ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, '"a.b@c.de"', '"a..b@c.de"'),
    ({"type": "array", "items": NUMBER, "uniqueItems": True}, "[1,2]", '["a"]'),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER}, '{"a":1}', '{"a":"1"}'),
    ({"type": "object", "propertyNames": {"anyOf": [NUMBER, {"type": "string"}]}}, '{"a":1}', "[]"),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER, "required": ["a"]},
        '{"a":1,"b":2}',
        '{"a":1,"c":2}',
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": NUMBER},
        '{"x-a":1}',
        '{"a":1}',
    ),
    ({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": NUMBER}, '{"ab":1}', '{"a":1}'),
    ({"type": "array", "items": {"type": "object", "propertyNames": {"type": "string"}}}, '[{"a":1}]', "[1]"),
]
LENIENT = [
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, '"ab"', '"A"'),
    ({"type": "string", "pattern": r"^(?=[^)]*\))[a-z)]+$"}, '"a)"', '"A"'),
    ({"type": "string", "pattern": r"^(a)\1$"}, '"x"', "1"),
    ({"type": "string", "pattern": r"^\p{L}+-\d$"}, '"ab-1"', '"1"'),
    ({"type": "string", "pattern": "[a"}, '"x"', "1"),
    ({"type": "any"}, "[1]", "x"),
    ({"type": "object", "required": None}, "{}", "1"),
    ({"$ref": "https://example.com/schema.json"}, "1", "x"),
    (
        {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/B"}}, "$defs": {"A": NUMBER}},
        '{"b":"x"}',
        "x",
    ),
]


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(TOKENIZER)


def grammar(schema, *, lenient: bool = False) -> str:
    return Grammar("answer", {"answer": schema_rule(schema, lenient=lenient, param="p")}).text()


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_keywords_with_an_equal_form_are_enforced_by_it_and_others_are_no_reason_to_refuse(
    vocabulary, schema, good, bad
):
    for lenient in (False, True):
        assert takes(vocabulary, grammar(schema, lenient=lenient), good)
        assert not takes(vocabulary, grammar(schema, lenient=lenient), bad)


@pytest.mark.parametrize(("schema", "good", "bad"), LENIENT)
def test_what_cannot_be_used_is_dropped_where_a_schema_is_not_strict(vocabulary, schema, good, bad):
    assert takes(vocabulary, grammar(schema, lenient=True), good)
    assert not takes(vocabulary, grammar(schema, lenient=True), bad)


def test_values_that_look_like_schemas_are_left_alone(vocabulary):
    value = {"format": "x", "uniqueItems": True, "pattern": "(?!a)"}
    schema = {"type": "object", "properties": {"format": {"const": value}}, "required": ["format"]}
    assert takes(vocabulary, grammar(schema, lenient=True), json.dumps({"format": value}))


@pytest.mark.parametrize(
    "pattern", ["(?!" * 500, "(?=a)" + "(a{1,100}){1,100}" * 3, "[" * 1000 + "(?!", "\\" * 999 + "(?<!"]
)
def test_hostile_patterns_cost_no_time_before_the_compiler(pattern):
    start = time.process_time()
    grammar({"type": "string", "pattern": pattern}, lenient=True)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
            'response_format.json_schema.schema at /properties/a: the keyword "not" is not supported; '
            'with "strict": false it is not enforced',
        ),
        (
            {"json_schema": {"if": {}, "then": {}}},
            'json_schema: the keywords "if" and "then" are not supported; '
            'with "x-guidance": {"lenient": true} in the schema it is not enforced',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"pattern": "(?!x)", "type": "string"}},
                }
            },
            'schema: pattern "(?!x)": look-around, including look-ahead and look-behind, is not supported; '
            'with "strict": false it is not enforced',
        ),
        ({"json_schema": {"$ref": "#/$defs/A"}}, 'json_schema: the reference "/$defs/A" cannot be resolved'),
    ],
)
def test_a_refusal_names_the_cure_in_words_of_the_api(fields, words):
    text = grammar_of(ChatRequest(messages=[], **fields)).text()
    with pytest.raises(InvalidRequestError) as caught:
        GrammarCache(VOCABULARY, (1,)).compile(text, lambda: TOKENIZER)
    assert str(caught.value).endswith(words)
    lenient = str(caught.value).partition("; with ")[2]
    if "x-guidance" in lenient:
        fields = {"json_schema": {**fields["json_schema"], "x-guidance": {"lenient": True}}}
    elif "strict" in lenient:
        fields["response_format"]["json_schema"]["strict"] = False
    else:
        return
    GrammarCache(VOCABULARY, (1,)).compile(grammar_of(ChatRequest(messages=[], **fields)).text(), lambda: TOKENIZER)


def test_arguments_written_one_by_one_may_refer_to_definitions_of_the_tool(vocabulary):
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}},
        "required": ["at"],
        "$defs": {"Point": {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}},
    }
    function = {"name": "go", "parameters": parameters, "strict": True}
    text = forced_calls(FAMILIES["qwen3_coder"], [function], {}, parallel=False).text()
    call = "<tool_call>\n<function=go>\n<parameter=at>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert takes(vocabulary, text, call % '{"x": 1}')
    assert not takes(vocabulary, text, call % '{"x": "1"}')
