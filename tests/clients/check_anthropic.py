"""anthropic: messages whole and streamed, forced tools, several turns, counted tokens, errors in its own format."""

import anthropic
from common import Target, expect, try_client

TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 8}, "times": {"type": "integer", "maximum": 9}},
        "required": ["word"],
    },
}
FORCED = {"type": "tool", "name": "look_up"}


def client_of(target: Target) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0, timeout=60)


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def message(target: Target) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=123"},
        {"type": "text", "text": "You tell stories."},
    ]
    answer = client_of(target).messages.create(
        model=target.model, max_tokens=12, system=system, messages=ask("Tell me a story.")
    )
    expect(answer.content[0].type == "text" and answer.content[0].text, "there is no text")
    expect(answer.stop_reason in ("max_tokens", "end_turn"), f"stop_reason is {answer.stop_reason}")
    expect(answer.usage.output_tokens > 0 and answer.usage.input_tokens >= 0, "usage is empty")


def stream(target: Target) -> None:
    with client_of(target).messages.stream(model=target.model, max_tokens=12, messages=ask("Tell me more.")) as events:
        text = "".join(events.text_stream)
        whole = events.get_final_message()
    expect(text == whole.content[0].text, "the pieces are not the whole")
    expect(whole.usage.output_tokens > 0, "usage is empty")


def forced_tool(target: Target) -> None:
    answer = client_of(target).messages.create(
        model=target.model, max_tokens=300, messages=ask("Look it up."), tools=[TOOL], tool_choice=FORCED
    )
    call = answer.content[0]
    expect(call.type == "tool_use" and call.name == "look_up", f"no call but {call}")
    expect(isinstance(call.input["word"], str), f"the input is {call.input}")
    expect(answer.stop_reason == "tool_use", f"stop_reason is {answer.stop_reason}")
    turns = [
        *ask("Look it up."),
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It is a fish."}]},
    ]
    try:
        again = client_of(target).messages.create(model=target.model, max_tokens=8, messages=turns, tools=[TOOL])
        expect(again.content, "the second turn is empty")
    except anthropic.BadRequestError as error:
        # The template of the demo model refuses messages of tools.
        expect("role" in str(error), f"another error: {error}")


def streamed_tool(target: Target) -> None:
    with client_of(target).messages.stream(
        model=target.model, max_tokens=300, messages=ask("Look it up."), tools=[TOOL], tool_choice=FORCED
    ) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        whole = events.get_final_message()
    expect(len(pieces) > 1, "the arguments did not come in pieces")
    expect(isinstance(whole.content[0].input["word"], str), f"the input is {whole.content[0].input}")


def counted(target: Target) -> None:
    client = client_of(target)
    few = client.messages.count_tokens(model=target.model, messages=ask("hello")).input_tokens
    many = client.messages.count_tokens(model=target.model, messages=ask("hello"), system="Be kind. " * 9).input_tokens
    expect(many > few > 0, f"counted {few} and {many}")


def errors(target: Target) -> None:
    try:
        client_of(target).messages.create(model="none-such", max_tokens=3, messages=ask("x"))
    except anthropic.NotFoundError as error:
        expect(error.body["error"]["type"] == "not_found_error", f"the body is {error.body}")
    else:
        raise AssertionError("an unknown model was answered")


if __name__ == "__main__":
    try_client("anthropic", [message, stream, forced_tool, streamed_tool, counted, errors])
