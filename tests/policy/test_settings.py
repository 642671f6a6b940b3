"""Flags of scheduling: each one makes a difference, and what makes no sense is refused in one sentence."""

from dataclasses import fields

import numpy as np
import pytest

from tests.policy.timed_scheduler import COST, ClockedYard, S
from tests.scheduler.harness import make_info
from tokenyard.base import ConfigError, SchedulerSettings, Slo, TenantSettings
from tokenyard.base.declare import declarations
from tokenyard.base.ranges import MAX_PRIORITY
from tokenyard.config import Settings
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.wiring import engine_config

PRIORITIES = {"enable_priority_scheduling": True, "priority_aging_s": 0.0}
LEVELS = {"enable_service_levels": True, "service_level_quantum_tokens": 16}
SLO = {"schedule_policy": "slo"}

DIFFERENCES = {
    "schedule_policy": ({}, "short-first"),
    "policy_options": ({"schedule_policy": "short-first"}, {"output_weight": 20.0}),
    "lpm_degrade_threshold": ({"schedule_policy": "lpm"}, 2),
    "in_batch_prefix_caching_check_threshold": ({"schedule_policy": "lpm"}, -1),
    "in_batch_prefix_caching_deprioritize_threshold": ({"schedule_policy": "lpm"}, 1000),
    "enable_priority_scheduling": ({}, True),
    "schedule_low_priority_values_first": (PRIORITIES, True),
    "priority_scheduling_preemption_threshold": (PRIORITIES | {"default_priority_value": 0}, 100),
    "disable_priority_preemption": (PRIORITIES, True),
    "default_priority_value": (PRIORITIES, 10),
    "priority_aging_s": (PRIORITIES, 0.001),
    "abort_on_priority_when_disabled": ({}, True),
    "enable_service_levels": ({}, True),
    "service_level_weights": (LEVELS, (1, 1, 30)),
    "service_level_quantum_tokens": (LEVELS, 500),
    "strict_level_share": (LEVELS, 0.01),
    "max_overtaken_tokens": ({"schedule_policy": "short-first"}, 20),
    "max_queued_requests": ({}, 3),
    "chunked_prefill_size": ({}, 16),
    "max_prefill_tokens": ({}, 48),
    "prefill_max_requests": ({}, 1),
    "max_partial_prefills": (PRIORITIES | {"chunked_prefill_size": 32}, 3),
    "prefill_decode_interval": ({"prefill_max_requests": 1}, 1),
    "enable_mixed_chunk": ({}, True),
    "enable_dynamic_chunking": ({"chunked_prefill_size": 96}, True),
    "step_budget": ({}, "time"),
    "decode_share": ({}, 0.5),
    "session_max_wait_s": ({"schedule_policy": "hits-first", "policy_options": {"cheap_s": 0.004}}, 0.01),
    "headroom": ({}, "none"),
    "retraction_policy": ({"headroom": "none"}, "newest"),
    "schedule_conservativeness": ({}, 2.0),
    "init_new_token_ratio": ({}, 0.1),
    "min_new_token_ratio_factor": ({"new_token_ratio_decay_steps": 5}, 0.9),
    "new_token_ratio_decay_steps": ({}, 5),
    "clip_max_new_tokens": ({}, 2),
    "retract_decode_steps": ({"schedule_conservativeness": 0.2}, 1),
    "disable_radix_cache": ({}, True),
    "queue_timeout_s": ({}, 0.02),
    "run_timeout_s": ({}, 0.02),
    "slo_ttft_ms": (SLO | {"slo_ttft_scale": 0.0}, 100.0),
    "slo_ttft_scale": (SLO | {"slo_ttft_ms": 1.0}, 50.0),
    "slo_tpot_ms": (SLO, 2.0),
    "slo_max_wait_s": (SLO | {"slo_ttft_ms": 5.0, "slo_ttft_scale": 0.0}, 0.05),
    "slo_reject": (SLO | {"slo_ttft_ms": 5.0, "slo_ttft_scale": 0.0}, True),
    "slo_idle_step_ms": (SLO, 3.0),
    "slo_chunk_tokens": (SLO | {"slo_tpot_ms": 4.0}, 1),
    "tenants": ({}, {"a": TenantSettings(max_running=1)}),
    "max_running_requests": ({}, 2),
}
ELSEWHERE = {
    "enable_hierarchical_cache": "tests/scheduler/test_store_queue.py",
    "hicache_write_policy": "tests/scheduler/test_store_queue.py",
    "page_size": "the executor's; every test of the cache",
    "context_length": "the model's; tests/engine/test_config.py",
    "max_in_flight": "the event loop's; tests/property/test_event_loops.py",
    "radix_eviction_policy": "tests/cache/test_eviction.py",
    "dp_size": "an engine's ranks; tests/policy/test_tenants_across_ranks.py",
    "enable_lora": "tests/scheduler/test_adapters.py",
    "max_loras_per_batch": "tests/scheduler/test_adapters.py",
    "lora_drain_wait_threshold": "tests/scheduler/test_adapters.py, tests/property/test_adapters.py",
    "mamba_full_memory_ratio": "tests/executor/test_state_models.py",
    "max_mamba_cache_size": "tests/executor/test_state_models.py",
    "mamba_track_interval": "tests/scheduler/test_state_checkpoints.py",
    "mamba_retention_policy": "tests/policy/test_state_retention.py",
    "mamba_max_states_per_path": "tests/policy/test_state_retention.py",
    "enable_kv_events": "changes no plan; tests/engine/test_kv_events.py",
}
"""Settings that are tested where they belong."""


