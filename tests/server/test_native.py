"""/generate in SGLang's shape, over the fake engine."""

import pytest

from tests.server.sse import events


def generate(server, **body):
    return server.client.post("/generate", json=body)


def test_one_prompt(server):
    answer = generate(server, text="hello world", sampling_params={"max_new_tokens": 3}, rid="r1").json()
    assert answer["text"] == "hello world the"
    assert answer["output_ids"] == [1, 2, 3]
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 2)
    assert meta["e2e_latency"] > 0


def test_batch_gives_a_list_with_own_sampling_and_ids(server):
    answers = generate(
        server,
        input_ids=[[1, 2], [3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid=["a", "b"],
    ).json()
    assert [answer["output_ids"] for answer in answers] == [[1], [1, 2]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


def test_a_batch_of_one_is_still_a_list(server):
    assert isinstance(generate(server, text=["hello"], sampling_params={"max_new_tokens": 1}).json(), list)


def test_n_gives_a_list(server):
    assert len(generate(server, text="hello", sampling_params={"max_new_tokens": 1, "n": 3}).json()) == 3


def test_stream_is_cumulative(server):
    *chunks, done = events(generate(server, text="hello", sampling_params={"max_new_tokens": 3}, stream=True).text)
    assert done == "[DONE]"
    assert [chunk["text"] for chunk in chunks] == ["hello", "hello world", "hello world the"]
    assert [chunk["output_ids"] for chunk in chunks] == [[1], [1, 2], [1, 2, 3]]
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert "index" not in chunks[0]


def test_batch_stream_has_an_index(server):
    *chunks, _ = events(generate(server, text=["hello"] * 2, sampling_params={"max_new_tokens": 1}, stream=True).text)
    assert sorted(chunk["index"] for chunk in chunks) == [0, 1]


def test_logprobs_of_prompt_and_output(server):
    answer = generate(
        server,
        text="hello world",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    ).json()
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 1, "hello"], [-0.5, 2, "world"]]
    assert meta["output_token_logprobs"] == [[-0.5, 1, "hello"], [-0.5, 2, "world"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 1, "hello"]]
    assert meta["input_top_logprobs"][0] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": "x", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
        ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
        ({"text": "x", "lora_path": "y"}, "lora_path"),
        ({"text": "x", "bootstrap_host": "y"}, "bootstrap_host"),
        ({"text": "x", "input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "x", "data_parallel_rank": 2}, "data_parallel_rank"),
    ],
)
def test_wrong_requests_get_a_clear_400(server, body, param):
    answer = generate(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
