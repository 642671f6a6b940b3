"""The openai package against a real server with the mock executor."""

import asyncio

import pytest

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def client(mock_server):
    with openai.OpenAI(base_url=f"{mock_server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["tokenyard-demo"]
    assert client.models.retrieve("tokenyard-demo").id == "tokenyard-demo"


def test_chat(client):
    answer = client.chat.completions.create(model="tokenyard-demo", messages=HELLO, max_tokens=6, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 6


def test_chat_stream_is_the_same_text(client):
    options = {"model": "tokenyard-demo", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 30
    assert chunks[-2].choices[0].finish_reason == "length"


def test_seed_repeats(client):
    options = {"model": "tokenyard-demo", "messages": HELLO, "max_tokens": 10, "temperature": 1.0}
    texts = [client.chat.completions.create(**options, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_n_and_logprobs(client):
    answer = client.chat.completions.create(
        model="tokenyard-demo", messages=HELLO, max_tokens=3, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 3
        assert len(choice.logprobs.content[0].top_logprobs) == 2
        assert bytes(b for entry in choice.logprobs.content for b in entry.bytes).decode("utf-8", "replace")


def test_stop_string(client):
    options = {"model": "tokenyard-demo", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    stop = text[10:14]
    answer = client.chat.completions.create(**options, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


def test_completions_with_token_ids_and_scores(client):
    answer = client.completions.create(
        model="tokenyard-demo", prompt=[[5, 6, 7], [8, 9]], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for choice, length in zip(answer.choices, (3, 2), strict=True):
        assert len(choice.logprobs.token_logprobs) == length + 1
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value is not None for value in choice.logprobs.token_logprobs[1:])


def test_prefix_is_reported_as_cached(client):
    prompt = "a prefix that is long enough to be found again in the cache"
    client.completions.create(model="tokenyard-demo", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="tokenyard-demo", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_errors_arrive_as_the_right_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tokenyard-demo", messages=HELLO, max_tokens=10**6)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tokenyard-demo", prompt=[10**6])


def test_extra_body_and_headers_are_taken(client):
    answer = client.chat.completions.create(
        model="tokenyard-demo",
        messages=HELLO,
        max_tokens=2,
        extra_body={"top_k": 5, "priority": 3, "slo": {"ttft_ms": 500}, "return_x_sched": True},
        extra_headers={"X-Tenant": "acme", "X-Request-Id": "r-77"},
    )
    assert answer.id == "chatcmpl-r-77"
    assert answer.x_sched["queue_ms"] is not None


def test_many_at_once(mock_server):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{mock_server.url}/v1", api_key="none", timeout=60) as client:

            async def one(number):
                stream = await client.chat.completions.create(
                    model="tokenyard-demo",
                    messages=[{"role": "user", "content": f"Story {number}"}],
                    max_tokens=20,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            return await asyncio.gather(*(one(number) for number in range(40)))

    texts = asyncio.run(run())
    assert len(texts) == 40
    assert all(texts)


def test_responses_are_counted_compacted_and_cut_to_fit(client):
    asked = {"model": "tokenyard-demo", "instructions": "Be brief.", "input": "Hello there"}
    first = client.responses.create(**asked, max_output_tokens=4)
    assert client.responses.input_tokens.count(**asked).input_tokens == first.usage.input_tokens
    fields = {"model": "tokenyard-demo", "previous_response_id": first.id}
    more = client.responses.input_tokens.count(input="And now?", **fields)
    compacted = client.responses.compact(**fields, extra_body={"max_output_tokens": 8})
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens <= 8
    parts = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    after = client.responses.create(model="tokenyard-demo", input=[*parts, *HELLO], max_output_tokens=4)
    assert after.usage.output_tokens == 4
    long = [{"role": role, "content": "word " * 60} for _ in range(40) for role in ("user", "assistant")]
    fields = {"model": "tokenyard-demo", "input": [*long, *HELLO], "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(**fields)
    cut = client.responses.create(**fields, truncation="auto")
    assert more.input_tokens < cut.usage.input_tokens
