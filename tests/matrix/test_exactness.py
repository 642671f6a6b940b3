"""Greedy tokens are those of transformers under every schedule.

Every combination of page size, chunk, mixed chunks, plans in flight, prefix cache and pool size runs in `make test`,
each with another architecture, by torch and by the native kernels in turn. `make test-all` runs each again by the other
of the two with another architecture. `TOKENYARD_FULL_MATRIX=1` runs every combination with every architecture, and
`TOKENYARD_TEST_DEVICE=cuda` (for the tests of the executor too) runs our side on a GPU.
"""

import itertools
import os
from dataclasses import replace

import pytest
import torch

from tests.executor.tiny_models import CASES, DEVICE, greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import SchedulerSettings
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import NoLibraryError, load_library

REQUESTS, TOKENS = 16, 12
PAGE_SIZES, CHUNKS, DEPTHS = (1, 16), (16, -1), (1, 2)
COMBINATIONS = list(itertools.product(PAGE_SIZES, CHUNKS, (False, True), DEPTHS, (False, True), ("roomy", "tight")))
FULL = os.environ.get("TOKENYARD_FULL_MATRIX") == "1"
IMPLS, NAMES = ("torch", "native"), list(CASES)


def choices(index):
    """(architecture, implementation) to run the combination at `index` with: each pair of choices meets both
    implementations.
    """
    if FULL:
        return list(itertools.product(NAMES, IMPLS))
    return [(NAMES[index % len(NAMES)], IMPLS[index.bit_count() % 2])]


MATRIX = [
    pytest.param(case, *combination, model_impl)
    for index, combination in enumerate(COMBINATIONS)
    for case, model_impl in choices(index)
]


def needs_native():
    """Skip the test where native kernels cannot be used."""
    if DEVICE != "cpu":
        pytest.skip("native kernels are for the CPU")
    try:
        load_library()
    except NoLibraryError as error:
        pytest.skip(f"no native library: {error}")


POOL_TOKENS = {"roomy": 4096, "tight": 96}


def prompts():
    """Prompts: groups share prefixes of 20 and 40 tokens, some are equal, some share nothing."""
    common, longer = prompt_of(20, seed=100), prompt_of(20, seed=101)
    made = []
    for index in range(REQUESTS):
        own = prompt_of(3 + 5 * (index % 7), seed=200 + index // 2)
        made.append(([], common, common, common + longer)[index % 4] + own)
    return made


@pytest.mark.part(12)
@pytest.mark.parametrize(("case", "page_size", "chunk", "mixed", "depth", "no_cache", "pool", "model_impl"), MATRIX)
def test_greedy_tokens_do_not_depend_on_the_schedule(
    folder, case, page_size, chunk, mixed, depth, no_cache, pool, model_impl
):
    if model_impl == "native":
        needs_native()
    torch.set_num_threads(1)
    executor = load_executor(
        folder(case),
        device=DEVICE,
        dtype="float32",
        page_size=page_size,
        max_total_tokens=POOL_TOKENS[pool],
        max_pool_rows=REQUESTS + depth,
        model_impl=model_impl,
        attention_backend="auto" if model_impl == "native" else "gather",
    )
    settings = SchedulerSettings(
        page_size=page_size,
        max_running_requests=REQUESTS,
        context_length=executor.info.context_length,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        disable_radix_cache=no_cache,
        max_in_flight=depth,
        # Hold nothing back for answers, so that a tight pool must retract.
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    # Random models know no end of text; an eos by chance would only shorten the comparison.
    info = replace(executor.info, eos_token_ids=())
    yard = Yard(settings, info, executor=executor)
    numbers = [yard.submit(prompt, max_new=TOKENS) for prompt in prompts()[: REQUESTS // 2]]
    for _ in range(3):
        yard.launch()
        yard.commit()
    numbers += [yard.submit(prompt, max_new=TOKENS) for prompt in prompts()[REQUESTS // 2 :]]
    yard.run(depth)
    for number, prompt in zip(numbers, prompts(), strict=True):
        assert yard.tokens[number] == greedy(case, prompt, TOKENS, yard.tokens[number])
    counters = yard.scheduler.snapshot(0).counters
    assert yard.scheduler.idle() is None
    assert (counters.hit_tokens > 0) is not no_cache
    if pool == "tight":
        assert counters.retracted > 0
