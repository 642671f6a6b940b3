"""Vectors of prompts against transformers, and through the scheduler."""

import numpy as np
import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import judge, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import SamplingParams, SchedulerSettings
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.model_loader import load_executor


@pytest.mark.parametrize("impl", ["torch", "native"])
def test_hidden_states_are_those_of_transformers(folder, impl):
    executor = load_executor(
        folder("llama"), device="cpu", dtype="float32", max_total_tokens=256, max_pool_rows=4, model_impl=impl
    )
    prompt = prompt_of(21, seed=5)
    driver = Driver(executor)
    driver.launch((driver.start(prompt), None))
    with torch.inference_mode():
        expected = judge("llama")(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(executor.model.hidden(0, 21), expected, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_cached_chunked_or_crowded_prompt_has_the_same_vector(pooling):
    torch.set_num_threads(1)

    def vectors(chunk, repeats):
        executor = load_executor(str(DEMO_MODEL), device="cpu", dtype="float32", max_total_tokens=128, max_pool_rows=8)
        settings = SchedulerSettings(context_length=256, chunked_prefill_size=chunk, max_in_flight=2)
        yard = Yard(settings, executor.info, executor=executor)
        wish = SamplingParams(max_new_tokens=0, temperature=0.0)
        numbers = []
        for _ in range(repeats):
            for length in (3, 40, 17):
                numbers.append(yard.submit(list(range(10, 10 + length)), sampling=wish, pooling=pooling))
            yard.submit([5, 6, 7], max_new=6)
            yard.run(2)
        assert yard.scheduler.idle() is None
        return [np.frombuffer(yard.finished[number].vector, np.float32) for number in numbers]

    alone = vectors(-1, 1)
    again = vectors(8, 3)
    assert all(np.allclose(vector, alone[place % 3], atol=1e-3) for place, vector in enumerate(again))
