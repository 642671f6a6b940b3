"""All settings of a server, in one dataclass.

`tokenyard.base.settings` declares those that the scheduler core reads, `config.server_settings` the others.
`config.rules` checks constraints between settings. Flags, environment names and config-file keys follow from
the declarations (`tokenyard.cli.flags`). Names follow SGLang, with vLLM's as aliases.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenyard.base import SchedulerSettings
from tokenyard.base.declare import check_declared, check_rules, declarations
from tokenyard.base.settings import SharedSettings
from tokenyard.config.rules import rules
from tokenyard.config.server_settings import DRAFT_HEADS, GROUPS, POOL_TOKENS, ClassTargets, DeclaredSettings

__all__ = ["DEMO_MODEL", "GROUPS", "POOL_TOKENS", "ClassTargets", "Settings"]

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
DEFAULT_CONTEXT_LENGTH = 2048
DEFAULT_LORA_RANK = 64
MOCK_PROFILE = "h100/llama-3-8b"


@dataclass(frozen=True, slots=True)
class Settings(DeclaredSettings):
    """All settings of a server (SGLang's `ServerArgs`, vLLM's `EngineArgs`).

    `effective()` fills in defaults that depend on other values and rejects contradictions.
    """

    def effective(self) -> "Settings":
        """A copy with dependent defaults filled in. Raises ConfigError for values that contradict each other."""
        model = self.model_path or str(DEMO_MODEL)
        name = "tokenyard-demo" if not self.model_path else Path(model).name
        lora = self.enable_lora or bool(self.lora_paths)
        chosen = replace(
            self,
            enable_lora=lora,
            model_path=model,
            tokenizer_path=self.tokenizer_path or model,
            served_model_name=self.served_model_name or (name,),
        )
        chosen.validate()
        return chosen

    def validate(self) -> None:
        """Raise ConfigError, naming the flag and what it must be, for the first value that cannot work."""
        check_declared(self)
        check_rules(rules(self))
        for name, targets in self.slo_classes.items():
            check_declared(targets, f"slo-classes: {name}: ")
        self.scheduler_settings(context_length=self.context_length or DEFAULT_CONTEXT_LENGTH).validate()

    def scheduler_settings(self, *, context_length: int) -> SchedulerSettings:
        """The scheduler's part of the settings, for a model with this context length."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(SharedSettings)}
        if self.priority_function and self.default_priority_value is None:
            # A request that ranks below all others would stay there whatever the function returns.
            values["default_priority_value"] = 0
        in_flight = 1 if self.disable_overlap_schedule else 2
        return SchedulerSettings(**values, context_length=context_length, max_in_flight=in_flight)

    @property
    def model_name(self) -> str:
        """The name under which answers have the model; of effective settings only."""
        return self.served_model_name[0]

    def public(self) -> dict[str, Any]:
        """All values as plain data, without keys."""
        secret = {name for name, declared in declarations(self).items() if declared.secret}
        return {name: value for name, value in asdict(self).items() if name not in secret}

    def prior_costs(self) -> str:
        """Name of the cost profile that policies start from, "" if the device decides."""
        if self.cost_profile or self.executor != "mock" or self.mock_step_ms is not None:
            return self.cost_profile
        return MOCK_PROFILE

    @property
    def _draft_tokens(self) -> int:
        return 0 if self.speculative_algorithm == "none" else self.speculative_num_draft_tokens

    @property
    def _window_ratio(self) -> float:
        """Share of the KV tokens that sliding-window layers keep, 0 for all. KV to transfer must be complete."""
        moved = self.disaggregation_mode != "null" or self.enable_hierarchical_cache
        return 0.0 if moved else self.swa_full_tokens_ratio

    def executor_options(self) -> dict[str, Any]:
        """Keyword arguments of the executor's `load_executor`, except the model's path."""
        common = {
            "page_size": self.page_size,
            "max_pool_rows": self.max_running_requests,
            "max_total_tokens": self.max_total_tokens,
            "context_length": self.context_length,
        }
        if self.executor == "mock":
            drafts = {"drafts": self._draft_tokens, "draft_right": self.mock_draft_acceptance or 0.0}
            return {**common, "profile": self.prior_costs(), "step_ms": self.mock_step_ms, **drafts}
        return {
            **common,
            "device": self.device,
            "dtype": self.dtype,
            "mem_fraction_static": self.mem_fraction_static,
            "swa_full_tokens_ratio": self._window_ratio,
            "mamba_full_memory_ratio": 0.0 if self.disable_radix_cache else self.mamba_full_memory_ratio,
            "max_mamba_cache_size": self.max_mamba_cache_size,
            "mamba_track_interval": self.mamba_track_interval,
            "mamba_shared_memory": self.shares_state_memory and self.disaggregation_mode == "null",
            "load_format": self.load_format,
            "threads": self.threads,
            "model_impl": self.model_impl,
            "attention_backend": self.attention_backend,
            "prefill_attention_backend": self.prefill_attention_backend,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "deterministic": self.enable_deterministic_inference,
            "max_step_tokens": self.chunked_prefill_size if self.chunked_prefill_size > 0 else self.max_prefill_tokens,
            "disable_cuda_graph": self.disable_cuda_graph,
            "cuda_graph_max_bs": self.cuda_graph_max_bs,
            "cuda_graph_max_tokens": self.cuda_graph_max_tokens,
            "enable_tp_cuda_graph": self.enable_tp_cuda_graph,
            "enable_torch_symm_mem": self.enable_torch_symm_mem,
            "lora_slots": self.max_loras_per_batch if self.enable_lora else 0,
            "lora_rank": self.max_lora_rank or DEFAULT_LORA_RANK,
            "draft_tokens": self._draft_tokens,
            "draft_model": self.speculative_draft_model_path,
            "draft_head": self.speculative_algorithm if self.speculative_algorithm in DRAFT_HEADS else "",
            "seed": self.random_seed,
        }
