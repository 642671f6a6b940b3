"""A model divided among ranks: threads of one process are the judge of processes, transformers that of both."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.executor.driver import Driver
from tests.executor.small_pool import run_all_kinds
from tests.executor.test_cuda_graphs import Player, TableAttention
from tests.executor.test_grammar import TOKENIZER
from tests.executor.test_pieces import assert_copies_serve
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import greedy, logits, prompt_of
from tests.matrix.test_grammar_exactness import DelayedYard
from tokenyard.base import ConfigError, LogprobOptions, OpenGate, SamplingParams, SchedulerSettings
from tokenyard.config import DEMO_MODEL
from tokenyard.executor import weights
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.distributed.distributed_loader import load_executor as load_divided
from tokenyard.executor.distributed.tensor_parallel import kv_heads
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.warm_up import warm_up
from tokenyard.scheduler.row_state import Gate

OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1}
ALL = LogprobOptions(output=True, top=3, prompt_from=0)
TOKENS = 8


def driver_over(load, path, size, **options):
    torch.set_num_threads(1)
    sizes = {"max_total_tokens": 512, "max_pool_rows": 8, "page_size": 4}
    keyword = {"tp_size": size} if load is load_divided else {"size": size}
    return Driver(load(path, **keyword, **OPTIONS, **{**sizes, **options}))


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("case", "size", "attention_backend"),
    [
        ("llama", 2, "auto"),
        ("llama", 4, "gather"),
        ("llama-biases", 2, "auto"),
        ("qwen2-window", 2, "auto"),
        ("qwen3-layers", 4, "gather"),
        ("qwen3-moe", 2, "auto"),
        ("qwen3-moe-mixed", 4, "auto"),
        ("phi3", 2, "auto"),
        ("gemma2", 2, "auto"),
        ("gpt-oss", 2, "auto"),
        ("llama-12-of-3", 2, "auto"),
        ("llama-12-of-3", 2, "gather"),
        ("qwen2-6-of-2", 3, "gather"),
        ("gpt-oss-12-of-3", 2, "auto"),
    ],
)
def test_ranks_together_are_the_model(folder, case, size, attention_backend):
    driver = driver_over(load_virtual, folder(case), size, attention_backend=attention_backend)
    prompts = [prompt_of(length, seed=length) for length in (5, 23, 40)]
    sequences = [driver.start(prompt, logprobs=ALL) for prompt in prompts]
    for sequence in sequences[:2]:
        driver.prefill(sequence, chunk=7)
    driver.step((sequences[0], 1), (sequences[2], 16), (sequences[1], 1))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert driver.generate(sequence, TOKENS) == greedy(case, prompt, TOKENS)
        found = {entry.position + i: value for entry in sequence.logprobs for i, value in enumerate(entry.logprobs)}
        known = sequence.known[: len(prompt) + TOKENS]
        expected = logits(case, known).log_softmax(-1)
        for position in range(1, len(known)):
            assert found[position] == pytest.approx(float(expected[position - 1, known[position]]), abs=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3-layers"])
def test_ranks_capture_and_replay_steps_together(folder, case):
    """Sums over the ranks are part of a captured step, which each of them chooses by the plan."""
    players = []

    def captured(executor):
        model, player = executor.model, Player()
        players.append(player)
        model.attention = TableAttention(executor.kv_pool, executor.pages, model.attention_spec)
        config, device = read_folder_config(Path(folder(case))), torch.device("cpu")
        return CudaGraphRunner(model, config, 2, device, player, max_tokens=24, divided=True)

    driver = driver_over(load_virtual, folder(case), 2, attention_backend="gather", captured=captured)
    run_all_kinds(driver, case)
    assert len(players[0].played) >= 2
    assert players[0].played == players[1].played


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("llama-odd", 2, "--tp-size 2 does not divide the model's num_attention_heads of 3"),
        ("llama", 3, "--tp-size 3 does not divide the model's num_attention_heads of 4"),
        ("qwen3-moe", 16, "--tp-size 16 does not divide the model's num_attention_heads of 4"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(folder, case, size, message):
    with pytest.raises(ConfigError, match=message):
        load_virtual(folder(case), size, **OPTIONS)


@pytest.mark.parametrize(
    ("heads", "kv", "size", "kept"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (12, 3, 2, [[0, 0, 1], [1, 2, 2]]),
        (6, 2, 3, [[0, 0], [0, 1], [1, 1]]),
        (12, 4, 6, [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]),
        (6, 1, 3, [[0], [0], [0]]),
    ],
)
def test_a_rank_keeps_the_kv_heads_that_its_query_heads_attend_to(folder, heads, kv, size, kept):
    whole = replace(read_folder_config(Path(folder("llama"))), num_heads=heads, num_kv_heads=kv)
    assert [kv_heads(whole, rank, size) for rank in range(size)] == kept


class OpenFile:
    """A safetensors file that notes which tensors are read whole."""

    whole: ClassVar[list[str]] = []

    def __init__(self, *given, **options):
        self._file = safe_open(*given, **options)
        self.keys, self.get_slice = self._file.keys, self._file.get_slice

    def get_tensor(self, name):
        self.whole.append(name)
        return self._file.get_tensor(name)


def test_a_rank_reads_only_its_slices(folder, monkeypatch):
    monkeypatch.setattr(weights, "safe_open", OpenFile)
    monkeypatch.setattr(OpenFile, "whole", [])
    load_virtual(folder("llama"), 2, **OPTIONS)
    assert {name.split(".")[-2] for name in OpenFile.whole} == {
        *("norm", "input_layernorm", "post_attention_layernorm")
    }


def test_native_kernels_for_whole_steps_are_refused(folder):
    with pytest.raises(ConfigError, match="--model-impl native computes whole steps"):
        load_virtual(folder("llama"), 2, **OPTIONS, model_impl="native")


def test_random_weights_are_those_of_the_whole_model(folder):
    options = {**OPTIONS, "load_format": "dummy", "seed": 3, "max_total_tokens": 256, "max_pool_rows": 4}
    prompt = prompt_of(20, seed=1)
    whole = Driver(load_executor(folder("llama"), model_impl="torch", **options))
    ranks = Driver(load_virtual(folder("llama"), 2, **options))
    assert ranks.generate(ranks.start(prompt), TOKENS) == whole.generate(whole.start(prompt), TOKENS)


SAMPLED = [
    SamplingParams(temperature=0.0, max_new_tokens=40),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, max_new_tokens=40),
    SamplingParams(temperature=0.9, seed=6, top_k=20, frequency_penalty=0.7, repetition_penalty=1.2, max_new_tokens=40),
]
GRAMMAR = "start: /[a-z ]{12,30}/"


def life_of_a_server(executor, depth=2):
    """Serve requests: chunks, prefix hits, retractions, steps in flight, grammars, penalties, drafts.

    Returns the tokens of all answers, and what happened on the way.
    """
    settings = SchedulerSettings(
        max_running_requests=8,
        context_length=executor.info.context_length,
        page_size=executor.info.page_size,
        chunked_prefill_size=16,
        max_in_flight=depth,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    yard = DelayedYard(settings, executor.info, executor=executor)
    executor.compile_grammar(GRAMMAR, lambda: TOKENIZER)
    shared, numbers = prompt_of(30, seed=9), []
    for place in range(9):
        sampling = SAMPLED[place % len(SAMPLED)]
        grammar = GRAMMAR if place in (3, 4) else ""
        prompt = shared + prompt_of(3 + 5 * place, seed=place)
        number = yard.submit(prompt, sampling=sampling, grammar=grammar)
        if grammar:
            yard.apply(OpenGate(number, Gate.GRAMMAR))
        numbers.append(number)
        if place % 3 == 0:
            for _ in range(3):
                yard.advance(depth)
    yard.run(depth)
    assert yard.scheduler.idle() is None
    return [yard.tokens[number] for number in numbers], yard.scheduler.snapshot(0).counters


SERVED = {"max_total_tokens": 400, "max_pool_rows": 10, "page_size": 4, "draft_tokens": 4}


@pytest.fixture(scope="module")
def processes():
    """The demo model over two processes."""
    torch.set_num_threads(1)
    executor = load_divided(str(DEMO_MODEL), tp_size=2, share_kv=True, **OPTIONS, **SERVED)
    # As on devices, where kernels compile in it.
    warm_up(executor, executor.collect)
    yield executor
    executor.close()


def watch_logits(executor):
    """The logits of all that the executor samples from now on."""
    seen, sample = [], executor.sampler.sample

    def spy(values, *rest):
        seen.append(values.clone())
        return sample(values, *rest)

    executor.sampler.sample = spy
    return seen


def assert_equal_bits(found, judged):
    assert len(found) == len(judged) > 20
    assert all(map(torch.equal, found, judged))


def test_processes_compute_what_threads_compute_bit_for_bit(processes):
    threads = load_virtual(str(DEMO_MODEL), 2, **OPTIONS, **SERVED)
    found, judged = watch_logits(processes), watch_logits(threads)
    tokens, counters = life_of_a_server(processes)
    assert counters.retracted > 0
    assert counters.hit_tokens > 100
    assert counters.accepted_draft_tokens > 0
    assert life_of_a_server(threads)[0] == tokens
    assert_equal_bits(found, judged)
    driver = Driver(processes)
    ends = [step["step"] for step in processes.describe_ranks()]
    assert ends[0] == ends[1]
    assert driver.info.num_pages == 100
    assert np.isfinite([step["silent_s"] for step in processes.describe_ranks()]).all()


@pytest.mark.slow
def test_kv_that_is_copied_is_as_good_as_computed(processes):
    assert_copies_serve(processes)
