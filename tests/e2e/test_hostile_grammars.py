"""Grammars and schemas that are wrong, or made to cost much, next to plain streams: each ends in a clear 400 or as a
bounded answer, and the streams say what they say alone.
"""

import asyncio
import json

import pytest

from tokenyard import LLM
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="there is no demo model")
STREAMS = 16


def deep(levels):
    return json.loads('{"properties":{"a":' * levels + "{}" + "}}" * levels)


def optional(count):
    return {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(count)}}


def tool(parameters, name="f"):
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}], **FORCED}


FORCED = {"tool_choice": "required"}
REFUSED = {
    "5,000 optional properties": ({"json_schema": optional(5000)}, "5000 optional properties"),
    "deep nesting": ({"json_schema": deep(60)}, "nested more than 100 levels deep"),
    "a keyword that cannot be enforced": ({"json_schema": {"contains": {}}}, "contains"),
    "a reference to nothing": ({"json_schema": {"$ref": "#/$defs/x"}}, "cannot be resolved"),
    "a type that there is not": ({"json_schema": {"properties": {"a": {"type": "nope"}}}}, "at /properties/a"),
    "parameters that are a list": (tool([1]), "parameters"),
    "a tool without a name": (tool({}, ""), "name"),
    "a regex that does not parse": ({"regex": "((("}, "unclosed"),
    "a regex with NUL": ({"regex": "a\u0000("}, "grammar"),
    "an endless rule": ({"ebnf": "root ::= root root"}, "no answer"),
    "a rule that is not there": ({"ebnf": "root ::= nowhere"}, "nowhere"),
    "two constraints": ({"regex": "a", "ebnf": 'root ::= "a"'}, "exclude each other"),
    "a tag without a trigger": (
        {"structural_tag": {"structures": [{"begin": "<", "end": ">"}], "triggers": []}},
        "trig",
    ),
}
BOUNDED = {
    "many optional properties": {"json_schema": optional(900)},
    "an exponential regex": {"regex": "(.*a.{20}){5}"},
    "a regex of many repeats": {"regex": "((a{1,100}){1,100}){1,100}"},
    "alternatives of alternatives": {"regex": "(a|aa|aaa|a*)*b"},
    "a long enumeration": {"json_schema": {"enum": [f"value {place}" for place in range(5000)]}},
    "an ambiguous grammar": {"ebnf": 'root ::= root root | "a" | "aa"'},
}


def chat(**more):
    return {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24, "temperature": 0, **more}


@pytest.fixture(scope="module")
def api():
    with LLM(DEMO_MODEL, device="cpu") as llm:
        yield LocalApi(llm)


async def ask(api, body):
    status, answer = await api.whole("POST", "/v1/chat/completions", body)
    return status, json.loads(answer)


def test_a_stop_string_cuts_an_answer_of_a_certain_form_wherever_it_stands(api):
    async def texts(bodies):
        answers = await asyncio.gather(*(ask(api, body) for body in bodies))
        return [answer["choices"][0] for _, answer in answers]

    asked = chat(regex="[a-h]{12} [0-9]{8}", temperature=1.0, seed=3, max_tokens=60)
    (whole,) = asyncio.run(texts([asked]))
    text = whole["message"]["content"]
    assert whole["finish_reason"] == "stop"
    assert len(text) == 21
    stops = [text[at : at + 2] for at in range(20)]
    for stop, cut in zip(stops, asyncio.run(texts([{**asked, "stop": [stop]} for stop in stops])), strict=True):
        assert cut["message"]["content"] == text[: text.index(stop)]
        assert cut["matched_stop"] == stop


def test_hostile_grammars_end_in_a_400_or_in_time_and_leave_other_streams_alone(api):
    async def plain():
        bodies = [chat(seed=place, temperature=1.0, max_tokens=60) for place in range(STREAMS)]
        answers = await asyncio.gather(*(ask(api, body) for body in bodies))
        return [answer["choices"][0] for _, answer in answers]

    async def together():
        wrong = [ask(api, chat(**body)) for body, _ in REFUSED.values()]
        costly = [ask(api, chat(**body)) for body in BOUNDED.values()]
        plain_streams = asyncio.create_task(plain())
        return await asyncio.gather(*wrong), await asyncio.gather(*costly), await plain_streams

    alone = asyncio.run(plain())
    wrong, costly, plain_streams = asyncio.run(together())
    assert plain_streams == alone
    for (name, (_, words)), (status, answer) in zip(REFUSED.items(), wrong, strict=True):
        assert status == 400, (name, answer)
        assert words in answer["error"]["message"], name
    for name, (status, answer) in zip(BOUNDED, costly, strict=True):
        assert status == 200, (name, answer)
        assert answer["usage"]["completion_tokens"] <= 24
