"""Streams that work at their own speed: nothing reads what may not be there yet, or reuses what may still be read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor import meta_device
from tests.executor.meta_device import GPU, RESULTS, STEPS, UPLOADS, Raced, pretend_driver, stream_order
from tests.executor.test_cuda_graphs import TableAttention
from tests.executor.tiny_models import prompt_of
from tokenyard.base import SamplingParams
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.kv_copies import DeviceBlocks
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch
from tokenyard.executor.sampling.top_k_top_p import likeliest

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.2),
)


@pytest.fixture
def driver(folder, monkeypatch, request):
    """A driver whose decode steps of up to four rows are captured, and others of up to `param` tokens."""
    config = read_folder_config(Path(folder("llama")))
    made = pretend_driver(monkeypatch, config, 4)
    executor = made.executor
    executor.model.attention = TableAttention(executor.kv_pool, executor.pages, executor.model.attention_spec)
    with torch.inference_mode():
        plans = PlanInputs(executor.pages, executor.future, likeliest, prepare_by_torch)
        record, tokens = (lambda work: work() or work), getattr(request, "param", 0)
        executor.model = CudaGraphRunner(executor.model, config, 4, GPU, record, plans=plans, max_tokens=tokens)
    return made


def serve(driver, kinds=KINDS[:1], *, delay=False):
    """Prompts, decodes with two steps in flight, a chunk among decodes."""
    rows = [
        driver.start(prompt_of(length, seed=length), kind) for length, kind in zip((9, 30, 14), kinds * 3, strict=False)
    ]
    late = driver.start(prompt_of(40, seed=4), kinds[-1])
    work = [[(row, None) for row in rows], *[[(row, 1) for row in rows]] * 2]
    work += [[(late, count), *((row, 1) for row in rows)] for count in (24, None)]
    work += [[(row, 1) for row in (*rows, late)]] * 2
    with stream_order(driver.executor.kv_pool.tensor):
        flying = []
        for step in work:
            launched = driver.launch(*step, delay=delay)
            flying.append(launched)
            if len(flying) > 1:
                driver.collect(flying.pop(0))
            if delay:
                driver.executor.sample(launched[2])
        driver.collect(flying.pop())


@pytest.mark.parametrize(
    ("driver", "kinds", "delay"),
    [(0, KINDS[:1], False), (64, KINDS[:1], False), (64, KINDS, True)],
    indirect=["driver"],
)
def test_steps_in_flight_race_with_nothing(driver, kinds, delay):
    serve(driver, kinds, delay=delay)


def test_blocks_of_a_tier_race_with_no_copy(driver):
    pool = driver.executor.kv_pool
    blocks = DeviceBlocks(pool)
    block = np.zeros(3 * blocks.page_bytes, np.uint8)
    with stream_order(pool.tensor, patient=True):
        for _ in range(2):
            blocks.gather(np.array([1, 2, 3], np.int32), block)
            blocks.scatter(block, 3, 1, np.array([4, 5], np.int32))


def no_wait_of(waiting, awaited):
    def mutate(patch):
        wait = meta_device.Stream.wait_stream

        def leaky(stream, other):
            if (stream, other) != (waiting, awaited):
                wait(stream, other)

        patch.setattr(meta_device.Stream, "wait_stream", leaky)

    return mutate


_clone = torch.Tensor.clone


def not_copied(tensor, **options):
    return _clone(tensor, **options) if options else tensor


MUTATIONS = {
    "steps do not wait for uploads": (no_wait_of(STEPS, UPLOADS), "races with uploads"),
    "results do not wait for steps": (no_wait_of(RESULTS, STEPS), "races with steps"),
    "the host does not wait for results": (
        lambda patch: patch.setattr(meta_device.Event, "synchronize", lambda event: None),
        "numpy on host",
    ),
    "memory is freed early": (
        lambda patch: patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None),
        "is freed while",
    ),
    "tokens are not copied out of a captured step": (
        lambda patch: patch.setattr(torch.Tensor, "clone", not_copied),
        "on steps of .* races with results",
    ),
}


@pytest.mark.parametrize(("mutate", "said"), MUTATIONS.values(), ids=MUTATIONS)
def test_the_order_shows_what_is_missing(driver, monkeypatch, mutate, said):
    mutate(monkeypatch)
    with pytest.raises(Raced, match=said):
        serve(driver)
