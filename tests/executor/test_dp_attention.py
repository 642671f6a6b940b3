"""Data-parallel ranks that share MLPs: each answers as a whole model does, whatever the others compute meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import greedy, logits, prompt_of
from tokenyard.base import ConfigError, DeviceLostError, LogprobOptions
from tokenyard.executor.distributed.dp_attention import load_executor

OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 512, "max_pool_rows": 8}
ALL = LogprobOptions(output=True, top=3, prompt_from=0)
TOKENS = 8


def load_both(path, place, *changes):
    """Two ranks, each in its own thread, over gloo."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(load_executor, path, meeting=str(place / "m"), rank=rank, ranks=2, **OPTIONS | change)
            for rank, change in enumerate(changes or ({}, {}))
        ]
    return jobs


@contextmanager
def both(path, place):
    ranks = [job.result() for job in load_both(path, place)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def judge(case, driver, seeds):
    """Answer prompts in chunks and together, and compare with transformers."""
    prompts = [prompt_of(4 + 9 * seed, seed=seed) for seed in seeds]
    sequences = [driver.start(prompt, logprobs=ALL) for prompt in prompts]
    for sequence in sequences[:-1]:
        driver.prefill(sequence, chunk=7)
    driver.step((sequences[0], 1), (sequences[-1], 3))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert driver.generate(sequence, TOKENS) == greedy(case, prompt, TOKENS)
        found = {entry.position + i: value for entry in sequence.logprobs for i, value in enumerate(entry.logprobs)}
        known = sequence.known[: len(prompt) + TOKENS]
        expected = logits(case, known).log_softmax(-1)
        for position in range(1, len(known)):
            assert found[position] == pytest.approx(float(expected[position - 1, known[position]]), abs=1e-4)


@pytest.mark.part(5)
@pytest.mark.parametrize("case", ["llama", "llama-odd", "qwen3-moe", "gemma2", "gpt-oss"])
def test_each_rank_answers_as_the_whole_model(folder, tmp_path, case):
    with both(folder(case), tmp_path) as ranks:
        first, second = (Driver(rank) for rank in ranks)
        judge(case, first, (1, 2))
        # The other one had no rows.
        members = [rank.ranks.participant for rank in ranks]
        assert [member.idle_steps for member in members] == [0, members[1].rounds]
        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(judge, case, first, (3, 4, 0)), threads.submit(judge, case, second, (2, 5))]
        for job in jobs:
            job.result()
        assert members[0].rounds == members[1].rounds


def test_a_rank_has_the_whole_attention_and_a_share_of_the_mlp(folder, tmp_path):
    with both(folder("llama"), tmp_path) as ranks:
        assert [rank.kv_pool.tensor.shape[3] for rank in ranks] == [2, 2]
        sizes = {rank.model.decoder.config.intermediate_size for rank in ranks}
        assert sizes == {40}


def test_ranks_with_other_settings_are_refused(folder, tmp_path):
    jobs = load_both(folder("llama"), tmp_path, {}, {"page_size": 4})
    for job in jobs:
        with pytest.raises(ConfigError, match="data-parallel rank 1 has page_size 4, but rank 0 has 1"):
            job.result()


def test_a_rank_that_ends_ends_the_others(folder, tmp_path):
    with both(folder("llama"), tmp_path) as ranks:
        driver, reasons = Driver(ranks[0]), []
        reason = "data-parallel rank 1 has left"
        sequence = driver.start(prompt_of(9, seed=1))
        driver.generate(sequence, 2)
        ranks[1].close()
        with pytest.raises(DeviceLostError, match=reason):
            driver.generate(sequence, 50)
        # A later request fails the same way.
        ranks[0].on_lost(reasons.append)
        assert reasons == [reason]


def test_a_model_that_cannot_be_shared_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="does not divide the model's intermediate_size of 80"):
        load_executor(folder("llama"), meeting=str(tmp_path / "m"), rank=0, ranks=3, **OPTIONS)
