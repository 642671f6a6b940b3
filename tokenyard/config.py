"""All settings of a server, in one dataclass.

Flags, environment names and config-file keys are derived from the fields (`tokenyard.cli.flags`). Names follow
SGLang, with vLLM's as aliases.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.base.settings import HEADROOMS, RETRACTION_POLICIES, STEP_BUDGETS, TenantSettings
from tokenyard.engine.sampling_defaults import SAMPLING_DEFAULTS

DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"
DEFAULT_CONTEXT_LENGTH = 2048
MOST_SLOTS = 2**31
"""Slots of the KV pool are numbered in 32 bits."""
MOST_THREADS = 4096
MOST_BODY_MB = 1e6
MOCK_PROFILE = "h100/llama-3-8b"

GROUPS = {
    "model": "what is served",
    "device": "where the model runs and how much memory it takes",
    "scheduler": "who runs when, and how much in one step",
    "urgency": "whose requests come first",
    "server": "how clients reach it",
    "logging": "what it says",
}


def about(
    group: str,
    help_text: str,
    *,
    aliases: tuple[str, ...] = (),
    negated: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    file_only: bool = False,
) -> dict[str, Any]:
    """Metadata of a field: what the command line must know of it.

    `aliases` are further flags for the same value; `negated` are flags that mean the opposite of a yes-or-no value.
    What is `file_only` has no flag but stands in the file of --config, or in the environment: tables, and constants of
    a method that hardly anybody turns.
    """
    more = {"aliases": aliases, "negated": negated, "choices": choices, "file_only": file_only}
    return {"group": group, "help": help_text, **more}


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Latency targets of a service class; None leaves one to --slo-ttft-ms and --slo-ttft-scale, or --slo-tpot-ms."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def setting(default: Any, group: str, help_text: str, **more: Any) -> Any:
    """A dataclass field with an immutable default and `about(group, help_text, **more)`."""
    return field(default=default, metadata=about(group, help_text, **more))


@dataclass(slots=True)
class Settings:
    """Everything that can be set. `effective()` fills in what depends on other values and refuses contradictions."""

    model_path: str = setting(
        "", "model", "folder of the model, or its hub name; the demo model if absent", aliases=("--model",)
    )
    tokenizer_path: str = setting(
        "", "model", "folder of the tokenizer; the model's own if absent", aliases=("--tokenizer",)
    )
    served_model_name: str = setting("", "model", "name of the model in the API; the last part of its path if absent")
    chat_template: str = setting("", "model", "Jinja file with a chat template to use instead of the model's own")
    context_length: int | None = setting(
        None,
        "model",
        "most tokens of prompt and answer together; the model's own if absent",
        aliases=("--max-model-len",),
    )
    load_format: str = setting(
        "auto", "model", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = setting(
        "auto", "model", "number format of weights and KV", choices=("auto", "float32", "bfloat16", "float16")
    )
    skip_tokenizer_init: bool = setting(False, "model", "take and give token ids only; no text, no stop strings")
    sampling_defaults: str = setting(
        "model",
        "model",
        "what requests get that leave a sampling field out: the model's generation_config.json, or OpenAI's values",
        choices=SAMPLING_DEFAULTS,
    )
    random_seed: int = setting(0, "model", "seed of random weights (load format dummy)", aliases=("--seed",))

    executor: str = setting(
        "torch",
        "device",
        "what runs the steps; mock answers made-up tokens at the speed of a cost model",
        choices=("torch", "mock"),
    )
    device: str = setting("auto", "device", "auto takes a CUDA device if there is one", choices=("auto", "cpu", "cuda"))
    mem_fraction_static: float = setting(
        0.88, "device", "share of the device's memory for weights and KV (CUDA)", aliases=("--gpu-memory-utilization",)
    )
    max_total_tokens: int | None = setting(None, "device", "tokens that the KV pool holds; sized by memory if absent")
    page_size: int = setting(1, "device", "tokens in one KV page", aliases=("--block-size",))
    threads: int = setting(0, "device", "CPU threads of the executor; 0 takes what the library thinks best")
    cost_profile: str = setting(
        "",
        "device",
        "how long steps take, as device/model or a file of calibrate: what policies first believe, and what the mock "
        "executor keeps to; absent: by the device, steps correct it",
        aliases=("--mock-profile",),
    )
    mock_step_ms: float | None = setting(
        None, "device", "let every step of the mock executor take this many milliseconds"
    )

    max_running_requests: int = setting(256, "scheduler", "most requests running at once", aliases=("--max-num-seqs",))
    max_queued_requests: int = setting(
        -1, "scheduler", "most requests waiting; more are refused with 503; -1 for no limit"
    )
    chunked_prefill_size: int = setting(
        2048, "scheduler", "most prefill tokens in one step; -1 for no chunking", aliases=("--max-num-batched-tokens",)
    )
    max_prefill_tokens: int = setting(16384, "scheduler", "most prompt tokens admitted in one step")
    prefill_max_requests: int = setting(-1, "scheduler", "most requests in one prefill step; -1 for no limit")
    max_partial_prefills: int = setting(1, "scheduler", "most prompts that may be half computed at once")
    enable_mixed_chunk: bool = setting(False, "scheduler", "put prefill chunks and decodes in the same step")
    prefill_decode_interval: int = setting(
        8, "scheduler", "with running decodes, most prefill steps in a row; 0 for no limit"
    )
    schedule_policy: str = setting("fcfs", "scheduler", "order of the queue", aliases=("--scheduling-policy",))
    policy_options: dict[str, float | int | str | bool] = field(
        default_factory=dict, metadata=about("scheduler", "options of the policy, as name=value,name=value")
    )
    lpm_degrade_threshold: int = setting(
        0, "scheduler", "with more requests waiting, lpm falls back to fcfs; 0 for never"
    )
    in_batch_prefix_caching_check_threshold: int = setting(
        32,
        "scheduler",
        "lpm: longest cached prefix of a request that may wait for another one with its prefix; -1 off",
        file_only=True,
    )
    in_batch_prefix_caching_deprioritize_threshold: int = setting(
        32, "scheduler", "lpm: shortest prefix shared with another waiting request to wait for it", file_only=True
    )
    enable_dynamic_chunking: bool = setting(False, "scheduler", "size prefill chunks by the time they take")
    step_budget: str = setting(
        "auto", "scheduler", "whether a step is bounded in tokens or in time", choices=STEP_BUDGETS
    )
    headroom: str = setting("ratio", "scheduler", "how room for answers is set aside at admission", choices=HEADROOMS)
    retraction_policy: str = setting(
        "length", "scheduler", "who gives way when pages run out", choices=RETRACTION_POLICIES
    )
    schedule_conservativeness: float = setting(1.0, "scheduler", "above 1 admits fewer requests and retracts less")
    init_new_token_ratio: float = setting(
        0.7, "scheduler", "share of max_new_tokens first set aside for an answer", file_only=True
    )
    min_new_token_ratio_factor: float = setting(
        0.14, "scheduler", "lower bound of that share, as a factor of it", file_only=True
    )
    new_token_ratio_decay_steps: int = setting(
        600, "scheduler", "decode steps until the lower bound is reached", file_only=True
    )
    clip_max_new_tokens: int = setting(4096, "scheduler", "most output tokens set aside for one answer", file_only=True)
    retract_decode_steps: int = setting(
        20, "scheduler", "decode steps that a retraction makes room for", file_only=True
    )
    disable_radix_cache: bool = setting(
        False, "scheduler", "do not reuse the KV of common prefixes", negated=("--enable-prefix-caching",)
    )
    radix_eviction_policy: str = setting("lru", "scheduler", "what leaves a full prefix cache first")
    enable_kv_events: bool = setting(
        False, "scheduler", "publish what enters and leaves the prefix cache, for routers that keep an index of it"
    )
    kv_events_endpoint: str = setting(
        "tcp://127.0.0.1:5557", "scheduler", "ZeroMQ address where those events are published"
    )
    queue_timeout_s: float = setting(-1.0, "scheduler", "seconds a request may wait; -1 for ever")
    run_timeout_s: float = setting(-1.0, "scheduler", "seconds a request may run; -1 for ever")
    disable_overlap_schedule: bool = setting(
        False,
        "scheduler",
        "do not plan the next step while the device works",
        negated=("--async-scheduling", "--enable-overlap-schedule"),
    )

    enable_priority_scheduling: bool = setting(False, "urgency", "let the priority of requests come before the policy")
    schedule_low_priority_values_first: bool = setting(False, "urgency", "small priority values are the urgent ones")
    priority_scheduling_preemption_threshold: int = setting(
        10, "urgency", "least difference in priority for which a running request gives way"
    )
    disable_priority_preemption: bool = setting(False, "urgency", "running requests never give way to urgent ones")
    default_priority_value: int | None = setting(
        None, "urgency", "priority of requests that bring none; they rank lowest if absent"
    )
    abort_on_priority_when_disabled: bool = setting(
        False, "urgency", "refuse requests with a priority where priorities do not count"
    )
    priority_aging_s: float = setting(5.0, "urgency", "seconds of waiting worth one level of priority; 0 for no aging")
    priority_function: str = setting(
        "", "urgency", "function of your own, as module:name, that adds levels of urgency to waiting requests"
    )
    enable_service_levels: bool = setting(False, "urgency", "part the queue by service class (high, normal, low)")
    service_level_weights: tuple[int, ...] = setting((8, 4, 1), "urgency", "shares of the levels high, normal and low")
    service_level_quantum_tokens: int = setting(
        1024, "urgency", "prompt tokens of one turn per unit of weight", file_only=True
    )
    strict_level_share: float = setting(0.5, "urgency", "share of prefill tokens that the strict level may take")
    max_overtaken_tokens: int = setting(
        -1, "urgency", "prompt tokens of later arrivals that may start before a waiting request; -1 for no limit"
    )
    slo_ttft_ms: float = setting(1000.0, "urgency", "target for the first token of requests that bring none")
    slo_ttft_scale: float = setting(5.0, "urgency", "the same as a multiple of the prompt's unloaded prefill time")
    slo_tpot_ms: float = setting(50.0, "urgency", "target for every further token, on average")
    slo_max_wait_s: float = setting(-1.0, "urgency", "longest wait of requests that missed their target; -1 for none")
    slo_reject: bool = setting(False, "urgency", "refuse requests that cannot meet their target any more")
    slo_idle_step_ms: float = setting(
        200.0, "urgency", "length of a step while nobody decodes, under policy slo", file_only=True
    )
    slo_chunk_tokens: int = setting(
        64, "urgency", "prefill chunks under policy slo are multiples of this", file_only=True
    )
    tenants: dict[str, TenantSettings] = field(
        default_factory=dict, metadata=about("urgency", "YAML file with weight and limits of each tenant")
    )

    slo_classes: dict[str, ClassTargets] = field(
        default_factory=dict, metadata=about("urgency", "targets of service classes, by name", file_only=True)
    )

    host: str = setting("127.0.0.1", "server", "address to listen on; 0.0.0.0 for all")
    port: int = setting(30000, "server", "port to listen on; 0 takes a free one")
    api_key: str = setting("", "server", "key that clients must send as a bearer token")
    admin_api_key: str = setting("", "server", "key for flush, abort, pause and server info; the API key if absent")
    tenant_keys: dict[str, str] = field(
        default_factory=dict, metadata=about("server", "API keys of tenants, by tenant", file_only=True)
    )
    cors_allow_origins: list[str] = field(
        default_factory=list, metadata=about("server", "web origins that may call, by commas; none if absent")
    )
    max_body_mb: float = setting(32.0, "server", "largest request body in megabytes")
    max_prompts: int = setting(1024, "server", "most prompts in one request")
    strict_api: bool = setting(False, "server", "refuse requests with unknown fields instead of ignoring those")
    stream_interval: int = setting(1, "server", "tokens between two chunks of a stream")
    metrics_compat: list[str] = field(
        default_factory=list,
        metadata=about("server", "also give metrics under these engines' names", choices=("sglang", "vllm")),
    )
    health_timeout_s: float = setting(20.0, "server", "heartbeat age in seconds at which /health says 503")
    watchdog_timeout_s: float = setting(
        300.0,
        "server",
        "seconds that a step, or the loop's work between two, may take before the engine ends itself; 0 for any",
        aliases=("--watchdog-timeout",),
    )
    shutdown_timeout_s: float = setting(
        30.0, "server", "seconds that open requests may go on after SIGTERM", aliases=("--shutdown-timeout",)
    )

    log_level: str = setting(
        "info", "logging", "least level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", "logging", "form of a log line", choices=("text", "json"))
    log_requests: bool = setting(
        False, "logging", "log a line for every finished request", aliases=("--enable-log-requests",)
    )
    record: str = setting("", "logging", "file for a tape of all that the scheduler sees and plans; see replay")
    record_plain: bool = setting(False, "logging", "tape token ids and names as they are instead of anonymized")
    log_requests_content: bool = setting(
        False, "logging", "put the text of prompts and answers into those lines; otherwise only ids and lengths"
    )
    otlp_traces_endpoint: str = setting(
        "", "logging", "send a trace of every request to this OpenTelemetry collector, as http://host:4318/v1/traces"
    )
    decode_log_interval: int = setting(40, "logging", "decode steps between two log lines")

    def effective(self) -> "Settings":
        """A copy with dependent defaults filled in. Raises ConfigError for values that contradict each other."""
        model = self.model_path or str(DEMO_MODEL)
        name = self.served_model_name or ("tokenyard-demo" if not self.model_path else Path(model).name)
        chosen = replace(self, model_path=model, tokenizer_path=self.tokenizer_path or model, served_model_name=name)
        chosen.validate()
        return chosen

    def validate(self) -> None:
        """Raise ConfigError, naming the flag and what it must be, for the first value that cannot work."""
        for holds, message in self._rules():
            if not holds:
                raise ConfigError(message)
        self.scheduler_settings(context_length=self.context_length or DEFAULT_CONTEXT_LENGTH).validate()

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """What must hold, each with the sentence that says so."""
        context, total = self.context_length, self.max_total_tokens
        return (
            (0 <= self.port <= 65535, f"--port is {self.port}; it must be between 0 and 65535"),
            (0.0 < self.mem_fraction_static <= 1.0, "--mem-fraction-static must be above 0 and at most 1"),
            (context is None or context >= 2, f"--context-length is {context}; it must be at least 2"),
            (
                total is None or self.page_size <= total < MOST_SLOTS,
                f"--max-total-tokens is {total}; it must hold a page and be below {MOST_SLOTS}",
            ),
            (self.mock_step_ms is None or self.executor == "mock", "--mock-step-ms needs --executor mock"),
            (self.mock_step_ms is None or self.mock_step_ms >= 0.0, "--mock-step-ms must not be negative"),
            (
                0 <= self.threads <= MOST_THREADS,
                f"--threads is {self.threads}; it must be 0 (automatic) or up to {MOST_THREADS}",
            ),
            (self.stream_interval >= 1, f"--stream-interval is {self.stream_interval}; it must be at least 1"),
            (0.0 < self.max_body_mb <= MOST_BODY_MB, f"--max-body-mb must be above 0 and at most {MOST_BODY_MB:g}"),
            (self.max_prompts >= 1, "--max-prompts must be at least 1"),
            (self.shutdown_timeout_s >= 0.0, "--shutdown-timeout-s must not be negative"),
            (self.watchdog_timeout_s >= 0.0, "--watchdog-timeout-s must be 0 (any time) or above"),
            (self.record != "" or not self.record_plain, "--record-plain needs --record FILE"),
            (
                not self.priority_function or self._counts_priorities,
                "--priority-function adds to priorities, which do not count here; add --enable-priority-scheduling",
            ),
            (
                all(self.tenant_keys.values()) and len({*self.tenant_keys.values()}) == len(self.tenant_keys),
                "tenant-keys: every tenant needs a key of its own",
            ),
            (
                not self.tenant_keys or bool(self.api_key or self.admin_api_key),
                "tenant-keys needs --admin-api-key as well, or every tenant could pause and end what others run",
            ),
            (self.health_timeout_s > 0.0, "--health-timeout-s must be above 0"),
            (
                not (self.enable_kv_events and self.disable_radix_cache),
                "--enable-kv-events tells of the prefix cache, which --disable-radix-cache switches off",
            ),
            (
                self.log_requests or not self.log_requests_content,
                "--log-requests-content adds to the lines of --log-requests; add that too",
            ),
            (
                not self.otlp_traces_endpoint or _is_url(self.otlp_traces_endpoint),
                f"--otlp-traces-endpoint is {self.otlp_traces_endpoint!r}; it must be like http://host:4318/v1/traces",
            ),
            (
                not (self.skip_tokenizer_init and self.chat_template),
                "--chat-template and --skip-tokenizer-init contradict each other: without a tokenizer there is no chat",
            ),
            (
                self.default_priority_value is None or self._counts_priorities,
                "--default-priority-value needs --enable-priority-scheduling",
            ),
            (
                not (self.slo_reject or self.slo_max_wait_s > 0.0)
                or self.schedule_policy in ("slo", "adaptive")
                or self._own_policy,
                f"--slo-reject and --slo-max-wait-s are for --schedule-policy slo, not {self.schedule_policy}",
            ),
        )

    @property
    def _counts_priorities(self) -> bool:
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    @property
    def _own_policy(self) -> bool:
        return ":" in self.schedule_policy

    def scheduler_settings(self, *, context_length: int) -> SchedulerSettings:
        """The scheduler's part of the settings, for a model with this context length."""
        shared = {name.name for name in fields(SchedulerSettings)} & {name.name for name in fields(Settings)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        values["context_length"] = context_length
        values["max_in_flight"] = 1 if self.disable_overlap_schedule else 2
        if self.priority_function and self.default_priority_value is None:
            # A request that ranks below all others would stay there whatever the function says.
            values["default_priority_value"] = 0
        return SchedulerSettings(**values)

    def believed_costs(self) -> str:
        """Name of the cost profile that policies believe at first, "" where the device decides."""
        if self.cost_profile or self.executor != "mock" or self.mock_step_ms is not None:
            return self.cost_profile
        return MOCK_PROFILE

    def executor_options(self) -> dict[str, Any]:
        """Keyword arguments of the executor's `load_executor`, all but the model's path."""
        common = {
            "page_size": self.page_size,
            "max_pool_rows": self.max_running_requests,
            "max_total_tokens": self.max_total_tokens,
            "context_length": self.context_length,
        }
        if self.executor == "mock":
            return {
                **common,
                "profile": self.believed_costs(),
                "step_ms": self.mock_step_ms,
            }
        return {
            **common,
            "device": self.device,
            "dtype": self.dtype,
            "mem_fraction_static": self.mem_fraction_static,
            "load_format": self.load_format,
            "threads": self.threads,
            "seed": self.random_seed,
        }


def _is_url(text: str) -> bool:
    """Whether a text is an address for HTTP, with a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # brackets or a port that make no sense
        return False
