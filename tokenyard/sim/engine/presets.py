"""Settings of other engines, as baselines in the same simulator.

`vllm-v1` and `sglang-0.5` are today's defaults of these engines, with a prefix cache. The other ones are the columns of
the project's reference simulation: only `sglang-lpm` has a prefix cache, and SGLang's size their headroom by past
outputs, where SGLang itself reserves a share of max_new_tokens (`headroom="ratio"` is that rule).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from tokenyard.base import ConfigError, SchedulerSettings

UNLIMITED_TOKENS = 1 << 30
PAGE_SIZE = 16
MAX_RUNNING = 1024
"""High enough that memory, not the number of rows, limits the batch."""


def _sglang(base: SchedulerSettings) -> SchedulerSettings:
    """Prefill strictly before decode, first come first served, chunks of 8192, headroom by past outputs."""
    return replace(base, chunked_prefill_size=8192, prefill_decode_interval=0, headroom="history")


def _vllm(base: SchedulerSettings) -> SchedulerSettings:
    """Decode in every step, prefill fills the step up to 8192 tokens; no headroom, the newest request is retracted."""
    return replace(
        base, chunked_prefill_size=8192, enable_mixed_chunk=True, headroom="none", retraction_policy="newest"
    )


def _by_priority(base: SchedulerSettings) -> SchedulerSettings:
    """Order by request priority, without aging."""
    return replace(base, schedule_policy="priority", enable_priority_scheduling=True, priority_aging_s=0.0)


_PRESETS: dict[str, Callable[[SchedulerSettings], SchedulerSettings]] = {
    "sglang-default": _sglang,
    "sglang-lpm": lambda base: replace(
        _sglang(base), schedule_policy="lpm", lpm_degrade_threshold=128, disable_radix_cache=False
    ),
    "sglang-priority": lambda base: _by_priority(_sglang(base)),
    "vllm-default": _vllm,
    "vllm-priority": lambda base: replace(
        _by_priority(_vllm(base)), retraction_policy="priority", disable_priority_preemption=True
    ),
    "sarathi": lambda base: replace(_vllm(base), chunked_prefill_size=512),
    "vllm-v1": lambda base: replace(_vllm(base), disable_radix_cache=False),
    "sglang-0.5": lambda base: replace(_sglang(base), disable_radix_cache=False, page_size=1, headroom="ratio"),
}


def preset_names() -> list[str]:
    """The names that `--preset` accepts."""
    return list(_PRESETS)


def preset(name: str, context_length: int) -> SchedulerSettings:
    """The settings of preset `name`. Raises ConfigError, which lists the presets, for an unknown name."""
    if name not in _PRESETS:
        raise ConfigError(f"there is no preset {name!r}; choose one of {', '.join(_PRESETS)}")
    return _PRESETS[name](common_settings(context_length))


def differences(settings: Mapping[str, SchedulerSettings]) -> list[str]:
    """The settings other than the policy and its options that differ, each with its values, as text."""
    found = []
    for field in fields(SchedulerSettings):
        names: dict[str, list[str]] = {}
        for name, one in settings.items():
            names.setdefault(str(getattr(one, field.name)), []).append(name)
        if len(names) > 1 and field.name not in ("schedule_policy", "policy_options"):
            values = "; ".join(f"{value} for {', '.join(having)}" for value, having in names.items())
            found.append(f"--{field.name.replace('_', '-')}: {values}")
    return found


def common_settings(context_length: int) -> SchedulerSettings:
    """The settings that all presets share: pages of 16, no row or prefill token limit, no prefix cache."""
    return SchedulerSettings(
        page_size=PAGE_SIZE,
        max_running_requests=MAX_RUNNING,
        context_length=context_length,
        max_prefill_tokens=UNLIMITED_TOKENS,
        disable_radix_cache=True,
    )
