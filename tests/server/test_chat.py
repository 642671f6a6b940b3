"""/v1/chat/completions over the fake engine."""

import pytest

from tests.server.fake import WORDS, FakeManager
from tests.server.sse import events
from tokenyard.base import Slo

HELLO = [{"role": "user", "content": "hello world"}]


def chat(server, **body):
    return server.client.post("/v1/chat/completions", json={"messages": HELLO, **body})


def test_whole_answer(server):
    answer = chat(server, model="fake", max_tokens=3)
    assert answer.status_code == 200
    content = answer.json()
    assert content["object"] == "chat.completion"
    assert content["model"] == "fake"
    choice = content["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world the", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert content["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_stream_has_role_first_finish_in_last_content_chunk_then_usage_then_done(server):
    answer = chat(server, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "hello world the"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert chunks[-1]["choices"][0]["delta"]["content"] == " the"
    assert {chunk["id"] for chunk in [*chunks, usage]} == {usage["id"]}
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)


def test_stream_without_usage_option_has_no_usage(server):
    *chunks, done = events(chat(server, max_tokens=2, stream=True).text)
    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_continuous_usage(server):
    options = {"continuous_usage_stats": True}
    *chunks, _ = events(chat(server, max_tokens=3, stream=True, stream_options=options).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk] == [1, 2, 3]


def test_n_answers_stream_under_their_index(server):
    *chunks, _ = events(chat(server, max_tokens=2, stream=True, n=3).text)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in own) == "hello world"
        assert own[-1]["finish_reason"] == "length"


def test_usage_counts_the_shared_prompt_once(server):
    usage = chat(server, max_tokens=2, n=3).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 6)


def test_logprobs(server):
    content = chat(server, max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["hello", "world"]
    assert content[0]["bytes"] == list(b"hello")
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["hello", "world"]


def test_stream_carries_logprobs_and_token_ids(server):
    *chunks, _ = events(chat(server, max_tokens=2, stream=True, logprobs=True, return_token_ids=True).text)
    choices = [chunk["choices"][0] for chunk in chunks[1:]]
    assert [choice["token_ids"] for choice in choices] == [[1], [2]]
    assert [choice["logprobs"]["content"][0]["token"] for choice in choices] == ["hello", "world"]


def test_default_max_tokens_is_the_rest_of_the_context(server):
    answer = chat(server).json()
    assert answer["usage"]["completion_tokens"] == FakeManager.context_length - 2


def test_too_large_max_tokens_is_refused_with_the_openai_code(server):
    answer = chat(server, max_tokens=1000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_wrong_min_tokens_is_named_as_the_client_wrote_it(server):
    answer = chat(server, max_tokens=4, min_tokens=5)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "min_tokens"


def test_all_fields_reach_the_engine(server):
    body = {
        "max_completion_tokens": 4,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "stop": "end",
        "stop_token_ids": [9],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": -5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "priority": 5,
        "deadline_ms": 900,
        "slo": {"ttft_ms": 200, "tpot_ms": 50},
        "tenant": "acme",
        "cache_salt": "pepper",
        "rid": "mine",
    }
    assert chat(server, **body).status_code == 200
    spec = server.manager.specs[0]
    sampling = spec.sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.temperature) == (4, 2, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 7, 0.1)
    assert (sampling.stop, sampling.stop_token_ids) == (["end"], [9])
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (sampling.logit_bias, sampling.ignore_eos) == ({3: -5}, True)
    assert not spec.text_options.skip_special_tokens
    assert (spec.seed, spec.priority, spec.deadline_ms, spec.tenant) == (42, 5, 900, "acme")
    assert (spec.cache_salt, spec.rid, spec.clamp_max_new_tokens) == ("pepper", "mine", False)
    assert spec.slo == Slo(ttft_ns=200_000_000, tpot_ns=50_000_000)
    assert not spec.add_special_tokens


def test_headers_carry_request_id_tenant_and_priority(server):
    headers = {"X-Request-Id": "abc", "X-Tenant": "acme", "X-Priority": "high"}
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}, headers=headers)
    spec = server.manager.specs[0]
    assert (spec.rid, spec.tenant, spec.service_class) == ("abc", "acme", "high")
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json()["id"] == "chatcmpl-abc"