CURVED = LinearCost(LinearTerms(step_ms=0.0, floor_ms=1.0, dense_ms=1.0, token_ms=0.1, context_ms=0.0, area_ms=0.002))


def timings(**settings):
    """What 48 mixed requests on a small device come to: every plan, and how each request ended."""
    chosen = SchedulerSettings(
        **{"max_running_requests": 6, "context_length": 512, "clip_max_new_tokens": 64, **settings}
    )
    yard = ClockedYard(chosen, make_info(400, 1, 6, 512), CURVED, answer_tokens=(2, 40))
    draw = np.random.default_rng(1)
    for index in range(48):
        shared = [int(draw.integers(5, 8))] * int(draw.integers(1, 150))
        yard.submit(
            shared + [20 + index] * int(draw.integers(1, 40)),
            max_new=int(draw.integers(2, 40)),
            arrival_ns=yard.now + 1,
            priority=[None, 0, 3, 30][draw.integers(4)],
            service_class=[None, "priority", "high", "low"][draw.integers(4)],
            tenant=["", "a", "b"][draw.integers(3)],
            slo=[None, Slo(tpot_ns=10**8)][draw.integers(2)],
        )
        yard.until(yard.now + int(draw.integers(0, S // 300)))
    yard.rest()
    plans = [(plan.pool_rows.tolist(), plan.counts.tolist(), plan.tokens.tolist()) for plan in yard.plans]
    return plans, {number: (finish.reason, finish.admitted_ns) for number, finish in yard.finished.items()}


def test_every_setting_is_looked_at():
    assert {item.name for item in fields(SchedulerSettings)} == DIFFERENCES.keys() | ELSEWHERE.keys()


@pytest.mark.part(6)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_setting_makes_a_difference(name):
    around, value = DIFFERENCES[name]
    assert timings(**around | {name: value}) != timings_without(name)


def timings_without(name):
    """What comes of the settings around one; many share the same, which are then run once."""
    around = DIFFERENCES[name][0]
    if (known := _known.get(str(around))) is None:
        known = _known[str(around)] = timings(**around)
    return known


_known = {}


def test_the_course_repeats_itself():
    assert timings(**SLO) == timings(**SLO)


def test_every_number_has_a_range():
    for settings in (SchedulerSettings(), TenantSettings()):
        declared = declarations(settings)
        values = {name: getattr(settings, name) for name in declared}
        numbers = {name for name, value in values.items() if type(value) in (int, float)}
        ranges = {name for name, one in declared.items() if one.allowed is not None}
        assert numbers - {"context_length"} <= ranges
        for name, one in declared.items():
            one.check(name, values[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300, -1e300])
@pytest.mark.parametrize("name", [name for name, one in declarations(SchedulerSettings).items() if one.allowed])
def test_absurd_numbers_are_refused_with_the_flag_and_the_range(name, value):
    flag = ("" if declarations(SchedulerSettings)[name].file_only else "--") + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} is .*; it must be (at least|above|at most) "):
        SchedulerSettings(**{name: value}).validate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_queued_requests": 0}, "it must be at least 1, or -1 (no limit)"),
        (
            {"queue_timeout_s": 0.0},
            "--queue-timeout-s is 0; it must be above 0 and at most 1000000000, or -1 (no limit)",
        ),
        ({"priority_aging_s": 2000.0}, "above 0 and at most 1000, or 0 (no aging)"),
        ({"strict_level_share": 1.0}, "--strict-level-share is 1; it must be at least 0.001 and at most 0.999"),
        ({"default_priority_value": 10**30, **PRIORITIES}, f"at most {MAX_PRIORITY}"),
        ({"default_priority_value": 1}, "--default-priority-value needs --enable-priority-scheduling"),
        ({"schedule_low_priority_values_first": True}, "needs --enable-priority-scheduling"),
        ({"abort_on_priority_when_disabled": True, **PRIORITIES}, "drop one of the two"),
        ({"service_level_weights": (8, 4)}, "three whole numbers"),
        ({"service_level_weights": (8, 4, 0)}, "three whole numbers"),
        ({"slo_ttft_ms": 0.0, "slo_ttft_scale": 0.0}, "must not both be 0"),
        ({"slo_reject": True}, "are for --schedule-policy slo, not fcfs"),
        ({"slo_max_wait_s": 5.0, "schedule_policy": "edf"}, "are for --schedule-policy slo, not edf"),
        ({"slo_reject": True, "slo_max_wait_s": 5.0, **SLO}, "drop one"),
        ({"enable_dynamic_chunking": True, "chunked_prefill_size": -1}, "needs a --chunked-prefill-size"),
        ({"enable_dynamic_chunking": True, "step_budget": "time"}, "both size chunks"),
        ({"headroom": "history "}, "choose from ratio, history"),
        ({"retraction_policy": "oldest"}, "choose from length, newest"),
        ({"schedule_policy": "slow"}, "did you mean slo"),
        ({"schedule_policy": "short-first", "policy_options": {"quantile": 7.0}}, "from 0 to 1"),
        ({"schedule_policy": "dlpm", "policy_options": {"quantum_tokens": 0}}, "must be from 1 to"),
        ({"schedule_policy": "random", "policy_options": {"seed": -1}}, "must be from 0 to"),
        ({"schedule_policy": "mlfq", "policy_options": {"promote_s": float("nan")}}, "must be from 0 to"),
        ({"tenants": {"a": TenantSettings(kv_share=0.6), "b": TenantSettings(kv_share=0.5)}}, "must not exceed 1"),
        ({"tenants": {"*": TenantSettings(kv_share=0.2)}}, "only tenants that are named"),
        ({"tenants": {"a": TenantSettings(weight=0.0)}}, "tenant 'a': weight is 0; it must be above 0"),
        ({"tenants": {"a": TenantSettings(tokens_per_s=float("inf"))}}, "tenant 'a': tokens_per_s is inf"),
        ({"tenants": {"a": TenantSettings(max_running=0)}}, "at least 1, or -1 (no limit)"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_start(flags, words):
    with pytest.raises(ConfigError) as caught:
        engine_config(Settings(**flags).effective())
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tenant_without_a_quota_is_served_next_to_those_that_have_one():
    tenants = {"a": TenantSettings(kv_share=1.0, weight=5.0), "b": TenantSettings(max_running=1)}
    chosen = SchedulerSettings(max_running_requests=6, context_length=512, schedule_policy="vtc", tenants=tenants)
    yard = ClockedYard(chosen, make_info(200, 1, 6, 512), COST)
    numbers = [yard.submit([5 + index] * 30, max_new=20, tenant="abc"[index % 3]) for index in range(18)]
    yard.rest()
    assert {yard.finished[number].completion_tokens for number in numbers} == {20}
