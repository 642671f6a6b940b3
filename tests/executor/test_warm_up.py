"""The steps before the first request: they run all kinds, touch page 0 alone, and change no answer."""

import pytest

from tests.executor.small_pool import run_all_kinds
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
    drafter = make_driver("llama", draft_tokens=3, draft_model=folder("llama")).executor.drafter
    step, lengths = drafter.model.step, []

    def noted(batch):
        lengths.append(len(batch.token_ids))
        return step(batch)

    drafter.model.step = noted
    drafter.warm_up(CHUNKS)
    assert tuple(lengths) == CHUNKS
    assert not drafter.rows


def test_a_short_context_gets_the_steps_that_fit_it():
    found = list(plans(10))
    assert max(int(plan.starts[0] + plan.counts[0]) for plan in found) <= 10
    assert {int(plan.counts[0]) for plan in found if not plan.decode_rows} == {1, 2, 3, 5, 9}