def test_null_fields_mean_not_given(server):
    answer = chat(server, max_tokens=1, temperature=None, stop=None, n=None, logit_bias=None, stream=None)
    assert answer.status_code == 200


def test_text_parts_and_template_options_passed(server):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "dog"}]
    kwargs = {"enable_thinking": False}
    messages = [{"role": "user", "content": parts}]
    assert chat(server, messages=messages, max_tokens=1, chat_template_kwargs=kwargs).status_code == 200
    _, rendered, options = server.manager.calls[0]
    assert rendered[0]["content"] == parts
    assert options["chat_template_kwargs"] == kwargs
    assert options["add_generation_prompt"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": "3"}, "max_tokens", "int"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only text"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is required"),
        ({"regex": "a+", "ebnf": 'root ::= "x"'}, "ebnf", "exclude"),
        ({"regex": "a+", "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"ebnf": "root ::= x("}, "ebnf", "ebnf"),
        ({"json_schema": "{"}, "json_schema", "not valid JSON"),
        ({"structured_outputs": {"choice": []}}, "choice", "list of strings"),
        ({"structural_tag": {"structures": []}}, "structural_tag", "needs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not supported"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"data_parallel_rank": 1}, "data_parallel_rank", "no rank 1"),
        ({"rid": ["a", "b"]}, "rid", "one string"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "between"),
        ({"stop": [""]}, "stop", "empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"priority": "a b"}, "priority", "word"),
        ({"deadline_ms": 0}, "deadline_ms", "above 0"),
        ({"service_tier": "gold"}, "service_tier", "one of"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ],
)
def test_wrong_requests_get_a_clear_400(server, body, param, words):
    answer = chat(server, **{"max_tokens": 1, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert not server.manager.specs


def test_text_format_and_auto_tools_are_taken(server):
    tools = [{"type": "function", "function": {"name": "now"}}]
    answer = chat(server, max_tokens=1, response_format={"type": "text"}, tool_choice="auto", tools=tools)
    assert answer.status_code == 200
    assert server.manager.calls[0][2]["tools"] == tools


def test_fields_that_are_met_anyway_are_accepted_in_strict_mode_too(start):
    server = start(strict_api=True)
    idle = {
        "bad_words": [],
        "lora_path": None,
        "use_beam_search": False,
        "data_parallel_rank": 0,
        "modalities": ["text"],
    }
    hints = {"prompt_cache_key": "k", "verbosity": "low", "function_call": "auto", "separate_reasoning": True}
    assert chat(server, max_tokens=1, **idle, **hints).status_code == 200


def test_documents_and_reasoning_effort_reach_the_template(server):
    body = {"documents": [{"text": "x"}], "reasoning_effort": "low", "chat_template_kwargs": {"mood": "calm"}}
    assert chat(server, max_tokens=1, **body).status_code == 200
    variables = server.manager.calls[0][2]["chat_template_kwargs"]
    assert variables == {"documents": [{"text": "x"}], "reasoning_effort": "low", "mood": "calm"}


def test_an_extra_key_divides_the_cache_further(server):
    for keys in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}):
        assert chat(server, max_tokens=1, **keys).status_code == 200
    assert len({spec.cache_salt for spec in server.manager.specs}) == 4


def test_unknown_model_is_404(server):
    answer = chat(server, model="other", max_tokens=1)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_unknown_fields_are_ignored_unless_strict(start):
    assert chat(start(), max_tokens=1, surprise=1).status_code == 200
    answer = chat(start(strict_api=True), max_tokens=1, surprise=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "surprise"


def test_x_sched_block_on_demand(server):
    block = chat(server, max_tokens=2, return_x_sched=True, priority="high").json()["x_sched"]
    assert block["queue_ms"] > 0
    assert block["cached_tokens"] == 2
    assert (block["class"], block["decode_ms"], block["paused_ms"]) == ("high", 1.0, 0.0)
    assert "x_sched" not in chat(server, max_tokens=2).json()
    *_, closing, done = events(chat(server, max_tokens=2, return_x_sched=True, stream=True).text)
    assert (closing["choices"], closing["x_sched"]["queue_ms"], done) == ([], 1.0, "[DONE]")


def test_non_ascii_text_is_whole(server):
    answer = chat(server, max_tokens=len(WORDS), stream=True)
    *chunks, _ = events(answer.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == " ".join(WORDS)
