"""langchain-openai: invoke, stream, batch; structured output, tools, the Responses API."""

import json
from pathlib import Path

from common import Target, expect, try_client
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=12)


def chat(target: Target) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=target.v1, api_key="none", model=target.model, max_tokens=12, temperature=0, max_retries=0
    )


def invoke(target: Target) -> None:
    answer = chat(target).invoke("Tell me a story about a fox.")
    expect(answer.content, "the answer is empty")
    expect(answer.usage_metadata["output_tokens"] == 12, f"usage {answer.usage_metadata}")


def stream(target: Target) -> None:
    whole = chat(target).invoke("Tell me a story about a fox.").content
    pieces = list(chat(target).stream("Tell me a story about a fox.", stream_usage=True))
    expect("".join(piece.content for piece in pieces) == whole, "the stream is another text")
    expect(any(piece.usage_metadata for piece in pieces), "the stream has no usage")


def batch(target: Target) -> None:
    answers = chat(target).batch(["Hello.", "A dog.", "A cat."])
    expect(all(answer.content for answer in answers), "an answer is empty")


def tools_left_to_the_model(target: Target) -> None:
    answer = chat(target).bind_tools([Animal]).invoke("Name an animal.")
    expect(answer.content or answer.tool_calls, "the answer is empty")


def structured_output(target: Target) -> None:
    model = ChatOpenAI(
        base_url=target.v1, api_key="none", model=target.model, max_tokens=300, temperature=0, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        asked = model.with_structured_output(Animal, method=method)
        found = asked.invoke("Name an animal.")
        expect(isinstance(found, Animal), f"{method} gave {found}")
        pieces = list(asked.stream("Name an animal."))
        expect(pieces and pieces[-1] == found, f"{method} streamed {pieces}")


def any_json(target: Target) -> None:
    # Any object will do, so that a tiny model writes one without end unless it is made to like the closing brace.
    vocabulary = json.loads((Path(target.tokenizer) / "tokenizer.json").read_text())["model"]["vocab"]
    model = ChatOpenAI(
        base_url=target.v1,
        api_key="none",
        model=target.model,
        max_tokens=60,
        temperature=0,
        logit_bias={str(vocabulary["}"]): 50},
    )
    asked = model.with_structured_output(None, method="json_mode")
    found = asked.invoke("Name an animal.")
    expect(isinstance(found, dict), f"json_mode gave {found}")
    expect(list(asked.stream("Name an animal."))[-1] == found, "json_mode streamed something else")


def forced_tool(target: Target) -> None:
    model = ChatOpenAI(
        base_url=target.v1, api_key="none", model=target.model, max_tokens=300, temperature=0, max_retries=0
    )
    bound = model.bind_tools([Animal], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke("Name an animal.").tool_calls
    Animal(**called[0]["args"])
    whole = None
    for piece in bound.stream("Name an animal."):
        whole = piece if whole is None else whole + piece
    expect(whole.tool_calls[0]["args"] == called[0]["args"], f"streamed {whole.tool_calls}")


def responses(target: Target) -> None:
    model = ChatOpenAI(
        base_url=target.v1, api_key="none", model=target.model, max_tokens=12, max_retries=0, use_responses_api=True
    )
    expect(model.invoke("Tell me a story.").content, "the answer is empty")
    expect(list(model.stream("Tell me a story.")), "the stream is empty")


if __name__ == "__main__":
    try_client(
        "langchain-openai",
        [invoke, stream, batch, tools_left_to_the_model, structured_output, any_json, forced_tool, responses],
    )
