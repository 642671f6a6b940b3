"""Whatever the schedule, each answer is the same: both loops over the real scheduler and the mock's watched KV pool."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engines import watched_mock
from tests.engine.test_driver import LOOPS, ScriptedPort, run, submit
from tests.engine.verb_calls import replies, snapshot
from tests.examples import examples
from tokenyard.base import Cancel, StopFound

LONGEST = 40


def answers_alone(prompts, tokens):
    """Each request by itself, in a pool with room for everything."""
    found = []
    for prompt, count in zip(prompts, tokens, strict=True):
        port = ScriptedPort([submit(1, prompt, count)])
        run(*LOOPS[0], port, executor=watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=2))
        found.append(port.tokens()[1])
    return found


prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 24)).map(lambda pair: tuple(range(3 + pair[0], 3 + pair[0] + pair[1]))),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), prompts=prompts, loop=st.sampled_from(LOOPS))
def test_no_schedule_changes_an_answer(data, prompts, loop):
    tokens = data.draw(st.lists(st.integers(1, LONGEST - 24), min_size=len(prompts), max_size=len(prompts)))
    page = data.draw(st.sampled_from([1, 2, 4]), "page size")
    pool = data.draw(st.sampled_from([LONGEST + 8, 64, 200]), "pool tokens")
    options = {
        "page_size": page,
        "chunked_prefill_size": data.draw(st.sampled_from([-1, 4, 8]), "chunk"),
        "max_running_requests": data.draw(st.integers(1, 6), "rows"),
        "enable_mixed_chunk": data.draw(st.booleans(), "mixed"),
        "schedule_policy": data.draw(st.sampled_from(["fcfs", "lpm"]), "policy"),
        "init_new_token_ratio": data.draw(st.sampled_from([0.1, 0.7]), "ratio"),
    }
    executor = watched_mock(step_ms=0.0, page_size=page, max_total_tokens=pool, max_pool_rows=6)
    requests = [submit(i + 1, prompt, count) for i, (prompt, count) in enumerate(zip(prompts, tokens, strict=True))]
    cut = data.draw(st.integers(0, len(requests)), "in two groups")
    port = ScriptedPort(requests[:cut], requests[cut:], [snapshot(1)])
    run(*loop, port, executor=executor, **options)
    ends = port.finished()
    assert {number: finish.message for number, finish in ends.items() if finish.reason != "length"} == {}
    found = port.tokens()
    assert [found[i + 1] for i in range(len(prompts))] == answers_alone(prompts, tokens)
    (reply,) = replies(port).values()
    assert reply.value["used_tokens"] == 0


class InterruptingPort(ScriptedPort):
    """Sends its interruptions one a turn while steps are under way."""

    def __init__(self, interruptions, *groups):
        super().__init__(*groups)
        self.interruptions = list(interruptions)

    def receive(self, timeout_ns):
        if timeout_ns or not self.interruptions:
            return super().receive(timeout_ns)
        event = self.interruptions.pop(0)
        return [] if event is None else [event]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), prompts=prompts, loop=st.sampled_from(LOOPS))
def test_interruptions_leave_the_others_alone(data, prompts, loop):
    interruptions = data.draw(
        st.lists(
            st.none()
            | st.builds(lambda number: Cancel([number]), st.integers(1, 8))
            | st.builds(lambda number: StopFound(number, 1, "x"), st.integers(1, 8)),
            max_size=12,
        )
    )
    tokens = [12] * len(prompts)
    executor = watched_mock(step_ms=0.0, page_size=2, max_total_tokens=64, max_pool_rows=6)
    port = InterruptingPort(
        interruptions, [submit(i + 1, prompt, 12) for i, prompt in enumerate(prompts)], [snapshot(1)]
    )
    run(*loop, port, executor=executor, page_size=2, chunked_prefill_size=8, init_new_token_ratio=0.1)
    ends, found, alone = port.finished(), port.tokens(), answers_alone(prompts, tokens)
    assert sorted(ends) == list(range(1, len(prompts) + 1))
    assert not any(finish.cause == "failed" for finish in ends.values())
    for number, finish in ends.items():
        got = found.get(number, [])
        assert got == alone[number - 1][: len(got)]
        if finish.reason == "length":
            assert len(got) == 12
    assert np.all([reply.value["used_tokens"] == 0 for reply in replies(port).values()])
