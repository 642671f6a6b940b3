"""litellm: its openai/ and hosted_vllm/ routes, whole, streamed and async; tools, typed answers, other APIs."""

import asyncio
import json
import os

# Without this it asks the web for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from common import Target, expect, try_client
from pydantic import BaseModel, Field

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]


class Animal(BaseModel):
    name: str = Field(max_length=12)


def options(target: Target, route: str) -> dict:
    return {
        "model": f"{route}/{target.model}",
        "messages": HELLO,
        "api_base": target.v1,
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
    }


def both_routes(target: Target) -> None:
    for route in ("openai", "hosted_vllm"):
        answer = litellm.completion(**options(target, route))
        expect(answer.choices[0].message.content, f"{route}: the answer is empty")
        expect(answer.usage.completion_tokens == 12, f"{route}: usage {answer.usage}")


def streams(target: Target) -> None:
    for route in ("openai", "hosted_vllm"):
        whole = litellm.completion(**options(target, route)).choices[0].message.content
        chunks = litellm.completion(**options(target, route), stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        expect(text.strip() == whole.strip(), f"{route}: streamed {text!r}, whole {whole!r}")


def text_completion(target: Target) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        prompt="Once upon a time",
        api_base=target.v1,
        api_key="none",
        max_tokens=5,
    )
    expect(answer.choices[0].text, "the answer is empty")


def several_at_once(target: Target) -> None:
    async def run() -> list:
        return await asyncio.gather(*(litellm.acompletion(**options(target, "openai")) for _ in range(8)))

    expect(len({answer.choices[0].message.content for answer in asyncio.run(run())}) == 1, "greedy answers differ")


def unknown_model(target: Target) -> None:
    try:
        litellm.completion(**options(target, "openai") | {"model": "openai/other"}, num_retries=0)
    except litellm.NotFoundError as error:
        expect("does not exist" in str(error), str(error))
    else:
        raise AssertionError("an unknown model was answered")


def forced_tool(target: Target) -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    tool = {"type": "function", "function": {"name": "animal", "parameters": parameters}}
    for route in ("openai", "hosted_vllm"):
        asked = options(target, route) | {"tools": [tool], "max_tokens": 300, "parallel_tool_calls": False}
        called = litellm.completion(**asked, tool_choice="required").choices[0].message.tool_calls[0].function
        expect(called.name == "animal" and "name" in json.loads(called.arguments), f"{route}: {called}")
        chunks = list(litellm.completion(**asked, tool_choice="required", stream=True))
        pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        text = "".join(piece.function.arguments or "" for piece in pieces)
        expect(text == called.arguments, f"{route}: streamed {text!r}, whole {called.arguments!r}")


def typed_answer(target: Target) -> None:
    asked = options(target, "openai") | {"response_format": Animal, "max_tokens": 300}
    Animal.model_validate_json(litellm.completion(**asked).choices[0].message.content)
    chunks = litellm.completion(**asked, stream=True)
    Animal.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def other_apis(target: Target) -> None:
    at = {"api_base": target.v1, "api_key": "none"}
    answer = litellm.responses(model=f"openai/{target.model}", input="Tell me a story.", max_output_tokens=12, **at)
    expect(answer.output, "the response is empty")
    vectors = litellm.embedding(model=f"openai/{target.model}", input=["a fox", "a dog"], **at).data
    expect(len(vectors) == 2 and len(vectors[0]["embedding"]) > 1, f"embeddings {vectors}")


CHECKS = [
    *(both_routes, streams, text_completion, several_at_once, unknown_model),
    *(forced_tool, typed_answer, other_apis),
]

if __name__ == "__main__":
    try_client("litellm", CHECKS)
