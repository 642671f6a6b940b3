"""/v1/completions over the fake engine."""

import pytest

from tests.server.sse import events


def complete(server, **body):
    return server.client.post("/v1/completions", json=body)


def test_default_is_sixteen_tokens(server):
    content = complete(server, prompt="hello").json()
    assert content["object"] == "text_completion"
    assert content["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("hello world", [2]), (["hello", "hello world"], [1, 2]), ([1, 2, 3], [3]), ([[1], [1, 2]], [1, 2])],
)
def test_every_form_of_prompt(server, prompt, lengths):
    content = complete(server, prompt=prompt, max_tokens=2).json()
    assert [choice["index"] for choice in content["choices"]] == list(range(len(lengths)))
    assert all(choice["text"] == "hello world" for choice in content["choices"])
    assert content["usage"]["prompt_tokens"] == sum(lengths)


def test_several_prompts_and_answers_stream_under_their_index(server):
    *chunks, done = events(complete(server, prompt=["hello", "dog"], n=2, max_tokens=2, stream=True).text)
    assert done == "[DONE]"
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"hello world"}
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 4


def test_scoring_as_lm_eval_does_it(server):
    """Token ids with echo, logprobs and one token: null first, then one entry a token, the last one generated."""
    content = complete(server, prompt=[[1, 2, 3], [4, 5]], echo=True, logprobs=1, max_tokens=1, temperature=0).json()
    first, second = (choice["logprobs"] for choice in content["choices"])
    assert first["tokens"] == ["hello", "world", "the", "hello"]
    assert first["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert first["top_logprobs"][0] is None
    assert first["top_logprobs"][1] == {"world": -0.5}
    assert first["text_offset"] == [0, 5, 10, 13]
    assert len(second["tokens"]) == 3
    assert server.manager.specs[0].logprobs.prompt_from == 0


def test_echo_with_no_tokens_scores_the_prompt_alone(server):
    content = complete(server, prompt="hello world", echo=True, logprobs=1, max_tokens=0).json()
    choice = content["choices"][0]
    assert choice["text"] == "hello world"
    assert choice["logprobs"]["tokens"] == ["hello", "world"]
    assert content["usage"]["completion_tokens"] == 0


def test_echo_in_a_stream_comes_first(server):
    *chunks, _ = events(complete(server, prompt="lazy dog", echo=True, max_tokens=2, stream=True).text)
    assert chunks[0]["choices"][0]["text"] == "lazy dog"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "lazy doghello world"


def test_output_logprobs_without_echo(server):
    logprobs = complete(server, prompt="hello", logprobs=2, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["hello", "world"]
    assert logprobs["top_logprobs"][0] == {"hello": -0.5, "world": -1.5}


def test_streamed_logprob_offsets_continue(server):
    *chunks, _ = events(complete(server, prompt="hello", logprobs=1, max_tokens=3, stream=True).text)
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 5, 10]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "logprobs": 50}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_wrong_requests_get_a_clear_400(server, body, param):
    answer = complete(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_prompt_count_is_limited(start):
    server = start(max_prompts=2)
    assert complete(server, prompt=["hello"] * 3).status_code == 400
