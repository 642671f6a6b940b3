"""A conversation with a model whose layers keep a recurrent state hits the prefix cache at every turn."""

import httpx2
import pytest

from tests.e2e.servers import Server
from tests.executor.tiny_models import judge, logits, prompt_of

CASE = "qwen3.5"
TURNS, ANSWER_TOKENS, TURN_TOKENS, INTERVAL = 18, 12, 8, 8
POOL = ("--page-size", "4", "--max-running-requests", "4")
POLICIES = {
    "one pool, divided by worth": ("--max-total-tokens", "500"),
    "per-path": ("--max-total-tokens", "800", "--max-mamba-cache-size", "12", "--mamba-retention-policy", "per-path"),
}
"""The others are in tests/scheduler/test_state_checkpoints.py."""


def ask(url, prompt, tokens):
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx2.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60)
    found = answer.json()
    assert answer.status_code == 200, found
    return found["output_ids"], found["meta_info"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_turns_hit_while_other_requests_evict(tmp_path, policy):
    judge(CASE).save_pretrained(tmp_path)
    flags = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--attention-backend", "gather")
    states = ("--mamba-track-interval", str(INTERVAL), "--skip-tokenizer-init")
    server = Server(str(tmp_path), *flags, *POOL, *POLICIES[policy], *states)
    try:
        known, answered, recomputed = prompt_of(40, seed=1), [], []
        for turn in range(TURNS):
            answer, hit = ask(server.url, known, ANSWER_TOKENS)
            recomputed.append(len(known) - hit)
            answered += range(len(known), len(known) + ANSWER_TOKENS)
            known = known + answer + prompt_of(TURN_TOKENS, seed=100 + turn)
            ask(server.url, prompt_of(60, seed=200 + turn), 4)
        gauges = httpx2.get(f"{server.url}/metrics", timeout=60).text
    finally:
        assert server.close() == 0
    assert recomputed[0] == 40
    # What is new, and what the last checkpoint of the answer lags behind its end.
    assert max(recomputed[1:]) <= TURN_TOKENS + INTERVAL + 1, recomputed
    assert "tokenyard_state_slots{model" in gauges
    # One pass over the conversation judges all answers.
    likeliest = logits(CASE, known).argmax(dim=-1).tolist()
    assert [likeliest[position - 1] for position in answered] == [known[position] for position in answered]
