"""Makes the frozen tapes (`python -m tests.tape.freeze`): every policy, one and two plans in flight, both executors.

They are made once and kept. A change that alters plans on purpose recreates them and says which changed.
"""

import argparse
import gzip
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.scheduler.harness import make_info
from tests.tape.test_tape import TapedYard
from tokenyard.base import (
    Cancel,
    Flush,
    LogprobOptions,
    Pause,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    StopFound,
    TenantSettings,
    Update,
)
from tokenyard.cost import unknown_cpu
from tokenyard.executor.mock import MockExecutor
from tokenyard.policy import POLICIES

FOLDER = Path(__file__).parent / "frozen"
REQUESTS = 36
MAX_TURNS = 20_000
CONTEXT = 96
TENANTS = {
    "a": TenantSettings(weight=2.0, tokens_per_s=9000.0, burst_tokens=64, kv_share=0.4),
    "b": TenantSettings(kv_share=0.2),
    "*": TenantSettings(max_running=2, max_queued=8),
}
TORCH_CASES = (("fcfs", 1), ("lpm", 2), ("vtc", 2), ("mlfq", 1))
NEW_POLICIES = ("hits-first", "session", "program-fcfs", "plas", "continuum", "pause-idle")
"""Policies that came after the first tapes. What is around a policy depends on its place in the list."""

AROUND = {
    "plain": {},
    "priorities": {"enable_priority_scheduling": True, "retraction_policy": "priority", "headroom": "history"},
    "levels": {"enable_service_levels": True, "service_level_quantum_tokens": 16, "max_overtaken_tokens": 60},
    "tenants": {
        "tenants": TENANTS,
        "headroom": "none",
        "enable_priority_scheduling": True,
        "radix_eviction_policy": "lfu",
    },
    "timed": {"step_budget": "time", "slo_chunk_tokens": 8, "headroom": "past-future", "retraction_policy": "slack"},
    "mixed": {"enable_mixed_chunk": True, "headroom": "none", "retraction_policy": "newest", "max_partial_prefills": 3},
}


def chosen(policy: str, depth: int, around: str, **more: object) -> SchedulerSettings:
    """Settings under which rows, pages and the queue all run short."""
    return SchedulerSettings(
        page_size=4,
        max_running_requests=4,
        max_queued_requests=14,
        context_length=CONTEXT,
        chunked_prefill_size=16,
        schedule_policy=policy,
        prefill_decode_interval=2,
        max_in_flight=depth,
        schedule_conservativeness=0.2,
        slo_ttft_ms=60.0,
        slo_max_wait_s=0.5,
        queue_timeout_s=1.5,
        **AROUND[around],
        **more,
    )


def drive(yard: TapedYard, rng: random.Random, depth: int, switches: bool) -> None:
    """Requests and other events at random moments, until everything has ended."""
    left, turns = REQUESTS, 0
    while left or yard.tickets or yard.scheduler.has_work:
        turns += 1
        assert turns < MAX_TURNS, "the scheduler does not come to rest"
        for _ in range(min(left, rng.choice((0, 0, 1, 2)))):
            submit(yard, rng)
            left -= 1
        if left and rng.random() < 0.12:
            yard.apply(event(yard, rng, switches))
        if not left and turns % 16 == 0:
            yard.apply(Resume())
            yard.apply(Resume(list(range(1, 3 * REQUESTS))))
        while len(yard.tickets) < depth and yard.launch():
            pass
        if not yard.commit():
            yard.now += 5_000_000
    yard.scheduler.idle()
    assert not yard.scheduler.has_work


def submit(yard: TapedYard, rng: random.Random) -> None:
    """One request out of a few families of prompts."""
    prefix = rng.choice(([], [5] * 12, [5, 6, 7, 8] * 6))
    if yard.tokens and rng.random() < 0.2:
        prefix = [*prefix, *rng.choice(list(yard.tokens.values()))][:40]
    prompt = [*prefix, *(rng.randint(3, 9) for _ in range(rng.randint(1, 30)))]
    n = rng.choice((1, 1, 1, 1, 2))
    yard.submit(
        prompt,
        sampling=SamplingParams(
            max_new_tokens=rng.choice((0, 1, 8, 24, 40)),
            temperature=0.0,
            n=n,
            seed=rng.randint(0, 99),
            stop_token_ids=rng.choice(([], [], [11])),
        ),
        tenant=rng.choice(("", "a", "b", "c")),
        cache_salt=rng.choice(("", "", "", "salt")),
        routing_key=rng.choice((None, "x", "y")),
        priority=rng.choice((None, 0, 5, 40)),
        service_class=rng.choice((None, "high", "low", "strict")),
        deadline_ns=rng.choice((None, None, 90_000_000)),
        logprobs=rng.choice((None, None, LogprobOptions(prompt_from=1))),
    )


