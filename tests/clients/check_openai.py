"""The openai package: models, chat, streams with usage, scored prompts, and what is refused."""

import openai
from common import Target, expect, try_client
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]


class Animal(BaseModel):
    name: str


def client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=60)


def models(target: Target) -> None:
    expect(target.model in [model.id for model in client(target).models.list()], "the model is not listed")


def chat(target: Target) -> None:
    answer = client(target).chat.completions.create(model=target.model, messages=HELLO, max_tokens=8, temperature=0)
    expect(answer.choices[0].finish_reason == "length", f"finish_reason {answer.choices[0].finish_reason}")
    expect(answer.usage.completion_tokens == 8, f"usage {answer.usage}")


def stream_with_usage(target: Target) -> None:
    options = {"model": target.model, "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client(target).chat.completions.create(**options).choices[0].message.content
    chunks = list(
        client(target).chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == whole, f"streamed {text!r}, whole {whole!r}")
    expect(chunks[0].choices[0].delta.role == "assistant", "the first chunk has no role")
    expect(chunks[-1].usage.completion_tokens == 20, "the last chunk has no usage")


def stream_helper(target: Target) -> None:
    # An answer cut off by its length would make the helper raise, by its own design.
    options = {"model": target.model, "messages": HELLO, "max_tokens": 200, "temperature": 0, "stop": [" "]}
    with client(target).chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    expect("content.delta" in kinds, f"events were {set(kinds)}")
    expect(final.choices[0].finish_reason == "stop", f"finish_reason {final.choices[0].finish_reason}")


def scored_prompt(target: Target) -> None:
    answer = client(target).completions.create(
        model=target.model, prompt="Once upon a time", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    scores = answer.choices[0].logprobs.token_logprobs
    expect(scores[0] is None and all(score <= 0 for score in scores[1:]), f"scores were {scores}")


def errors_are_clear(target: Target) -> None:
    for call, kind, says in (
        (lambda: chat(Target(target.url, "other", "")), openai.NotFoundError, "does not exist"),
        (lambda: parse(target), openai.BadRequestError, "response_format"),
    ):
        try:
            call()
        except kind as error:
            expect(says in error.message, f"{says!r} is not in {error.message!r}")
        else:
            raise AssertionError(f"no {kind.__name__}")


def parse(target: Target) -> None:
    client(target).chat.completions.parse(model=target.model, messages=HELLO, response_format=Animal)


if __name__ == "__main__":
    try_client("openai", [models, chat, stream_with_usage, stream_helper, scored_prompt, errors_are_clear])
