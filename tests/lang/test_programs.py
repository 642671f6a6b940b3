"""Programs over a back end that answers at once."""

import asyncio
import threading
import time

import pytest

from tests.lang.fake import FakeBackend
from tokenyard import lang


@pytest.fixture
def backend():
    made = FakeBackend()
    lang.set_default_backend(made)
    return made


@lang.function
def story(s, hero, wish=None):
    s += "Once " + hero + lang.gen("what", max_tokens=4, temperature=wish) + " end"


def test_text_and_generated_parts_are_in_order(backend):
    state = story.run(hero="Alice")
    assert state.text() == "Once Aliceabcd end"
    assert state["what"] == "abcd"
    assert state.get_meta_info("what") == {"completion_tokens": 4}
    prompt, sampling = backend.asked[0]
    assert prompt.text == "Once Alice"
    assert sampling == {"max_new_tokens": 4}


def test_settings_of_a_part_override_those_of_the_run(backend):
    story.run(hero="x", temperature=0.5, max_new_tokens=99, wish=0.25)
    assert backend.asked[0][1] == {"max_new_tokens": 4, "temperature": 0.25}
    story.bind(hero="y").run(top_p=0.5)
    assert backend.asked[1][1] == {"max_new_tokens": 4, "top_p": 0.5}


def test_roles_become_messages_and_a_begun_answer_is_continued(backend):
    @lang.function
    def chat(s):
        s += lang.system("Be brief.")
        s += lang.user("Hi")
        s += lang.assistant(lang.gen("first"))
        with s.user():
            s += "More"
        s += lang.assistant("So " + lang.gen("second"))

    state = chat.run()
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "abcd"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "So abcd"},
    ]
    first, second = backend.asked[0][0], backend.asked[1][0]
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert not first.continues
    assert second.messages[-1] == {"role": "assistant", "content": "So "}
    assert second.continues


@pytest.mark.parametrize(
    ("method", "chosen"),
    [
        (lang.token_length_normalized, "yes"),
        (lang.greedy_token_selection, "yes"),
        (lang.unconditional_likelihood_normalized, "maybe"),
    ],
)
def test_choices(backend, method, chosen):
    backend.liked = ["yes", "maybe"]

    @lang.function
    def pick(s):
        s += "So " + lang.select("c", ["maybe", "yes"], choices_method=method) + "!"

    state = pick.run()
    assert state["c"] == chosen
    assert state.text() == f"So {chosen}!"


def test_forks_share_their_prefix_and_run_in_parallel(backend):
    backend.delay_s = 0.05

    @lang.function
    def several(s):
        s += "Tips:"
        forks = s.fork(8)
        for place, fork in enumerate(forks):
            fork += f" {place}." + lang.gen("tip")
        forks.join()
        s += forks[0]["tip"] + lang.gen("end")

    state = several.run()
    assert state["tip"] == ["abcd"] * 8
    assert [prompt.text for prompt in backend.warmed] == ["Tips:"]
    assert sorted(prompt.text for prompt, _ in backend.asked[:8]) == [f"Tips: {place}." for place in range(8)]
    assert state.text() == "Tips:abcdabcd"
    assert backend.most_running == 8


def test_a_batch_runs_in_parallel_with_few_threads(backend):
    backend.delay_s = 0.05
    before = threading.active_count()
    most = 0

    @lang.function
    def one(s, number):
        nonlocal most
        s += f"{number}" + lang.gen("x")
        most = max(most, threading.active_count())

    states = one.run_batch([{"number": number} for number in range(300)], num_threads=4)
    assert [state.text() for state in states] == [f"{number}abcd" for number in range(300)]
    assert backend.most_running > 50
    assert most - before < 12
    assert [state["x"] for state in one.run_batch([{"number": 1}] * 3, generator_style=True)] == ["abcd"] * 3


def test_streams_give_pieces_of_everything_or_of_one_value(backend):
    assert "".join(story.run(hero="A", stream=True).text_iter()) == "Once Aabcd end"
    assert list(story.run(hero="A", stream=True).text_iter("what")) == ["ab", "cd"]

    async def read():
        return [piece async for piece in story.run(hero="A", stream=True).text_async_iter("what")]

    assert asyncio.run(read()) == ["ab", "cd"]


def test_several_answers_are_a_list(backend):
    @lang.function
    def several(s):
        s += "x" + lang.gen("y", n=3, seed=5)

    state = several.run()
    assert state["y"] == ["abcd"] * 3
    assert sorted(sampling["seed"] for _, sampling in backend.asked) == [5, 6, 7]


def test_a_program_may_be_a_part_of_another(backend):
    @lang.function
    def whole(s):
        story(s, hero="Bill")
        s += "."

    assert whole.run().text() == "Once Billabcd end."


def test_failures_are_raised_where_a_value_is_read_and_at_the_end(backend):
    backend.answer = "fail"
    with pytest.raises(RuntimeError, match="back end failed"):
        story.run(hero="x")
    state = story.run(hero="x", stream=True)
    with pytest.raises(RuntimeError, match="back end failed"):
        list(state.text_iter())
    with pytest.raises(RuntimeError, match="back end failed"):
        _ = state["what"]
    with pytest.raises(RuntimeError, match="back end failed"):
        story.run_batch([{"hero": "x"}])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda s: s.__iadd__(3), "not int"),
        (lambda s: s.__iadd__(lang.user(lang.gen("x"))), "only the assistant"),
        (lambda s: s.__iadd__("text" + lang.user("x")), "do not go together"),
        (lambda s: s.__iadd__(lang.user_end()), "has not begun"),
        (lambda s: s.__iadd__(lang.user("a") + "text"), "within system"),
        (lambda s: s.fork(2).join("concate_and_append"), "gather_variable"),
        (lambda s: s.__iadd__(lang.gen("x", regex="a", dtype=int)), "exclude"),
        (lambda s: s.__iadd__(lang.gen("x", dtype=list)), "dtype"),
        (lambda s: s.__iadd__(lang.select("x", [])), "choices"),
    ],
)
def test_impossible_programs_are_refused(backend, body, words):
    with pytest.raises((TypeError, ValueError), match=words):
        lang.function(body).run()


def test_a_program_without_a_back_end_says_so(monkeypatch):
    monkeypatch.setattr("tokenyard.lang.program.default_backends", [])
    with pytest.raises(RuntimeError, match="set_default_backend"):
        story.run(hero="x")


def test_a_value_is_waited_for_only_where_it_is_read(backend):
    backend.delay_s = 0.2
    times = []

    @lang.function
    def lazy(s):
        begun = time.monotonic()
        s += "x" + lang.gen("y")
        times.append(time.monotonic() - begun)
        assert s["y"] == "abcd"
        times.append(time.monotonic() - begun)

    lazy.run()
    assert times[0] < times[1]
    assert len(backend.asked) == 1


def test_deprecated_names_are_the_same_classes():
    assert lang.Forks is lang.ProgramStateGroup
    assert lang.Answer is lang.HttpAnswer


def test_a_pydantic_model_is_a_schema(backend):
    class City:
        @staticmethod
        def model_json_schema():
            return {"type": "object"}

    @lang.function
    def ask(s):
        s += lang.gen("city", json_schema=City)

    ask.run()
    assert backend.asked[0][1]["json_schema"] == City.model_json_schema()
    with pytest.raises(ValueError, match="pydantic"):
        lang.gen("city", json_schema=int)
