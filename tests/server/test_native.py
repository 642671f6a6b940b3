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
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 101}, "top_logprobs_num"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
        ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
        ({"text": ["x", "y"], "lora_path": ["tuned"]}, "lora_path"),
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


def test_no_new_tokens_give_the_prompt_alone(server):
    body = {"text": "hello world", "sampling_params": {"max_new_tokens": 0}}
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 100}
    answer = generate(server, **body).json()
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["completion_tokens"] == 0
    assert len(answer["meta_info"]["input_token_logprobs"]) == 2
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert server.manager.specs[0].logprobs.top == 100


def test_log_probabilities_of_named_tokens_stand_apart_from_the_top_ones(server):
    body = {"text": "hello", "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [5, 7]}
    meta = generate(server, **body, sampling_params={"max_new_tokens": 1}).json()["meta_info"]
    assert [entry[1] for entry in meta["output_top_logprobs"][0]] == [1]
    assert [entry[1] for entry in meta["output_token_ids_logprobs"][0]] == [5, 7]


def test_scores_are_probabilities_of_the_labels(server):
    body = {"query": "hello", "items": ["world", "the"], "label_token_ids": [5, 7]}
    answer = server.client.post("/v1/score", json=body).json()
    assert len(answer["scores"]) == 2
    assert all(0 < value < 1 for row in answer["scores"] for value in row)
    assert answer["usage"]["completion_tokens"] == 0
    soft = server.client.post("/v1/score", json={**body, "apply_softmax": True}).json()["scores"]
    assert all(abs(sum(row) - 1) < 1e-9 for row in soft)
    assert server.manager.specs[0].logprobs.token_ids == [5, 7]
    ids = {**body, "query": [1], "items": [[2], [3]], "item_first": True}
    server.client.post("/v1/score", json=ids)
    assert list(server.manager.specs[-1].input_ids) == [3, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": []}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"items": [[1]]}, "items"),
        ({"query": None}, "query"),
    ],
)
def test_wrong_scores_are_refused(server, body, param):
    fields = {"query": "hello", "items": ["world"], "label_token_ids": [1], **body}
    answer = server.client.post("/v1/score", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_logprobs_of_a_prompt_without_an_answer_are_those_of_all_its_tokens(server):
    body = {"input_ids": [[1, 2, 3], [4, 5]], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    first, second = server.client.post("/generate", json=body).json()
    assert [entry[0] is None for entry in first["meta_info"]["input_token_logprobs"]] == [True, False, False]
    assert [entry[1] for entry in second["meta_info"]["input_token_logprobs"]] == [4, 5]
