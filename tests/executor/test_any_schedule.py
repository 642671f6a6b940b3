"""Greedy answers do not depend on the schedule: plans at random against transformers."""

import functools
import tempfile

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.executor.driver import Driver
from tests.executor.tiny_models import DEVICE, greedy, judge, prompt_of
from tokenyard.executor.model_loader import load_executor

CASES = ["qwen3-layers", "qwen3.5"]
ANSWER_TOKENS = 6
IMPLS = ["torch", "auto"] if DEVICE == "cpu" else ["auto"]


@functools.cache
def executor(case, page_size, model_impl):
    with tempfile.TemporaryDirectory() as folder:
        judge(case).save_pretrained(folder)
        return load_executor(
            folder,
            device=DEVICE,
            dtype="float32",
            page_size=page_size,
            max_total_tokens=2048,
            max_pool_rows=4,
            model_impl=model_impl,
        )


@settings(max_examples=examples(60), deadline=None)
@example(case="qwen3.5", page_size=1, model_impl="torch", lengths=[1], moves=[[0, 0, 0]], in_flight=1, retract_after=1)
@given(
    case=st.sampled_from(CASES),
    page_size=st.sampled_from([1, 16]),
    model_impl=st.sampled_from(IMPLS),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    moves=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=12),
    in_flight=st.integers(1, 3),
    retract_after=st.integers(0, 12),
)
def test_random_plans(case, page_size, model_impl, lengths, moves, in_flight, retract_after):
    """Each move says how many tokens each request computes at most; 0 leaves it out of the step."""
    driver = Driver(executor(case, page_size, model_impl))
    prompts = [prompt_of(length, seed=number) for number, length in enumerate(lengths)]
    sequences = [driver.start(prompt) for prompt in prompts]
    flying = []
    for number, move in enumerate([*moves, *[[40, 40, 40]] * 20]):
        work = [
            (sequence, min(most, sequence.total - sequence.planned))
            for sequence, most in zip(sequences, move, strict=False)
            if most and sequence.total - sequence.prompt_tokens < ANSWER_TOKENS
        ]
        if work:
            flying.append(driver.launch(*work))
        while flying and (len(flying) >= in_flight or number == retract_after):
            driver.collect(flying.pop(0))
        if number == retract_after:
            sequences[0] = driver.start(**driver.retract(sequences[0]))
    for step in flying:
        driver.collect(step)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output == greedy(case, prompt, ANSWER_TOKENS, sequence.output)
