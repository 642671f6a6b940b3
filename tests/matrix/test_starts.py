"""Every family of models starts in every way, and answers as it does when it is started plainly.

Much is done at the start by some ways only: steps are measured for a policy that asks for their times, a draft model is
loaded, KV gets a store, ranks divide the model. A way that works for one family may fail for another, such as one with
layers of several kinds.
"""

import functools
import itertools

import pytest

from tests.executor.tiny_models import (
    CASES,
    DEVICE,
    EXPERT_CASES,
    FAMILY_CASES,
    STATE_CASES,
    TORCH_CASES,
    greedy,
    prompt_of,
)
from tests.matrix.test_exactness import needs_native
from tokenyard import LLM
from tokenyard.base import ConfigError

FAMILIES = [*CASES, *EXPERT_CASES, *FAMILY_CASES, *STATE_CASES, *TORCH_CASES]
WINDOWED = (
    *("mistral-window", "qwen2-window", "qwen3-layers", "qwen3-moe-mixed", "phi3-partial-window", "gemma2"),
    *("gemma2-plain", "gemma3", "gpt-oss"),
)
"""Families whose layers with a window have their own KV pool."""

MEASURED = {
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "speculative_num_draft_tokens": 4},
    "slo": {"schedule_policy": "slo"},
    "adaptive": {"schedule_policy": "adaptive"},
    "dynamic chunking": {"enable_dynamic_chunking": True},
    "time budget": {"step_budget": "time"},
    "prefill engine": {"disaggregation_mode": "prefill"},
}
"""Ways that measure steps at the start."""

WAYS = MEASURED | {
    "no overlap": {"disable_overlap_schedule": True},
    "no cache": {"disable_radix_cache": True},
    "small chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "pages of 1": {"page_size": 1},
    "lora": {"enable_lora": True},
    "disk": {"enable_hierarchical_cache": True, "hicache_storage_backend": "disk"},
    "torch": {"model_impl": "torch"},
    "deterministic": {"enable_deterministic_inference": True},
    "int8": {"quantization": "int8"},
}
REFUSED = (
    {"dynamic chunking", "time budget"},
    {"prefill engine", "no cache"},
    {"disk", "no cache"},
    {"torch", "deterministic"},
    {"torch", "int8"},
)
"""What does not go together, and is refused with the reason."""
UNSUPPORTED = {
    **dict.fromkeys(STATE_CASES, ("STANDALONE",)),
    **dict.fromkeys(TORCH_CASES, ("lora", "int8", "deterministic")),
    **dict.fromkeys(("gemma4", "gemma4-moe"), ("lora", "prefill engine", "disk", "int8", "deterministic")),
}
"""By family, the ways that are refused."""
UNSUPPORTED_BECAUSE = "recurrent state|latent|two shapes|share keys and values|needs a native model"

DIAGONAL = {
    *zip(FAMILIES, itertools.cycle(WAYS), strict=False),
    *zip(WINDOWED, itertools.cycle(MEASURED), strict=False),
}
WHOLE = ("qwen3.5", "lfm2", "granite-hybrid")
TOKENS = 12
# Its second half repeats the first, so that there is something to look up, and is longer than any window.
PROMPT = prompt_of(12, seed=3) * 3


@pytest.fixture(scope="session")
def start(folder, tmp_path_factory):
    """From a family and a way to a running LLM, which the caller closes."""

    def start(family, *ways, **more):
        given = {name: value for way in ways for name, value in WAYS[way].items()}
        if "STANDALONE" in ways:
            given["speculative_draft_model_path"] = folder(family)
        if "disk" in ways:
            given["hicache_storage_dir"] = str(tmp_path_factory.mktemp("kv"))
        size = {"page_size": 4, "max_total_tokens": 600, "max_running_requests": 4, "threads": 1}
        options = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, **size}
        return LLM(folder(family), **{**options, **given, **more})

    return start


@pytest.fixture(scope="session")
def answer(start):
    """From a family and ways to the tokens of one answer."""

    @functools.cache
    def answer(family, *ways, **more):
        with start(family, *ways, **more) as llm:
            (generation,) = llm.generate(PROMPT, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        return generation.completions[0].token_ids

    return answer


GRID = [
    pytest.param(family, way, marks=() if (family, way) in DIAGONAL else pytest.mark.slow)
    for (row, family), (column, way) in itertools.product(enumerate(FAMILIES), enumerate(WAYS))
    if (family, way) in DIAGONAL or (row + column) % 2 or family in WHOLE
]
"""Every second way of each family, all of some; `make test` takes a diagonal of it."""


@pytest.mark.part(3)
@pytest.mark.parametrize(("family", "way"), GRID)
def test_every_family_answers_the_same_however_it_is_started(start, answer, family, way):
    if way in UNSUPPORTED.get(family, ()):
        with pytest.raises(ConfigError, match=UNSUPPORTED_BECAUSE):
            start(family, way)
        return
    if way in ("int8", "deterministic"):
        needs_native()
    if way == "int8":
        # Other weights, so its own answer; drafts, which verify several tokens at once, do not change that either.
        assert answer(family, way, "NGRAM") == answer(family, way)
    else:
        plain = answer(family)
        assert answer(family, way) == plain == greedy(family, PROMPT, TOKENS, plain)


@pytest.mark.parametrize(
    "family", [WINDOWED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in WINDOWED[1:])]
)
def test_layers_with_a_window_have_a_pool_that_the_start_measures(start, family):
    with start(family, "slo") as llm:
        assert llm.info.windows is not None


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(WAYS, 2)))
def test_two_ways_together_change_no_answer(start, answer, first, second):
    family, ways = "qwen3-layers", {first, second}
    if ways & {"int8", "deterministic"}:
        needs_native()
    clash = [name for name in WAYS[first] if WAYS[second].get(name, WAYS[first][name]) != WAYS[first][name]]
    if clash:
        pytest.skip(f"both set {clash[0]}")
    if ways in REFUSED:
        with pytest.raises(ConfigError):
            start(family, first, second)
        return
    assert answer(family, first, second) == answer(family, *ways & {"int8"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "divided", "way"),
    [
        ("llama", "tp_size", ""),
        ("llama", "pp_size", "NGRAM"),
        ("qwen3-layers", "tp_size", "NGRAM"),
        ("qwen3-layers", "pp_size", "time budget"),
        ("gemma3", "tp_size", "slo"),
        ("gemma3", "pp_size", ""),
    ],
)
def test_a_divided_model_answers_the_same_however_it_is_started(answer, family, divided, way):
    assert answer(family, *[way] * bool(way), **{divided: 2}) == answer(family)
