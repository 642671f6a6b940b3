"""Greedy tokens are those of transformers under every policy, with preemption, pauses, retraction and changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import DEVICE, greedy
from tests.matrix.test_exactness import TOKENS, prompts
from tests.scheduler.harness import Yard
from tokenyard.base import Pause, Resume, SchedulerSettings, Update
from tokenyard.executor.model_loader import load_executor
from tokenyard.policy import POLICIES

CASE = "qwen2"
PAUSES = 6


def make_yard(folder, name, depth):
    """A scheduler over a pool that is much too small, in which any difference in priority preempts."""
    executor = load_executor(
        folder(CASE), device=DEVICE, dtype="float32", page_size=4, max_total_tokens=96, max_pool_rows=6 + depth
    )
    settings = SchedulerSettings(
        schedule_policy=name,
        page_size=4,
        max_running_requests=6,
        context_length=executor.info.context_length,
        chunked_prefill_size=16,
        prefill_decode_interval=2,
        max_partial_prefills=3,
        enable_priority_scheduling=True,
        priority_aging_s=0.0,
        priority_scheduling_preemption_threshold=0,
        headroom="none",
        max_in_flight=depth,
    )
    return Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)


def disturb(yard, numbers, depth, seed):
    """Run all requests to their end while priorities and deadlines change and some are paused for a while."""
    draw, paused, pauses = np.random.default_rng(seed), [], 0
    while len(yard.finished) < len(numbers):
        open_numbers = [number for number in numbers if number not in yard.finished]
        urgency = {"priority": int(draw.integers(0, 5)), "deadline_ns": int(draw.integers(1, 10**9))}
        yard.apply(Update(int(draw.choice(open_numbers)), **urgency))
        if pauses < PAUSES and draw.random() < 0.3:
            paused.append(int(draw.choice(open_numbers)))
            pauses += 1
            yard.apply(Pause(numbers=paused[-1:]))
        elif paused and draw.random() < 0.2:
            yard.apply(Resume(numbers=[paused.pop(0)]))
        while len(yard.tickets) < depth and yard.launch():
            pass
        if not yard.commit():
            yard.apply(Resume(numbers=paused))
            paused = []


@pytest.mark.part(6)
@pytest.mark.parametrize("name", [*POLICIES, "priority"])
def test_greedy_tokens_do_not_depend_on_the_policy(folder, name):
    torch.set_num_threads(1)
    depth = 1 + list(POLICIES).index(name) % 2 if name in POLICIES else 2
    yard = make_yard(folder, name, depth)
    asked = prompts()[:20]
    classes, tenants = (None, "priority", "high", "low"), ("", "a", "b")
    numbers = [
        yard.submit(
            prompt, max_new=TOKENS, priority=index % 4, service_class=classes[index % 4], tenant=tenants[index % 3]
        )
        for index, prompt in enumerate(asked)
    ]
    disturb(yard, numbers, depth, seed=len(name))
    for number, prompt in zip(numbers, asked, strict=True):
        assert yard.tokens[number] == greedy(CASE, prompt, TOKENS, yard.tokens[number])
    assert yard.scheduler.idle() is None
    counters = yard.scheduler.snapshot(0).counters
    assert counters.preempted > 0
    # `session` starts no row that it sees would not fit, so whether one has to leave depends on how fast steps are.
    assert counters.retracted > 0 or name == "session"
    assert counters.recomputed_tokens > 0
