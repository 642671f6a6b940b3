"""The steps before the first request, which touch page 0 alone and change no answer; and a step without memory."""

import numpy as np
import pytest
import torch

from tests.executor.small_pool import run_all_kinds
from tests.executor.tiny_models import greedy, prompt_of
from tokenyard.base import DRAFT, TokenyardError
from tokenyard.executor.warm_up import CHUNKS, plans, warm_up


@pytest.mark.parametrize(("case", "page_size"), [("llama", 1), ("qwen3-layers", 4)])
def test_only_page_0_is_written_and_answers_stay(make_driver, case, page_size):
    driver = make_driver(case, page_size=page_size)
    pool = driver.executor.kv_pool.tensor
    warm_up(driver.executor)
    assert pool[:, :, :page_size].any()
    assert not pool[:, :, page_size:].any()
    run_all_kinds(driver, case)


def test_a_draft_model_computes_runs_of_all_kinds(make_driver, folder):
    executor = make_driver("llama", draft_tokens=3, draft_model=folder("llama")).executor
    drafter = executor.drafter
    step, lengths = drafter.model.step, []

    def noted(batch):
        lengths.append(len(batch.token_ids))
        return step(batch)

    drafter.model.step = noted
    warm_up(executor)
    assert tuple(lengths) == CHUNKS


def test_drafts_come_to_the_host_once(make_driver, folder, monkeypatch):
    driver = make_driver("llama", page_size=16, draft_tokens=3, draft_model=folder("llama"))
    prompt, to_host = prompt_of(9, seed=1), torch.Tensor.cpu
    row, copies = driver.start(prompt), []
    driver.step((row, None))
    plan = driver.plan([(row, 1)])
    plan.counts, plan.samples, plan.decode_rows, plan.verify_rows = *np.full((2, 1), 4, np.int32), 0, 1
    plan.tokens = np.array([row.known[-1], DRAFT, DRAFT, DRAFT], np.int32)

    def counted(tensor):
        copies.append(tensor.shape)
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    with torch.inference_mode():
        tokens = driver.executor.drafter.fill_in(plan)
    # The draft model is the model, so its drafts are what follows.
    assert tokens.tolist() == greedy("llama", prompt, 4)
    assert len(copies) == 1


def test_a_short_context_gets_the_steps_that_fit_it():
    found = list(plans(10))
    assert max(int(plan.starts[0] + plan.counts[0]) for plan in found) <= 10
    assert {int(plan.counts[0]) for plan in found if not plan.decode_rows} == {1, 2, 3, 5, 9}


def test_a_step_without_memory_frees_what_the_allocator_keeps_and_can_be_tried_again(make_driver, monkeypatch):
    driver, emptied = make_driver("llama"), []
    model, prompt = driver.executor.model, prompt_of(9, seed=1)
    step = model.step

    def no_memory(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    row = driver.start(prompt)
    plan = driver.plan([(row, len(prompt))])
    model.step = no_memory
    with pytest.raises(TokenyardError, match=r"step of 9 tokens .CUDA out of memory.; lower --mem-fraction-static"):
        driver.executor.launch(plan)
    assert emptied
    model.step = step
    assert driver.executor.collect(driver.executor.launch(plan)).tokens.tolist() == greedy("llama", prompt, 1)
