"""Models with parts of their own under a scheduler that has little room."""

from dataclasses import replace

from tests.executor.tiny_models import greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import SchedulerSettings


def serve_in_little_room(executor, case, tokens=10):
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
        assert yard.tokens[number] == greedy(case, prompt, tokens)
    counters = yard.scheduler.snapshot(0).counters
    assert counters.hit_tokens
    assert counters.retracted
