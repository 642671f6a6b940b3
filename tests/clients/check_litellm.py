"""litellm: its openai/ and hosted_vllm/ routes, whole, streamed and async."""

import asyncio
import os

# Without this it asks the web for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from common import Target, expect, try_client

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]


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


if __name__ == "__main__":
    try_client("litellm", [both_routes, streams, text_completion, several_at_once, unknown_model])
