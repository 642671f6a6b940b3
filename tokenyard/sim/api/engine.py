"""An engine as a plain object: what `tokenyard simulate` takes as flags."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.cost import Profile, load_profile
from tokenyard.policy import Policy
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.engine.speculation import Speculation
from tokenyard.sim.hardware.device_profile import Hardware, find_device_profile
from tokenyard.sim.kv.disagg_settings import KvStoreSettings
from tokenyard.sim.outcome import Setup
from tokenyard.sim.traces.workload import Workload

NOT_SETTINGS = {"dp_size", "context_length", "max_in_flight"}
"""Fields of `SchedulerSettings` that `Engine` sets by other names, or that the workload decides."""


@dataclass(frozen=True)
class Engine:
    """One engine: a device with a model, and the scheduler's settings. Immutable; `with_` makes a changed copy.

    device, model: of a built-in cost profile, or any device with a data sheet and any model (docs/simulator.md).
    hardware: how the device serves the model; None for the built-in profile, or the defaults.
    profile: a cost profile instead of a built-in one, or the file that `tokenyard calibrate` wrote.
    policy: name of the schedule policy, `module:Class`, or a subclass of `Policy`; None for the preset's, or fcfs.
    preset: settings of another engine, such as "vllm-default"; None for Tokenyard's own.
    dp_size: data-parallel ranks.
    kv_pool_tokens: KV pool; None for the profile's.
    context_length: None for what the workload needs, at most the model's.
    host_us: CPU time per step, in microseconds.
    overlap: a step is planned while the previous one runs.
    cost_error: relative error of the scheduler's prior cost model.
    learn_cost: the scheduler corrects its cost model from measured steps.
    oracle: the scheduler knows the length of every answer.
    speculation: speculative decoding, None for none.
    kv_store: the KV store below the device's memory, None for none.
    settings: further fields of `tokenyard.base.SchedulerSettings`, by name.
    """

    device: str = "h100"
    model: str = "llama-3-8b"
    hardware: Hardware | None = None
    profile: Profile | Path | str | None = None
    policy: str | type[Policy] | None = None
    preset: str | None = None
    dp_size: int = 1
    kv_pool_tokens: int | None = None
    context_length: int | None = None
    host_us: float = 0.0
    overlap: bool = False
    cost_error: float = 0.0
    learn_cost: bool = False
    oracle: bool = False
    speculation: Speculation | None = None
    kv_store: KvStoreSettings | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> "Engine":
        """A copy with other values of fields of `Engine` or of the scheduler's settings, by name.

        Raises ConfigError, with the nearest names, for a name that is neither.
        """
        own = {item.name for item in fields(self)}
        settings = {**self.settings, **{name: changes[name] for name in changes if name not in own}}
        changed = replace(self, **{name: value for name, value in changes.items() if name in own})
        return replace(changed, settings={**changed.settings, **settings})

    @property
    def cost_profile(self) -> Profile:
        """The cost profile. Raises ConfigError if there is none of that name or file."""
        if self.profile is None:
            return find_device_profile(self.device, self.model, self.hardware)
        return self.profile if isinstance(self.profile, Profile) else load_profile(Path(self.profile))

    def setup(self, workload: Workload, **fleet: Any) -> Setup:
        """The `Setup` of this engine for a workload; `fleet` are further fields of `Setup`.

        Raises ConfigError for settings that cannot work.
        """
        profile, settings = self.cost_profile, self._settings(workload)
        return Setup(
            profile=profile,
            settings=settings,
            dp_size=self.dp_size,
            host_s=self.host_us / 1e6,
            kv_pool_tokens=self.kv_pool_tokens,
            prior_scale=1.0 + self.cost_error,
            learn=self.learn_cost,
            oracle=self.oracle,
            speculation=self.speculation,
            kv_store=self.kv_store,
            **fleet,
        )

    def _settings(self, workload: Workload) -> SchedulerSettings:
        profile = self.cost_profile
        context = self.context_length or fitting_context(workload, profile)
        if self.preset is None:
            base = SchedulerSettings(page_size=profile.page_size, context_length=context)
        else:
            base = preset(self.preset, context)
        _check_names(self.settings)
        given = dict(self.settings) | ({} if self.policy is None else {"schedule_policy": policy_name(self.policy)})
        settings = replace(base, **given, max_in_flight=2 if self.overlap else 1)
        settings.validate()
        return settings


def fitting_context(workload: Workload, profile: Profile) -> int:
    """The context length that a workload needs, at most the model's."""
    longest = max(workload.max_output_tokens, int(workload.max_new_tokens.max()))
    return min(workload.max_prompt_tokens + longest + 1, profile.context_length)


def policy_name(policy: str | type) -> str:
    """A policy by name; a class as `module:Class`. Raises ConfigError for a class that cannot be imported by name."""
    if isinstance(policy, str):
        return policy
    if "<locals>" in policy.__qualname__:
        raise ConfigError(f"{policy.__qualname__} is defined in a function; move it to the top of a module")
    return f"{policy.__module__}:{policy.__qualname__}"


def _check_names(given: Mapping[str, Any]) -> None:
    known = {item.name for item in fields(SchedulerSettings)} - NOT_SETTINGS
    for name in given:
        if name not in known:
            own = [item.name for item in fields(Engine)]
            near = difflib.get_close_matches(name, [*known, *own], n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see tokenyard.base.SchedulerSettings"
            raise ConfigError(f"there is no setting {name!r}; {hint}")
