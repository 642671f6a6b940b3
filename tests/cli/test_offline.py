"""The offline LLM over the mock executor."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tokenyard import LLM, SamplingParams
from tokenyard.base import NS_PER_S, ConfigError, EngineDeadError, InvalidRequestError, SessionEnded, Submit, TurnEnded
from tokenyard.config import DEMO_MODEL
from tokenyard.engine.frontend.sampling_defaults import read_sampling_defaults
from tokenyard.engine.text.chat_template import load_chat_template
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import Replay

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="mock", mock_step_ms=0.0) as llm:
        yield llm


def test_answers_come_in_the_order_of_the_prompts(llm):
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    prompts = [f"prompt number {number}" for number in range(20)]
    together = [answer.text for answer in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, params)[0].text for prompt in prompts]
    assert together == alone
    assert len(set(together)) > 1


def test_token_ids_in_and_out(llm):
    answer = llm.generate([5, 6, 7], SamplingParams(max_new_tokens=4))[0]
    assert answer.prompt_tokens == 3
    completion = answer.completions[0]
    assert len(completion.token_ids) == 4
    assert completion.finish_reason == "length"
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_several_answers_and_params_per_prompt(llm):
    many, one = llm.generate(["a", "b"], [SamplingParams(n=3, max_new_tokens=2), SamplingParams(max_new_tokens=1)])
    assert [len(completion.token_ids) for completion in many.completions] == [2, 2, 2]
    assert len(one.completions) == 1


def test_stop_string_ends_the_answer_and_is_cut_off(llm):
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    text = llm.generate("Hello there", params)[0].text
    stop = text[8:11]
    first = text.index(stop)
    params = SamplingParams(max_new_tokens=12, temperature=0.0, stop=[stop])
    completion = llm.generate("Hello there", params)[0].completions[0]
    assert completion.text == text[:first]
    assert (completion.finish_reason, completion.matched) == ("stop", stop)


def test_async_answers(llm):
    async def both():
        params = SamplingParams(max_new_tokens=3)
        return await asyncio.gather(llm.generate_async("a", params), llm.generate_async("b", params))

    assert [len(answer.completions[0].token_ids) for answer in asyncio.run(both())] == [3, 3]


def test_wrong_requests_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="token id 1000000 is not in the vocabulary"):
        llm.generate([10**6])
    for no_prompt in (None, 5, [1.5], b"x", [["a"]], ["a", None], [[1], [[2], [3, 4]]]):
        with pytest.raises(InvalidRequestError, match="a text, a list of token ids or a list of messages"):
            llm.generate(no_prompt)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate([[]])
    with pytest.raises(InvalidRequestError, match="maximum context length is 1024 tokens"):
        llm.generate([1] * 5000)
    with pytest.raises(InvalidRequestError, match="sampling params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate("a", SamplingParams(temperature=-1.0))
    with pytest.raises(InvalidRequestError, match="empty strings"):
        llm.generate("a", SamplingParams(stop=[""]))
    with pytest.raises(InvalidRequestError, match=r"wrong type.*max_new_tokens"):
        llm.generate("a", SamplingParams(max_new_tokens="many"))
    with pytest.raises(InvalidRequestError, match="logit_bias names a token outside"):
        llm.generate("a", SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(InvalidRequestError, match="not int"):
        llm.generate("a", 3)


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def demo():
    with LLM(device="cpu", max_total_tokens=2048, threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_schema": SCHEMA}, r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),
        ({"response_format": {"type": "json_object"}}, r"\{(.|\s)*"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"ebnf": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"logit_bias": {"100": 100.0}}, r"(.)\1*"),
    ],
)
def test_answers_keep_to_the_constraints_of_http_bodies(demo, fields, pattern):
    params = SamplingParams(max_tokens=40, temperature=0.0)
    by_name = demo.generate("Tell me", params, **fields)[0].text
    assert re.fullmatch(pattern, by_name)
    assert demo.generate("Tell me", {"max_new_tokens": 40, "temperature": 0.0, **fields})[0].text == by_name
    assert (
        demo.generate("Tell me", replace(SamplingParams(**fields), max_new_tokens=40, temperature=0.0))[0].text
        == by_name
    )


def test_a_forced_call_is_a_message(demo):
    answer = demo.chat(HI, tools=[STRICT], tool_choice="required", parallel_tool_calls=False, max_tokens=60, seed=0)[0]
    [call] = answer.completions[0].message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in "xy"
    assert demo.chat(HI, max_tokens=2)[0].completions[0].message is None
    plain = demo.chat(HI, max_tokens=2, separate_reasoning=True)[0]
    assert plain.completions[0].message["content"] == plain.text


def test_a_streamed_call_ends_its_turn_as_a_call(demo, monkeypatch):
    kinds = []
    monkeypatch.setattr(demo.manager, "end_turn", lambda rid, event: kinds.append(event.kind))
    list(demo.stream(HI, tools=[STRICT], tool_choice="required", max_tokens=60, seed=0, session_id="s"))
    assert kinds == ["tool"]


def test_vectors_scores_and_logprobs(demo):
    vectors = demo.embed(["a fox", "a dog"], dimensions=3)
    assert vectors.shape == (2, 3)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    assert demo.score("a fox", ["a fox", "a dog"])[0] == pytest.approx(1.0)
    [labels] = demo.score("It is ", "true", label_token_ids=[10, 11], apply_softmax=True)
    assert sum(labels) == pytest.approx(1.0)
    [entry, _] = demo.generate("a fox", max_tokens=2, temperature=0.0, logprobs=2)[0].completions[0].logprobs
    assert entry.token == entry.top_tokens[0]
    assert len(entry.top_tokens) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [STRICT]}, "tools need a conversation"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"regex": "a", "json_schema": SCHEMA}, "exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos cannot go with a grammar"),
        ({"bad_words": ["x"]}, "bad_words is not supported"),
        ({"session_id": 7}, "session_id: expected str"),
        ({"priority": [1, 2]}, "2 entries of priority for 1 prompts"),
        ({"logprobs": 99}, "logprobs must be between 0 and 20"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logit_bias": [5]}, "logit_bias must map"),
        ({"seed": "7"}, "seed must be"),
    ],
)
def test_wrong_fields_are_refused_as_over_http(llm, fields, words):
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate("x", max_tokens=2, **fields)


def test_none_is_not_given(llm):
    """Wrappers pass None for what their callers leave out."""
    empty = dict.fromkeys(("rid", "priority", "logit_bias", "temperature", "stop", "regex", "tools", "session_id"))
    params = SamplingParams(temperature=0.0, max_tokens=3)
    plain = [answer.text for answer in llm.generate(["a", "b"], params)]
    for _ in range(2):
        assert [answer.text for answer in llm.generate(["a", "b"], params, **empty)] == plain
    assert llm.default_sampling_params(**empty) == llm.default_sampling_params()


def test_there_is_no_vector_of_no_prompt_and_no_score_of_a_number(llm):
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        llm.embed([])
    with pytest.raises(InvalidRequestError, match="both be texts or both be token ids"):
        llm.score([1, 2], [3, 4], label_token_ids=[5])


def test_turns_of_a_session_are_known_to_the_engine(tmp_path):
    tape = tmp_path / "sessions.tape"
    with LLM(executor="mock", mock_step_ms=0.0, record=str(tape)) as recorded:
        recorded.generate(["a", "b"], max_tokens=2, session_id=["s", "t"], priority=[1, 2], rid="r", tenant="me")
        talk = [*HI, {"role": "assistant", "content": "Yes"}, *HI]
        recorded.chat(talk, max_tokens=2, prompt_cache_key="u", prompt_cache_retention="5m", use_tqdm=True)
        recorded.close_session("s", "me")
        recorded.generate("later than the events before it", max_tokens=1)
    events = [record.body for record in Tape(tape.read_bytes(), "a").records()]
    submitted = [event.request for event in events if isinstance(event, Submit)]
    assert [(one.turn, one.priority) for one in submitted[:3]] == [(0, 1), (0, 2), (1, None)]
    # A tape has digests of names.
    sessions = [(one.tenant, one.session) for one in submitted[:3]]
    assert len(set(sessions)) == 3
    assert all(session for _, session in sessions)
    ended = {(event.tenant, event.session): event for event in events if isinstance(event, TurnEnded)}
    assert [(ended[name].kind, ended[name].ttl_ns) for name in sessions] == [
        ("user", -1),
        ("user", -1),
        ("user", 300 * NS_PER_S),
    ]
    [closed] = [event for event in events if isinstance(event, SessionEnded)]
    assert (closed.tenant, closed.session) == sessions[0]


def test_equal_prompts_differ_where_they_are_sampled_and_a_seed_makes_them_equal(llm):
    def texts(**sampling):
        return {answer.text for answer in llm.generate(["Hello there"] * 4, max_tokens=12, **sampling)}

    assert len(texts()) == 4
    assert len(texts(seed=7)) == 1
    assert texts(seed=7) != texts(seed=8)
    assert len(texts(temperature=0.0)) == 1


def test_fields_of_sampling_params_may_be_given_by_name(llm):
    by_name = llm.generate("Hello there", max_tokens=5, temperature=0.0)[0]
    by_params = llm.generate("Hello there", SamplingParams(max_tokens=5, temperature=0.0))[0]
    both = llm.generate("Hello there", SamplingParams(max_tokens=9, temperature=0.0), max_tokens=5)[0]
    assert by_name.completions == by_params.completions == both.completions
    assert len(by_name.completions[0].token_ids) == 5
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5)
    with pytest.raises(TypeError, match="colour"):
        llm.generate("Hello there", colour="red")
    with pytest.raises(TypeError, match="temperature"):
        SamplingParams(others={"temperature": 0.0})


def test_an_answer_comes_piece_by_piece(llm):
    whole = llm.generate("Hello there", max_tokens=12, temperature=0.0)[0]
    deltas = list(llm.stream("Hello there", max_tokens=12, temperature=0.0))
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.completions[0].token_ids
    assert deltas[-1].finish.reason == "length"
    with pytest.raises(InvalidRequestError, match="temperature"):
        next(llm.stream("a", temperature=-1.0))


def test_a_reader_that_stops_frees_its_place():
    with LLM(executor="mock", mock_step_ms=20.0, max_running_requests=1) as llm:
        stream = llm.stream("a", max_tokens=1000)
        assert next(stream).token_ids
        stream.close()
        (short,) = llm.submit("b", SamplingParams(max_new_tokens=1))
        assert short.result(timeout=10).completions[0].token_ids


def test_a_conversation_goes_through_the_chat_template(llm):
    messages = [{"role": "user", "content": "Hello there"}]
    template = load_chat_template(DEMO_MODEL, "")
    ids = llm.tokenizer.encode(template.render(messages), add_special_tokens=False).ids
    assert llm.has_chat_template
    (answer,) = llm.chat(messages, max_tokens=6, temperature=0.0)
    (plain,) = llm.generate(ids, max_tokens=6, temperature=0.0)
    assert answer.completions == plain.completions
    assert answer.prompt_tokens == len(ids)
    assert [one.completions for one in llm.chat([messages] * 2, max_tokens=6, temperature=0.0)] == [
        plain.completions
    ] * 2
    assert "".join(delta.text for delta in llm.stream(messages, max_tokens=6, temperature=0.0)) == plain.text


def test_one_stop_string_needs_no_list(llm):
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    text = llm.generate("Hello there", greedy)[0].text
    assert llm.generate("Hello there", replace(greedy, stop=text[8:11]))[0].text == text[: text.index(text[8:11])]


def test_the_tokenizers_end_mark_ends_an_answer(tmp_path):
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    with LLM(folder, executor="mock", mock_step_ms=0.0) as llm:
        tokens = llm.generate("Hello there", greedy)[0].completions[0].token_ids
        mark = llm.tokenizer.id_to_token(tokens[4])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": mark}))
    with LLM(folder, executor="mock", mock_step_ms=0.0) as llm:
        ended, whole = (
            llm.generate("Hello there", replace(greedy, ignore_eos=ignored))[0].completions[0]
            for ignored in (False, True)
        )
    assert (ended.finish_reason, ended.matched) == ("stop", tokens[4])
    assert ended.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert whole.token_ids == tokens


def test_an_array_is_a_prompt(llm):
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    from_list, from_array = (llm.generate(ids, greedy)[0].text for ids in ([5, 6, 7], np.array([5, 6, 7])))
    assert from_list == from_array


def test_several_threads_get_their_own_answers(llm):
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0, n=3)
    prompts = ["Once upon", "The fox", "A bear", "My dog"]

    def texts(prompt):
        return [completion.text for completion in llm.generate(prompt, greedy)[0].completions]

    alone = {prompt: texts(prompt) for prompt in prompts}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(texts, prompts * 6)) == list(alone.values()) * 6


def test_without_params_the_models_defaults_apply(llm):
    params = llm.default_sampling_params(max_new_tokens=3)
    own = read_sampling_defaults(str(DEMO_MODEL), "model")
    assert own["temperature"] > 0
    assert params == SamplingParams(max_new_tokens=3, **own)
    with LLM(executor="mock", mock_step_ms=0.0, sampling_defaults="openai") as plain:
        assert plain.default_sampling_params() == SamplingParams()


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="unknown setting"):
        LLM(colour="red")


@pytest.mark.parametrize(("name", "value"), [("max_total_tokens", "many"), ("page_size", 1.5), ("tenants", ["a"])])
def test_settings_of_the_wrong_type_are_named(name, value):
    with pytest.raises(ConfigError, match=f"wrong type.*{name}"):
        LLM(executor="mock", **{name: value})


def test_the_model_may_be_a_path():
    with LLM(DEMO_MODEL, executor="mock", mock_step_ms=0.0) as llm:
        assert llm.info.model == str(DEMO_MODEL)


def test_a_cancelled_future_frees_its_place():
    with LLM(executor="mock", mock_step_ms=20.0, max_running_requests=1) as llm:
        (long,) = llm.submit("a", SamplingParams(max_new_tokens=1000))
        (short,) = llm.submit("b", SamplingParams(max_new_tokens=1))
        assert long.cancel()
        assert short.result(timeout=10).completions[0].token_ids


def test_closing_ends_what_is_open():
    llm = LLM(executor="mock", mock_step_ms=50.0)
    (future,) = llm.submit("a", SamplingParams(max_new_tokens=1000))
    llm.close()
    with pytest.raises(EngineDeadError):
        future.result(timeout=5)
    with pytest.raises(EngineDeadError):
        llm.generate("b")


def test_a_program_need_not_close_it():
    program = "from tokenyard import LLM; print(LLM(executor='mock').chat([{'role': 'user', 'content': 'Hi'}])[0].text)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_adaptive_looks_ahead_until_it_is_closed(tmp_path):
    def children():
        return {child.pid for child in psutil.Process().children()}

    tape, before = tmp_path / "a.tape", children()
    with LLM(executor="mock", mock_step_ms=1.0, schedule_policy="adaptive", record=str(tape)) as llm:
        llm.generate(["a"] * 4, SamplingParams(max_new_tokens=60, ignore_eos=True))
        assert len(children() - before) == 1
    assert children() == before
    replay = Replay(Tape(tape.read_bytes(), "a"), None, False)
    assert replay.run().difference is None
    assert "slo" in replay.scheduler.snapshot(0).policy, "adaptive begins with its first candidate"
