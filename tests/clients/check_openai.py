"""The openai package: models, chat, streams, scored prompts, structured answers, tools, Responses, refusals."""

import openai
from common import Target, expect, try_client
from pydantic import BaseModel, Field

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]


class Animal(BaseModel):
    name: str = Field(max_length=12)


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


def parsed_answer(target: Target) -> None:
    options = {"model": target.model, "messages": HELLO, "max_tokens": 300}
    answer = client(target).chat.completions.parse(**options, response_format=Animal)
    expect(isinstance(answer.choices[0].message.parsed, Animal), f"parsed {answer.choices[0].message}")
    with client(target).chat.completions.stream(**options, response_format=Animal) as stream:
        final = stream.get_final_completion()
    expect(isinstance(final.choices[0].message.parsed, Animal), f"streamed {final.choices[0].message}")


def forced_tool(target: Target) -> None:
    options = {"model": target.model, "messages": HELLO, "max_tokens": 300}
    options["parallel_tool_calls"] = False
    tools = [openai.pydantic_function_tool(Animal, name="animal")]
    answer = client(target).chat.completions.parse(**options, tools=tools, tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    expect(isinstance(call.function.parsed_arguments, Animal), f"call {call}")
    expect(answer.choices[0].finish_reason == "tool_calls", f"finish_reason {answer.choices[0].finish_reason}")
    named = {"type": "function", "function": {"name": "animal"}}
    with client(target).chat.completions.stream(**options, tools=tools, tool_choice=named) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    Animal.model_validate_json(final.choices[0].message.tool_calls[0].function.arguments)
    expect(len(pieces) > 1, "the arguments came in one piece")


def responses(target: Target) -> None:
    options = {"model": target.model, "input": "Tell me a story.", "max_output_tokens": 12}
    answer = client(target).responses.create(**options, instructions="Be brief.")
    expect(answer.output_text and answer.status in ("incomplete", "completed"), f"response {answer}")
    # The package's stream helper raises for answers that their length cuts off.
    events = list(client(target).responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    expect(kinds[0] == "response.created" and "response.output_text.delta" in kinds, f"events {kinds}")
    expect(events[-1].response.output_text, "the streamed response is empty")


def responses_parsed_and_with_tools(target: Target) -> None:
    options = {"model": target.model, "input": "Name an animal.", "max_output_tokens": 300}
    parsed = client(target).responses.parse(**options, text_format=Animal)
    expect(isinstance(parsed.output_parsed, Animal), f"parsed {parsed.output}")
    tool = {"type": "function", "name": "animal", "parameters": Animal.model_json_schema(), "strict": False}
    with client(target).responses.stream(
        **options, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    call = final.output[0]
    Animal.model_validate_json(call.arguments)
    expect(call.type == "function_call" and len(pieces) > 1, f"output {final.output}")
    history = [{"role": "user", "content": "Name an animal."}, call.model_dump(exclude_none=True)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a fox"}
    try:
        client(target).responses.create(**{**options, "input": [*history, result], "max_output_tokens": 8})
    except openai.BadRequestError as error:
        # The template of the demo model refuses messages of tools.
        expect("role" in str(error), f"another error: {error}")


def embeddings(target: Target) -> None:
    # The package asks for base64 and turns it into floats itself.
    found = client(target).embeddings.create(model=target.model, input=["a fox", "a dog"]).data
    plain = client(target).embeddings.create(model=target.model, input="a fox", encoding_format="float").data
    expect(len(found) == 2 and len(found[0].embedding) == len(plain[0].embedding), "the vectors differ in size")
    far = max(abs(one - other) for one, other in zip(found[0].embedding, plain[0].embedding, strict=True))
    expect(far < 0.05, f"the same text has two vectors, {far} apart")


def errors_are_clear(target: Target) -> None:
    for call, kind, says in (
        (lambda: chat(Target(target.url, "other", "")), openai.NotFoundError, "does not exist"),
        (lambda: client(target).images.generate(model=target.model, prompt="x"), openai.NotFoundError, "not offer"),
        (lambda: wrong_schema(target), openai.BadRequestError, "grammar"),
    ):
        try:
            call()
        except kind as error:
            expect(says in error.message, f"{says!r} is not in {error.message!r}")
        else:
            raise AssertionError(f"no {kind.__name__}")


def wrong_schema(target: Target) -> None:
    schema = {"name": "x", "strict": True, "schema": {"type": "object", "not": {}}}
    form = {"type": "json_schema", "json_schema": schema}
    client(target).chat.completions.create(model=target.model, messages=HELLO, response_format=form)


CHECKS = [
    models,
    chat,
    stream_with_usage,
    stream_helper,
    scored_prompt,
    parsed_answer,
    forced_tool,
    responses,
    responses_parsed_and_with_tools,
    embeddings,
    errors_are_clear,
]

if __name__ == "__main__":
    try_client("openai", CHECKS)
