"""Forced calls of real tools (Berkeley Function Calling Leaderboard), filled in by a model that knows nothing."""

import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from tokenyard import LLM
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

PROMPTS = Path(__file__).resolve().parents[2] / "../shared/prompts"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
CLASSES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": int | float}
pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="there is no demo model")
ALL = os.environ.get("TOKENYARD_TEST_ALL") == "1"


def schema_of(value):
    """A BFCL schema as JSON Schema."""
    if isinstance(value, list):
        return [schema_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: schema_of(item) for key, item in value.items()}
    if isinstance(found.get("type"), str):
        found["type"] = TYPES.get(found["type"], found["type"])
        if found["type"] is None:
            del found["type"]
    return {key: found[key] for key in found if key not in ("optional", "default", "format")}


def holds(schema, value) -> bool:
    """Whether a value keeps to a schema, as far as BFCL's go."""
    kind = schema.get("type")
    if kind and (not isinstance(value, CLASSES[kind]) or (kind in ("integer", "number") and isinstance(value, bool))):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(holds(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        named = all(key in value for key in schema.get("required", ()))
        return named and all(holds(properties.get(key, {}), item) for key, item in value.items())
    return True


def cases():
    for name in ("simple_python", "multiple"):
        path = PROMPTS / f"BFCL_v4_{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip(f"{path.name} is not there")
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        yield from (json.loads(line) for line in lines[:: 4 if ALL else 25])


def body(case, bias):
    functions = [schema_of(function) for function in case["function"]]
    return {
        "messages": case["question"][0],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 1,
        # Strings and lists of a model that knows nothing have no end.
        "logit_bias": bias,
    }


def test_calls_are_whole_and_keep_to_the_schemas_of_their_tools():
    async def answers(api, bodies):
        return await asyncio.gather(*(api.whole("POST", "/v1/chat/completions", body) for body in bodies))

    with LLM(DEMO_MODEL, device="cpu") as llm:
        ends = [token for token, id in llm.tokenizer.get_vocab().items() if token[:1] in '"]}']
        bias = {str(llm.tokenizer.token_to_id(token)): 8 for token in ends}
        asked = [body(case, bias) for case in cases()]
        found = asyncio.run(answers(LocalApi(llm), asked))
    whole = 0
    for request, (status, answer) in zip(asked, found, strict=True):
        assert status == 200, answer
        choice = json.loads(answer)["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request["tools"]}
        assert holds(tools[call["function"]["name"]], json.loads(call["function"]["arguments"])), call
        whole += 1
    assert whole > 0.8 * len(asked)
