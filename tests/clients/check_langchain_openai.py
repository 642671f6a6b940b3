"""langchain-openai: invoke, stream, batch; structured output is refused clearly."""

from common import Target, expect, try_client
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    name: str


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


def structured_output_refused(target: Target) -> None:
    for method, says in (("json_schema", "response_format"), ("function_calling", "tool_choice")):
        try:
            chat(target).with_structured_output(Animal, method=method).invoke("Name an animal.")
        except BadRequestError as error:
            expect(says in error.message, f"{says} is not in {error.message!r}")
        else:
            raise AssertionError(f"{method} was not refused")


if __name__ == "__main__":
    try_client("langchain-openai", [invoke, stream, batch, tools_left_to_the_model, structured_output_refused])
