"""Speculation changes no answer: greedy ones are those of transformers, sampled ones those without drafts."""

from dataclasses import replace

import pytest
import torch

from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tests.matrix.test_exactness import needs_native
from tests.scheduler.harness import Yard
from tokenyard.base import SamplingParams, SchedulerSettings
from tokenyard.executor.model_loader import load_executor

TOKENS = 40


def make_yard(folder, case, model_impl, depth, pages, drafts, page_size=4):
    torch.set_num_threads(1)
    executor = load_executor(
        folder(case),
        device=DEVICE,
        dtype="float32",
        page_size=page_size,
        max_total_tokens=pages * page_size,
        max_pool_rows=6 + depth,
        model_impl=model_impl,
        attention_backend="auto" if model_impl == "native" else "gather",
        draft_tokens=drafts,
    )
    settings = SchedulerSettings(
        page_size=page_size,
        max_running_requests=6,
        context_length=executor.info.context_length,
        chunked_prefill_size=16,
        max_in_flight=depth,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    return Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)


def varied(index, tokens, warm, **penalties):
    """How the request with this index is sampled: every way of it comes up."""
    return SamplingParams(
        max_new_tokens=tokens,
        temperature=(0.3, warm, 0.0)[index % 3],
        top_p=0.9,
        seed=index,
        n=1 + (index == 4),
        stop_token_ids=[index + 20],
        **penalties,
    )


def repetitive(length, seed):
    """A prompt whose end occurs in it before."""
    half = prompt_of(length // 2, seed=seed)
    return half + half[: length - len(half)]


@pytest.mark.part(6)
@pytest.mark.parametrize(("depth", "pages"), [(1, 400), (2, 400), (1, 40), (2, 40)])
@pytest.mark.parametrize(("case", "model_impl"), [("qwen3", "torch"), ("llama", "native"), ("qwen3-layers", "native")])
def test_greedy_answers_are_those_of_transformers(folder, case, model_impl, depth, pages):
    if model_impl == "native":
        needs_native()
    yard = make_yard(folder, case, model_impl, depth, pages, drafts=5)
    prompts = [repetitive(12 + 3 * index, seed=index) for index in range(8)]
    numbers = [yard.submit(prompt, max_new=TOKENS) for prompt in prompts]
    yard.run(depth)
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy(case, prompt, TOKENS, yard.tokens[number])
    counters = yard.scheduler.snapshot(0).counters
    assert counters.accepted_draft_tokens > 0
    assert counters.draft_tokens > counters.accepted_draft_tokens
    assert yard.scheduler.idle() is None
    if pages == 40:
        assert counters.retracted > 0


@pytest.mark.part(2)
@pytest.mark.parametrize("penalty", [0.0, 0.02])
@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_answers_are_those_without_drafts(folder, depth, penalty):
    def answers(drafts):
        yard = make_yard(folder, "qwen3", "torch", depth, 400, drafts)
        numbers = []
        for index in range(6):
            sampling = varied(
                *(index, TOKENS, 0.7),
                presence_penalty=0.4 * (index == 5),
                frequency_penalty=penalty,
                repetition_penalty=1.0 + penalty * (index != 3),
            )
            numbers.append(yard.submit(repetitive(20, seed=index), sampling=sampling))
        yard.run(depth)
        assert yard.scheduler.idle() is None
        ends = {number: (end.reason, end.completion_tokens) for number, end in yard.finished.items()}
        return yard.tokens, ends, yard.scheduler.snapshot(0).counters

    plain, drafting = answers(0), answers(6)
    assert plain[:2] == drafting[:2]
    assert drafting[2].draft_tokens > 0 == plain[2].draft_tokens
