"""A draft model changes no answer, is kept in step with the large one, and is left alone once it proves wrong."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tests.matrix.test_exactness import needs_native
from tests.matrix.test_speculation_exactness import varied
from tests.scheduler.harness import Yard
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.executor.model_loader import load_executor

TOKENS = 30
OTHER_SEED = 7


def load(folder, case, model_impl="torch", draft="", pages=400, page_size=4, rows=8, **more):
    torch.set_num_threads(1)
    options = {
        "device": DEVICE,
        "dtype": "float32",
        "page_size": page_size,
        "max_total_tokens": pages * page_size,
        "max_pool_rows": rows,
        "model_impl": model_impl,
        "attention_backend": "auto" if model_impl == "native" else "gather",
        "draft_tokens": 4 if draft else 0,
        "draft_model": str(draft),
    }
    return load_executor(folder(case), **{**options, **more})


def make_yard(executor, depth=1, page_size=4):
    settings = SchedulerSettings(
        page_size=page_size,
        max_running_requests=6,
        context_length=executor.info.context_length,
        chunked_prefill_size=16,
        max_in_flight=depth,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    if executor.drafter is not None:
        # Tiny models take as long as their drafts; here drafts take no time, so that only acceptance counts.
        executor.drafter.clock = lambda: 0.0
    return Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)


def counters_of(yard):
    assert yard.scheduler.idle() is None
    return yard.scheduler.snapshot(0).counters


@pytest.mark.part(4)
@pytest.mark.parametrize(("depth", "pages"), [(1, 400), (2, 400), (1, 40), (2, 40)])
@pytest.mark.parametrize(("case", "model_impl"), [("qwen3", "torch"), ("llama", "native")])
def test_a_draft_model_equal_to_the_large_one_is_nearly_always_right(folder, case, model_impl, depth, pages):
    if model_impl == "native":
        needs_native()
    yard = make_yard(load(folder, case, model_impl, folder(case), pages), depth)
    shared = prompt_of(12, seed=50)
    prompts = [(shared if index % 2 else []) + prompt_of(12 + 3 * index, seed=index) for index in range(8)]
    numbers = [yard.submit(prompt, max_new=TOKENS) for prompt in prompts]
    yard.run(depth)
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy(case, prompt, TOKENS, yard.tokens[number])
    counters = counters_of(yard)
    assert counters.accepted_draft_tokens > 0.97 * counters.draft_tokens
    assert counters.accepted_draft_tokens > 0.6 * 8 * TOKENS
    if pages == 40:
        assert counters.retracted > 0


def test_what_a_grammar_forces_is_drafted_instead_of_the_models_drafts(folder):
    """A stand-in for a grammar forces the right tokens for a while; then the draft model takes in what it missed."""
    yard, prompt, forced_tokens = make_yard(load(folder, "qwen3", "torch", folder("qwen3"))), prompt_of(20, seed=3), 12
    answer, drafter = greedy("qwen3", prompt, TOKENS), yard.executor.drafter
    computed, step = [], drafter.model.step

    def forced(pool_row, proposed, most):
        done = len(drafter.rows[pool_row].ids) - len(prompt)
        ids = answer[done:forced_tokens][:most]
        return np.array(ids, np.int32), bool(ids)

    def noted(batch):
        computed.append(len(drafter.rows[0].ids) - len(prompt))
        return step(batch)

    yard.executor.grammar_rows.drafts, drafter.model.step = forced, noted
    number = yard.submit(prompt, max_new=TOKENS)
    yard.run(1)
    assert yard.tokens[number] == answer
    counters = counters_of(yard)
    assert counters.accepted_draft_tokens == counters.draft_tokens > TOKENS // 2
    assert min(computed) >= forced_tokens, "the draft model computed nothing while tokens were forced"


def random_draft(folder, case, tmp_path):
    """A model of the same shape with other weights."""
    copy = tmp_path / "other"
    shutil.copytree(folder(case), copy)
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    generator = torch.Generator().manual_seed(OTHER_SEED)
    save_file(
        {name: torch.randn(one.shape, generator=generator).to(one.dtype) * 0.3 for name, one in weights.items()},
        copy / "model.safetensors",
    )
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_is_wrong_changes_nothing_and_is_soon_not_asked(folder, tmp_path, depth):
    yard = make_yard(load(folder, "qwen3", draft=random_draft(folder, "qwen3", tmp_path)), depth)
    computed = []
    step = yard.executor.drafter.model.step
    yard.executor.drafter.model.step = lambda batch: (computed.append(len(batch.token_ids)), step(batch))[1]
    for group in range(12):
        prompts = [prompt_of(14, seed=100 * group + index) for index in range(6)]
        before = len(computed)
        numbers = [yard.submit(prompt, max_new=TOKENS) for prompt in prompts]
        yard.run(depth)
        if group < 2:
            for number, prompt in zip(numbers, prompts, strict=True):
                assert yard.tokens[number] == greedy("qwen3", prompt, TOKENS, yard.tokens[number])
    assert counters_of(yard).accepted_draft_tokens < 0.2 * counters_of(yard).draft_tokens
    assert before > 0
    assert len(computed) == before, "the last group ran without the draft model"


@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_answers_are_those_without_drafts_and_equal_models_draw_alike(folder, depth):
    def answers(draft):
        yard = make_yard(load(folder, "qwen3", draft=draft), depth)
        for index in range(6):
            sampling = varied(index, TOKENS, 0.9, frequency_penalty=0.02 * (index == 5))
            yard.submit(prompt_of(20, seed=index), sampling=sampling)
        yard.run(depth)
        ends = {number: (end.reason, end.completion_tokens) for number, end in yard.finished.items()}
        return yard.tokens, ends, counters_of(yard)

    plain, drafting = answers(""), answers(folder("qwen3"))
    assert plain[:2] == drafting[:2]
    assert drafting[2].accepted_draft_tokens > 0.8 * drafting[2].draft_tokens > 0


def test_it_catches_up_with_a_prompt_longer_than_it_takes_in_at_once(folder, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.draft_model.MAX_CATCH_UP_TOKENS", 8)
    yard = make_yard(load(folder, "qwen3", draft=folder("qwen3")))
    prompt = prompt_of(60, seed=3)
    number = yard.submit(prompt, max_new=TOKENS)
    yard.run()
    assert yard.tokens[number] == greedy("qwen3", prompt, TOKENS, yard.tokens[number])
    assert counters_of(yard).accepted_draft_tokens >= 20


def test_drafts_that_take_as_long_as_the_step_are_not_made():
    from tokenyard.executor.draft_model import DraftTimes

    times = DraftTimes()
    assert times.worthwhile(0.5, 4) == 4, "nothing is known yet"
    times.drafted(0.010)
    times.stepped(0.010)
    assert times.worthwhile(0.9, 4) == 0
    cheap = DraftTimes()
    cheap.drafted(0.001)
    cheap.stepped(0.010)
    assert cheap.worthwhile(0.9, 8) > cheap.worthwhile(0.5, 8) > 0 == cheap.worthwhile(0.05, 8)


def test_a_draft_model_that_does_not_fit_is_refused(folder, tmp_path):
    for name, tokenizer in (("one", '{"model": {"vocab": {"a": 0}}}'), ("two", '{"model": {"vocab": {"b": 0}}}')):
        shutil.copytree(folder("qwen3"), tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load(lambda case: tmp_path / "one", "qwen3", draft=tmp_path / "two")
    config = tmp_path / "two" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    with pytest.raises(ConfigError, match="same vocabulary"):
        load(lambda case: tmp_path / "one", "qwen3", draft=tmp_path / "two")
    with pytest.raises(ConfigError):
        load(folder, "qwen3", draft=tmp_path / "nowhere")
