"""ollama: chat and generate whole and streamed, JSON by schema, tools, lists of models, refusals."""

import json

import ollama
from common import Target, expect, try_client

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Name an animal."}]


def client_of(target: Target) -> ollama.Client:
    return ollama.Client(host=target.url, timeout=60)


def chat(target: Target) -> None:
    answer = client_of(target).chat(model=target.model, messages=ASK, options={"num_predict": 8, "seed": 3})
    expect(answer.message.content, "there is no text")
    expect(answer.done and answer.eval_count == 8, f"done {answer.done}, eval_count {answer.eval_count}")


def streamed_chat(target: Target) -> None:
    lines = list(client_of(target).chat(model=target.model, messages=ASK, stream=True, options={"num_predict": 8}))
    expect(len(lines) > 2 and lines[-1].done and not lines[0].done, "no stream")


def generate(target: Target) -> None:
    client = client_of(target)
    answer = client.generate(model=target.model, prompt="Once upon", options={"num_predict": 6})
    expect(answer.response and answer.done_reason == "length", f"{answer}")
    pieces = [line.response for line in client.generate(target.model, "Once", stream=True, options={"num_predict": 6})]
    expect("".join(pieces), "the stream is empty")
    expect(client.generate(model=target.model).done_reason == "load", "an empty prompt loads")


def schema(target: Target) -> None:
    answer = client_of(target).chat(model=target.model, messages=ASK, format=SCHEMA, options={"num_predict": 400})
    animal = json.loads(answer.message.content)
    expect(isinstance(animal["legs"], int), f"the answer is {animal}")
    lines = client_of(target).chat(target.model, ASK, format=SCHEMA, stream=True, options={"num_predict": 400})
    pieces = [line.message.content for line in lines]
    expect(len(pieces) > 2 and isinstance(json.loads("".join(pieces))["legs"], int), f"streamed {pieces}")


def tools(target: Target) -> None:
    # This API has no way to force a call, which a tiny model would never make.
    answer = client_of(target).chat(target.model, ASK, tools=[named], options={"num_predict": 8})
    expect(answer.message.content or answer.message.tool_calls, f"{answer}")


def named(name: str) -> str:
    """Look at an animal.

    Args:
        name: its name
    """
    return name


def models(target: Target) -> None:
    client = client_of(target)
    expect(client.list().models[0].model == target.model, "the model is not listed")
    expect(client.ps().models[0].model == target.model, "the model is not loaded")
    shown = client.show(target.model)
    expect("completion" in shown.capabilities, f"capabilities are {shown.capabilities}")
    expect(any(name.endswith("context_length") for name in shown.modelinfo), "there is no context length")


def vectors(target: Target) -> None:
    found = client_of(target).embed(target.model, ["a fox", "a dog"]).embeddings
    expect(len(found) == 2 and abs(sum(value * value for value in found[0]) - 1) < 1e-3, f"vectors {found}")


def refusals(target: Target) -> None:
    client = client_of(target)
    for call, words in (
        (lambda: client.pull("llama"), "does not offer"),
        (lambda: client.chat("none-such", ASK), "does not exist"),
    ):
        try:
            call()
        except ollama.ResponseError as error:
            expect(error.status_code == 404 and words in error.error, f"{error.status_code}: {error.error}")
        else:
            raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    try_client("ollama", [chat, streamed_chat, generate, schema, tools, models, vectors, refusals])
