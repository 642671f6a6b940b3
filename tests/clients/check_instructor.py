"""instructor: tool mode and JSON schema mode are refused at once, with the name of the field."""

import instructor
import openai
from common import Target, expect, try_client
from pydantic import BaseModel


class Animal(BaseModel):
    name: str


def refused(target: Target, mode: instructor.Mode, says: str) -> None:
    plain = openai.OpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=mode)
    try:
        client.chat.completions.create(
            model=target.model,
            messages=[{"role": "user", "content": "Name an animal."}],
            response_model=Animal,
            max_retries=0,
        )
    except Exception as error:  # instructor wraps the client's error in its own
        expect("400" in str(error) and says in str(error), f"{says} is not in {error}")
    else:
        raise AssertionError(f"{mode} was not refused")


def tool_mode_refused(target: Target) -> None:
    refused(target, instructor.Mode.TOOLS, "tool_choice")


def json_schema_mode_refused(target: Target) -> None:
    refused(target, instructor.Mode.JSON_SCHEMA, "response_format")


if __name__ == "__main__":
    try_client("instructor", [tool_mode_refused, json_schema_mode_refused])