def event(yard: TapedYard, rng: random.Random, switches: bool) -> object:
    """Anything but a new request."""
    numbers = [rng.randint(1, REQUESTS) for _ in range(2)]
    choices = [
        lambda: Cancel(numbers),
        lambda: Update(numbers[0], priority=rng.choice((None, 30)), boost=rng.choice((None, 3))),
        lambda: Update(numbers[0], deadline_ns=40_000_000),
        lambda: Pause(numbers=numbers),
        lambda: Resume(numbers),
        lambda: Pause(rng.choice(("in_place", "retract"))),
        lambda: Resume(),
        lambda: StopFound(numbers[0], 1, "x"),
        lambda: Flush(),
    ]
    if switches:
        choices.append(lambda: SetPolicy(rng.choice(("fcfs", "slo", "lpm", "vtc"))))
    return rng.choice(choices)()


def mock_yard(settings: SchedulerSettings) -> TapedYard:
    """A yard on the mock device, whose steps take what a profile says."""
    info = make_info(40, 4, 4 + settings.max_in_flight, CONTEXT)
    cost = unknown_cpu()
    device = MockExecutor(info, cost, sleep=False, answer_tokens=(2, 40))
    return TapedYard(settings, info, key=None, executor=device)


def torch_yard(settings: SchedulerSettings) -> TapedYard:
    """A yard on a tiny random model."""
    from tests.executor.tiny_models import judge
    from tokenyard.executor.model_loader import load_executor

    with tempfile.TemporaryDirectory() as folder:
        judge("qwen3-layers").save_pretrained(folder)
        options = {"device": "cpu", "dtype": "float32", "page_size": 4}
        rows = 4 + settings.max_in_flight
        device = load_executor(folder, max_total_tokens=160, max_pool_rows=rows, **options)
    return TapedYard(settings, device.info, key=None, executor=device)


def cases() -> Iterator[tuple[str, str, int, str]]:
    """Name, policy, plans in flight and what is around the policy."""
    kinds = list(AROUND)
    first = sorted(set(POLICIES).difference(NEW_POLICIES))
    for place, policy in enumerate([*first, "priority", *NEW_POLICIES]):
        for depth in (1, 2):
            yield f"{policy}-{depth}-plain", policy, depth, "plain"
            around = kinds[1 + (place * 2 + depth) % (len(kinds) - 1)]
            yield f"{policy}-{depth}-{around}", policy, depth, around
    for around in kinds[1:]:
        for depth in (1, 2):
            yield f"fcfs-{depth}-{around}", "fcfs", depth, around


def main() -> None:
    """Write the tapes whose names hold one of the given words, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    FOLDER.mkdir(exist_ok=True)

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    for name, policy, depth, around in dict.fromkeys(cases()):
        if wanted(f"mock-{name}"):
            yard = mock_yard(chosen(policy, depth, around))
            drive(yard, random.Random(name), depth, switches="2" in name)
            write(f"mock-{name}", yard)
    for policy, depth in TORCH_CASES:
        if wanted(name := f"torch-{policy}-{depth}"):
            yard = torch_yard(chosen(policy, depth, "plain"))
            drive(yard, random.Random(name), depth, switches=False)
            write(name, yard)


def write(name: str, yard: TapedYard) -> None:
    """Keep a tape, packed."""
    path = FOLDER / f"{name}.tape.gz"
    path.write_bytes(gzip.compress(yard.file.getvalue(), mtime=0))
    counters = yard.scheduler.snapshot(yard.now).counters
    print(name, path.stat().st_size, counters.steps, counters.retracted, counters.preempted, flush=True)


if __name__ == "__main__":
    main()
