"""instructor: objects out of tool mode and JSON schema mode, whole and streamed in part."""

import instructor
import openai
from common import Target, expect, try_client
from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=9)


def made(target: Target, mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=mode)
    options = {
        "model": target.model,
        "messages": [{"role": "user", "content": "Name an animal."}],
        "response_model": Animal,
        "max_tokens": 300,
        "max_retries": 0,
        "temperature": 0,
    }
    animal = client.chat.completions.create(**options)
    expect(isinstance(animal, Animal), f"{mode} gave {animal}")
    parts = list(client.chat.completions.create_partial(**options))
    expect(len(parts) > 1, f"{mode} streamed in one piece")
    Animal.model_validate(parts[-1].model_dump())


def tool_mode(target: Target) -> None:
    made(target, instructor.Mode.TOOLS)


def json_schema_mode(target: Target) -> None:
    made(target, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    try_client("instructor", [tool_mode, json_schema_mode])
