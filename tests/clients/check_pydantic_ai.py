"""pydantic-ai: text, typed output by tool and by form, tools, over both of OpenAI's APIs, whole and streamed."""

import asyncio

from common import Target, expect, try_client
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_stream, model_request_sync
from pydantic_ai.messages import ModelRequest, ModelResponse
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Name an animal."


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=12)


def model(target: Target, kind: type = OpenAIChatModel) -> OpenAIChatModel:
    return kind(target.model, provider=OpenAIProvider(base_url=target.v1, api_key="none"))


def text(target: Target) -> None:
    agent = Agent(model(target), model_settings={"max_tokens": 12, "temperature": 0})
    result = agent.run_sync(ASK)
    expect(result.output and result.usage.output_tokens == 12, f"result {result}")

    async def stream() -> str:
        async with agent.run_stream(ASK) as streamed:
            return "".join([piece async for piece in streamed.stream_text(delta=True, debounce_by=None)])

    expect(asyncio.run(stream()) == result.output, "the stream is another text")


def structured_output(target: Target) -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for form in (ToolOutput(Animal), NativeOutput(Animal)):
            settings = {"max_tokens": 300, "temperature": 0, "parallel_tool_calls": False}
            agent = Agent(model(target, kind), output_type=form, model_settings=settings)
            name = f"{kind.__name__}, {type(form).__name__}"
            expect(isinstance(agent.run_sync(ASK).output, Animal), name)

            async def stream(agent: Agent = agent) -> Animal:
                async with agent.run_stream(ASK) as streamed:
                    return await streamed.get_output()

            expect(isinstance(asyncio.run(stream()), Animal), f"{name}, streamed")


def a_tool_is_called(target: Target) -> None:
    tool = ToolDefinition(name="animal", parameters_json_schema=Animal.model_json_schema())
    wishes = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    settings = {"max_tokens": 300, "temperature": 0, "parallel_tool_calls": False}
    ask = [ModelRequest.user_text_prompt(ASK)]
    options = {"model_settings": settings, "model_request_parameters": wishes}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        answer = model_request_sync(model(target, kind), ask, **options)
        Animal.model_validate(answer.tool_calls[0].args_as_dict())

        async def stream(kind: type = kind) -> ModelResponse:
            async with model_request_stream(model(target, kind), ask, **options) as streamed:
                expect([event async for event in streamed], "the stream is empty")
                return streamed.get()

        expect(asyncio.run(stream()).tool_calls[0].args_as_dict() == answer.tool_calls[0].args_as_dict(), kind.__name__)


if __name__ == "__main__":
    try_client("pydantic-ai-slim", [text, structured_output, a_tool_is_called])
