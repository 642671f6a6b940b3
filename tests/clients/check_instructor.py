"""instructor: objects out of tool mode and both JSON modes, whole and streamed in part."""

import json
from pathlib import Path

import instructor
import openai
from common import Target, expect, try_client
from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=9)


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def made(target: Target, mode: instructor.Mode, kind: type[BaseModel] = Animal, **more: object) -> None:
    plain = openai.OpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=mode)
    options = {
        "model": target.model,
        "messages": [{"role": "user", "content": "Name an animal."}],
        "response_model": kind,
        "max_tokens": 300,
        "max_retries": 0,
        "temperature": 0,
        **more,
    }
    animal = client.chat.completions.create(**options)
    expect(isinstance(animal, kind), f"{mode} gave {animal}")
    parts = list(client.chat.completions.create_partial(**options))
    expect(len(parts) > 1, f"{mode} streamed in one piece")
    kind.model_validate(parts[-1].model_dump())


def tool_mode(target: Target) -> None:
    made(target, instructor.Mode.TOOLS)


def json_schema_mode(target: Target) -> None:
    made(target, instructor.Mode.JSON_SCHEMA)


def json_mode(target: Target) -> None:
    # Any object will do, so that a tiny model writes one without end unless it is made to like the closing brace.
    vocabulary = json.loads((Path(target.tokenizer) / "tokenizer.json").read_text())["model"]["vocab"]
    made(target, instructor.Mode.JSON, Anything, logit_bias={str(vocabulary["}"]): 50})


if __name__ == "__main__":
    try_client("instructor", [tool_mode, json_schema_mode, json_mode])
