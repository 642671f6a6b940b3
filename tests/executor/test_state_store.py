"""Checkpoints of recurrent states that were evicted from the pool come back from the KV store, to the bit."""

import itertools

import numpy as np
import pytest

from tests.executor.tiny_models import logits, prompt_of
from tokenyard import LLM

TURNS, ANSWER_TOKENS, TURN_TOKENS = 30, 12, 8
BLOCK = 64


def open_llm(folder, case, **changes):
    """An engine that has room for the checkpoints of one prompt."""
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "skip_tokenizer_init": True, "page_size": 4}
    room = {"max_running_requests": 2, "max_mamba_cache_size": 4, "max_total_tokens": 900}
    return LLM(folder(case), **options | room | changes)


def ask(llm, prompt, tokens):
    (found,) = llm.generate(prompt, max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    return found.completions[0].token_ids, found.cached_tokens


@pytest.mark.parametrize("case", ["qwen3.5"])
def test_every_turn_hits_though_others_take_all_checkpoints(folder, case, tmp_path):
    store = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "disk",
        "hicache_storage_dir": str(tmp_path),
        "mamba_retention_policy": "last",
    }
    others, known, lengths, hits = itertools.count(500), prompt_of(100, seed=1), [], []
    with open_llm(folder, case, **store) as llm:
        for turn in range(TURNS):
            answer, hit = ask(llm, known, ANSWER_TOKENS)
            lengths.append(len(known))
            hits.append(hit)
            known = known + answer + prompt_of(TURN_TOKENS, seed=100 + turn)
            for _ in range(2):
                ask(llm, prompt_of(BLOCK + 6, seed=next(others)), 2)
    assert hits == [0, *((length - 1) // BLOCK * BLOCK for length in lengths[:-1])]
    # One pass over the conversation judges all answers.
    likeliest = logits(case, known).argmax(dim=-1).numpy()
    places = np.concatenate([np.arange(length, length + ANSWER_TOKENS) for length in lengths])
    assert (likeliest[places - 1] == np.array(known)[places]).all()

    cold = known[: lengths[-1]]
    with open_llm(folder, case, **store) as llm:
        assert ask(llm, cold, ANSWER_TOKENS) == (known[lengths[-1] :][:ANSWER_TOKENS], (len(cold) - 1) // BLOCK * BLOCK)
    for slab in tmp_path.glob("slab-*.kv"):
        content = np.fromfile(slab, np.uint8)
        # Headers stay as they are, so that all blocks are found.
        content[4096 + 700 :: 997] ^= 0x40
        content.tofile(slab)
    with open_llm(folder, case, **store) as llm:
        assert ask(llm, cold, ANSWER_TOKENS)[0] == known[lengths[-1] :][:ANSWER_TOKENS]
