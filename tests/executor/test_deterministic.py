"""With deterministic inference a token's keys, values and logits are the same bits whatever else its step computes."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from tests.executor.driver import Driver
from tests.executor.tiny_models import VOCAB, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

TOKENS = 1100
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "full": (LlamaConfig, {}),
    "window": (MistralConfig, {"sliding_window": 600}),
}


def load(folder, kind="full", **options):
    config, fields = CONFIGS[kind]
    name = config.__name__.replace("Config", "ForCausalLM")
    config(**SHAPE, **fields, architectures=[name]).save_pretrained(folder)
    options = {"dtype": "bfloat16", "max_total_tokens": 4096, "max_pool_rows": 8, "deterministic": True, **options}
    return load_executor(str(folder), device="cpu", load_format="dummy", **options)


def computed(executor, prompt, chunk, *, other_rows=0):
    """KV of the prompt, [layers, 2, tokens, ...], and the logits behind it, computed in chunks next to other rows."""
    driver = Driver(executor, seed=chunk + other_rows)
    others = [driver.start(prompt_of(9, seed=number)) for number in range(other_rows)]
    for other in others:
        driver.prefill(other)
    sequence = driver.start(prompt)
    while sequence.total - sequence.planned > chunk:
        driver.step((sequence, chunk), *((other, 1) for other in others))
    _, _, ticket = driver.launch((sequence, None), delay=True)
    size = executor.info.page_size
    slots = [page * size + i for page in sequence.pages for i in range(size)][: len(prompt)]
    return executor.kv_pool.tensor[:, :, slots].clone(), ticket.logits[0].clone()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.part(4)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
def test_bits_do_not_depend_on_the_schedule(tmp_path, monkeypatch, kind, level):
    monkeypatch.setattr(LIBRARY, "level", level)
    executor = load(tmp_path, kind, page_size=4, threads=2)
    prompt = prompt_of(TOKENS, seed=5)
    whole = computed(executor, prompt, TOKENS)
    for chunk, other_rows in ((700, 0), (64, 3), (5, 1), (1, 0)):
        assert same(computed(executor, prompt, chunk, other_rows=other_rows), whole), f"chunks of {chunk}"


def test_without_it_bits_depend_on_the_schedule(tmp_path):
    executor = load(tmp_path, deterministic=False)
    prompt = prompt_of(TOKENS, seed=5)
    assert not same(computed(executor, prompt, TOKENS), computed(executor, prompt, 1))


@pytest.mark.parametrize("options", [{"model_impl": "torch"}, {"attention_backend": "gather"}, {"dtype": "float16"}])
def test_what_the_native_kernels_do_not_compute_is_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="deterministic inference needs a native model"):
        load(tmp_path, **options)
