"""A scheduler over a model whose pool is too small for its requests, and greedy answers under it."""

from dataclasses import replace

from tests.executor.tiny_models import greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import Pause, Resume, SamplingParams, SchedulerSettings


def yard_of(executor, **fields):
    settings = SchedulerSettings(
        page_size=executor.info.page_size,
        max_running_requests=6,
        context_length=200,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
        **{"chunked_prefill_size": 16, "enable_mixed_chunk": True} | fields,
    )
    return Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)


def check_greedy_answers(yard, case, tokens, depth=1):
    """Answers of `tokens` tokens are those of transformers: chunked, cached, retracted, paused and several at a time,
    and in a next turn, which hits what the first one left.
    """
    common = prompt_of(40, seed=7)
    prompts = [common + prompt_of(3 + 4 * index, seed=index) for index in range(6)]
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, n=2)
    numbers = [yard.submit(prompt, sampling=sampling) for prompt in prompts]
    for step in range(1000):
        if not yard.advance():
            break
        yard.check()
        if step in (4, 9):
            yard.apply(Pause("retract"))
            yard.apply(Resume())
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == yard.tokens[number + 1] == greedy(case, prompt, tokens, yard.tokens[number])
    turn = prompts[0] + yard.tokens[numbers[0]] + prompt_of(5, seed=50)
    number = yard.submit(turn, max_new=tokens)
    yard.run(depth)
    assert yard.tokens[number] == greedy(case, turn, tokens, yard.tokens[number])
    counters = yard.scheduler.snapshot(0).counters
    assert counters.hit_tokens > 40
    return counters


def seen_drafts(drafter):
    """A list that grows with each draft of `drafter`: the tokens of a row, and those drafted after them."""
    seen, fill_in = [], drafter.fill_in

    def spy(plan):
        tokens = fill_in(plan)
        for pool_row in plan.pool_rows[plan.decode_rows : plan.chunks_from].tolist():
            row = drafter.rows[pool_row]
            seen.append((list(row.ids), row.drafts.tolist()))
        return tokens

    drafter.fill_in = spy
    return seen
