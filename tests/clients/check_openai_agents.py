"""openai-agents: text, typed output and tools over chat completions and over the Responses API, whole and streamed."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import Target, expect, try_client
from pydantic import BaseModel, Field

ASK = "Name an animal."
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Animal(BaseModel):
    name: str = Field(max_length=12)


def model(target: Target, kind: type) -> object:
    client = openai.AsyncOpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=60)
    return kind(target.model, client)


async def both(agent: Agent) -> tuple[object, object]:
    """The final output of a run, and of a streamed one."""
    whole = await Runner.run(agent, ASK)
    streamed = Runner.run_streamed(agent, ASK)
    events = [event async for event in streamed.stream_events()]
    expect(any(event.type == "raw_response_event" for event in events), "the stream has no events")
    return whole.final_output, streamed.final_output


def text(target: Target) -> None:
    for kind in MODELS:
        # The package takes an answer of the Responses API that its length cuts off for a failure.
        settings = ModelSettings(max_tokens=12 if kind is OpenAIChatCompletionsModel else 400, temperature=0)
        agent = Agent(name="a", instructions="Be brief.", model=model(target, kind), model_settings=settings)
        whole, streamed = asyncio.run(both(agent))
        expect(whole and whole == streamed, f"{kind.__name__}: {whole!r}, streamed {streamed!r}")


def typed_output(target: Target) -> None:
    for kind in MODELS:
        settings = ModelSettings(max_tokens=300, temperature=0)
        agent = Agent(name="a", model=model(target, kind), model_settings=settings, output_type=Animal)
        found = asyncio.run(both(agent))
        expect(all(isinstance(each, Animal) for each in found), f"{kind.__name__}: {found}")


def a_tool_is_called(target: Target) -> None:
    @function_tool
    def animal(name: str) -> str:
        """Look at an animal."""
        return f"seen: {name}"

    for kind in MODELS:
        settings = ModelSettings(max_tokens=300, temperature=0, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(
            name="a",
            model=model(target, kind),
            model_settings=settings,
            tools=[animal],
            tool_use_behavior="stop_on_first_tool",
        )
        found = asyncio.run(both(agent))
        expect(all(str(each).startswith("seen: ") for each in found), f"{kind.__name__}: {found}")


if __name__ == "__main__":
    set_tracing_disabled(True)
    try_client("openai-agents", [text, typed_output, a_tool_is_called])
