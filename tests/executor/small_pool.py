"""Whole models under schedules that mix what rows can do; all answers are those of transformers."""

from dataclasses import replace

from tests.executor.tiny_models import greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import SchedulerSettings


def serve_with_small_pool(executor, case, tokens=10):
    """Have a scheduler serve prompts with a common prefix in chunks, hits and retractions; all answers are right."""
    settings = SchedulerSettings(
        page_size=4,
        max_running_requests=8,
        context_length=200,
        chunked_prefill_size=16,
        enable_mixed_chunk=True,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    yard = Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)
    common = prompt_of(20, seed=7)
    prompts = [common + prompt_of(3 + 4 * index, seed=index) for index in range(8)]
    numbers = [yard.submit(prompt, max_new=tokens) for prompt in prompts]
    yard.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy(case, prompt, tokens, yard.tokens[number])
    counters = yard.scheduler.snapshot(0).counters
    assert counters.hit_tokens
    assert counters.retracted


def run_all_kinds(driver, case):
    """Have a driver compute whole prompts, a prompt in chunks with decodes, and decodes; all tokens are right."""
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 33)]
    *rows, late = [driver.start(prompt) for prompt in prompts]
    driver.step(*[(row, None) for row in rows])
    for count in (20, None):
        driver.step((late, count), *[(row, 1) for row in rows])
    driver.step(*[(row, 1) for row in (*rows, late)])
    for prompt, row in zip(prompts, (*rows, late), strict=True):
        assert len(row.output) >= 2
        assert row.output == greedy(case, prompt, len(row.output), row.output)
