"""Settings of the scheduler core. The command line's settings object makes one of these."""

from dataclasses import dataclass, field

from tokenyard.base.errors import ConfigError

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the scheduler must know; names and defaults follow SGLang's flags where they exist.

    chunked_prefill_size: tokens of prefill a step computes at most, -1 for no chunking.
    prefill_decode_interval: with running decodes, at most this many prefill steps in a row; 0 for no limit.
    max_queued_requests: -1 for no limit. queue_timeout_s, run_timeout_s: -1 for none.
    num_reserved_retract_tokens: tokens a retraction frees for each row that stays.
    """

    page_size: int = 1
    max_running_requests: int = 256
    max_queued_requests: int = -1
    context_length: int = 2048
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    prefill_max_requests: int = -1
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 8
    schedule_policy: str = "fcfs"
    policy_options: dict[str, float | int | str | bool] = field(default_factory=dict)
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    clip_max_new_tokens: int = 4096
    retract_decode_steps: int = 20
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    queue_timeout_s: float = -1.0
    run_timeout_s: float = -1.0
    max_partial_prefills: int = 1
    max_in_flight: int = 1

    def validate(self) -> None:
        """Raise ConfigError for values that contradict each other, saying which flag to change."""
        if self.page_size < 1:
            raise ConfigError(f"--page-size is {self.page_size}; it must be at least 1")
        chunk = self.chunked_prefill_size
        if chunk != -1 and (chunk < 1 or chunk % self.page_size):
            raise ConfigError(
                f"--chunked-prefill-size is {chunk}; it must be -1 (off) or a multiple of --page-size {self.page_size}"
            )
        if self.max_running_requests < 1:
            raise ConfigError("--max-running-requests must be at least 1")
        if self.max_queued_requests != -1 and self.max_queued_requests < 1:
            raise ConfigError("--max-queued-requests must be -1 (no limit) or at least 1")
        if self.max_in_flight < 1:
            raise ConfigError("the number of steps in flight must be at least 1")
        if not self.schedule_conservativeness > 0.0:
            raise ConfigError("--schedule-conservativeness must be above 0")
