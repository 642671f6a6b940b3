"""Packed weights under what else a server does: every format with every feature, by all kernels in turn."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.packed_models import CHECKPOINTS, GGUF_FORMATS, adapter_shifts, make_adapter
from tests.executor.test_pipeline import load_in_turn
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import prompt_of
from tests.matrix.test_speculation_exactness import repetitive
from tests.scheduler.harness import Yard
from tokenyard.base import SchedulerSettings
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KINDS = [*GGUF_FORMATS, *CHECKPOINTS]
TOKENS = 12


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answers(path, prompts, *, together, **options):
    """Greedy answers to prompts, one at a time or crowded into a pool that is too small for them."""
    executor = load_executor(
        path,
        **{"device": "cpu", "dtype": "float32", "threads": 1, "model_impl": "native", "deterministic": True},
        **{"max_total_tokens": 160 if together else 1024, "max_pool_rows": 8, "page_size": 4, **options},
    )
    settings = SchedulerSettings(
        page_size=4,
        max_running_requests=6,
        context_length=200,
        chunked_prefill_size=16,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
        disable_radix_cache=not together,
    )
    yard = Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)
    numbers = []
    for prompt in prompts:
        numbers.append(yard.submit(prompt, max_new=TOKENS))
        if not together:
            yard.run()
    yard.run()
    counters = yard.scheduler.snapshot(0).counters
    return [yard.tokens[number] for number in numbers], counters


def crowded(path, *, every=(), **options):
    """Answers under traffic are those of one request at a time; returns the counters of the traffic.

    every: options of both, `options` of the traffic alone.
    """
    common = prompt_of(20, seed=7)
    prompts = [common + repetitive(12 + index, seed=index) for index in range(6)]
    expected, _ = answers(path, prompts, together=False, **dict(every))
    found, counters = answers(path, prompts, together=True, **dict(every), **options)
    assert found == expected
    assert counters.hit_tokens > 0
    return counters


def check_schedule(path, plain):
    counters = crowded(path)
    assert counters.retracted > 0


def check_prompt_lookup(path, plain):
    counters = crowded(path, draft_tokens=4, max_total_tokens=400)
    assert counters.draft_tokens > 0


def check_draft_model(path, plain):
    """The model drafts for itself, so its drafts are right."""
    counters = crowded(path, draft_tokens=3, draft_model=path, max_total_tokens=400)
    assert counters.accepted_draft_tokens > 0


def check_windows(path, plain):
    crowded(path, swa_full_tokens_ratio=0.6, max_total_tokens=400)


def check_tensor_parallel(path, plain):
    """Ranks unpack their part: the numbers are those that the packed ones mean."""
    prompt = prompt_of(20, seed=3)
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 512, "max_pool_rows": 8}
    found, expected = (Driver(load_virtual(one, 2, **options)) for one in (path, plain))
    assert found.generate(found.start(prompt), TOKENS) == expected.generate(expected.start(prompt), TOKENS)


def check_pipeline(path, plain):
    """Stages unpack their layers."""
    prompt = prompt_of(20, seed=3)
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 512, "max_pool_rows": 8}
    found, expected = (Driver(load_in_turn(one, 2, **options)) for one in (path, plain))
    assert found.generate(found.start(prompt), TOKENS) == expected.generate(expected.start(prompt), TOKENS)


def check_lora(path, plain, adapter):
    """An adapter adds what it adds to the model of the numbers that the packed ones mean."""
    packed, exact = adapter_shifts((path, plain), adapter)
    assert exact.std() > 0.1
    assert (packed - exact).std() < 0.15 * exact.std()


FEATURES = {
    "schedule": ("llama", check_schedule),
    "prompt-lookup": ("llama", check_prompt_lookup),
    "draft-model": ("llama", check_draft_model),
    "experts": ("moe", check_schedule),
    "windows": ("windows", check_windows),
    "tensor-parallel": ("llama", check_tensor_parallel),
    "pipeline": ("llama", check_pipeline),
    "lora": ("llama", check_lora),
}
GRID = [
    (kind, feature)
    for (row, kind), (column, feature) in itertools.product(enumerate(KINDS), enumerate(FEATURES))
    if FEATURES[feature][0] == "llama" or kind in GGUF_FORMATS or (feature == "experts" and kind in ("fp8", "int8"))
    if (row + column) % 2
]
"""Every second pair, as features do not ask for the format. Other checkpoints are made of the llama only."""


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("kind", "feature", "level"),
    [(*pair, LIBRARY.levels()[number % len(LIBRARY.levels())]) for number, pair in enumerate(GRID)],
    ids=lambda value: LEVELS[value] if isinstance(value, int) else value,
)
def test_a_feature_over_a_format(models, tmp_path, monkeypatch, kind, feature, level):
    torch.set_num_threads(1)
    monkeypatch.setattr(LIBRARY, "level", level)
    case, check = FEATURES[feature]
    path, plain = models(case, kind)
    if feature == "lora":
        check(path, plain, make_adapter(tmp_path / "adapter"))
    else:
        check(path, plain)
