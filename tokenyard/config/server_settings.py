"""Declarations of a server's settings, except those of the scheduler core (`tokenyard.base.settings`)."""

from dataclasses import dataclass

from tokenyard.base.declare import setting
from tokenyard.base.kv_store_limits import PREFETCH_POLICIES, KvStoreLimits
from tokenyard.base.ranges import ABOVE_ZERO, ANY_COUNT, POSITIVE, POSITIVE_COUNT, TARGET_MS, NumberRange
from tokenyard.base.settings import SharedSettings
from tokenyard.engine.frontend.sampling_defaults import SAMPLING_DEFAULTS
from tokenyard.routing.balance import LOAD_BALANCE_METHODS

DRAFT_HEADS = ("NEXTN", "EAGLE", "EAGLE3")
"""Values of speculative_algorithm for which a head drafts from the model's hidden states."""
MAX_RANKS = 64
KV_STORE_LIMITS = KvStoreLimits()
DISAGGREGATION_MODES = ("null", "prefill", "decode", "both")
TRANSFER_BACKENDS = ("auto", "tcp", "process_vm")
POOL_TOKENS = NumberRange(1, 2**31 - 1)
"""Range of the KV pool's size: its slots have 32-bit indices."""

GROUPS = {
    "model": "what is served",
    "device": "where the model runs and how much memory it takes",
    "scheduler": "what runs when, and how much in one step",
    "urgency": "which requests come first",
    "kv_store": "the KV store: in host memory, on disk, shared",
    "transfer": "KV between engines: prefill and decode apart",
    "server": "how clients reach it",
    "logging": "what is logged and recorded",
}


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Latency targets of a service class; None means --slo-ttft-ms and --slo-ttft-scale, or --slo-tpot-ms."""

    ttft_ms: float | None = setting(None, "class", "target for the first token", TARGET_MS)
    tpot_ms: float | None = setting(None, "class", "target for every further token, on average", TARGET_MS)


@dataclass(frozen=True, slots=True)
class DeclaredSettings(SharedSettings):
    """All settings as given, before `effective()` fills in dependent defaults."""

    model_path: str = setting(
        "", "model", "folder of the model, or its name on the hub; the demo model if absent", aliases=("--model",)
    )
    tokenizer_path: str = setting(
        "", "model", "folder of the tokenizer; the model's own if absent", aliases=("--tokenizer",)
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "model",
        "names of the model in the API, of which answers have the first; the last part of its path if absent",
    )
    chat_template: str = setting("", "model", "Jinja file with a chat template to use instead of the model's own")
    tool_call_parser: str = setting(
        "",
        "model",
        "how the model writes tool calls and reasoning, such as hermes; read off its chat template if absent",
        aliases=("--reasoning-parser",),
    )
    context_length: int | None = setting(
        None,
        "model",
        "most tokens of prompt and answer together; the model's own limit if absent",
        NumberRange(2),
        aliases=("--max-model-len",),
    )
    load_format: str = setting(
        "auto", "model", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = setting(
        "auto", "model", "number format of weights and KV", choices=("auto", "float32", "bfloat16", "float16")
    )
    skip_tokenizer_init: bool = setting(False, "model", "take and return token ids only: no text and no stop strings")
    sampling_defaults: str = setting(
        "model",
        "model",
        "values of sampling fields that a request leaves out: from the model's generation_config.json, or OpenAI's",
        choices=SAMPLING_DEFAULTS,
    )
    random_seed: int = setting(0, "model", "seed of random weights (load format dummy)", aliases=("--seed",))

    keep_alive: str = setting(
        "5m",
        "model",
        "how long each of several models stays loaded without requests, in seconds or as 10m or 1h; -1 is for ever",
    )
    max_loaded_models: int = setting(
        0, "model", "most of several models loaded at once; 0 for as many as fit", ANY_COUNT
    )
    model_memory_gb: float | None = setting(
        None,
        "model",
        "gigabytes that the engines of several models may take together; 80 % of what is free at the start if absent",
        POSITIVE,
    )
    model_load_timeout_s: float = setting(
        300.0,
        "model",
        "longest time in seconds that a request waits for one of several models to load",
        POSITIVE,
        file_only=True,
    )

    lora_paths: tuple[str, ...] = setting(
        (), "model", "LoRA adapters to serve, as NAME=FOLDER", aliases=("--lora-modules",)
    )
    lora_dirs: tuple[str, ...] = setting(
        (), "model", "folders from below which clients with the admin key may load further adapters; none if absent"
    )
    max_loaded_loras: int | None = setting(
        None,
        "model",
        "most adapters loaded at once; any number if absent",
        POSITIVE_COUNT,
        aliases=("--max-cpu-loras",),
    )
    max_lora_rank: int | None = setting(
        None,
        "model",
        "largest rank of an adapter; that of --lora-paths if absent, or 64 without any",
        NumberRange(1, 4096),
    )

    executor: str = setting(
        "torch",
        "device",
        "what runs the steps; mock answers with made-up tokens at the speed of a cost model",
        choices=("torch", "mock"),
    )
    device: str = setting("auto", "device", "auto takes a CUDA device if there is one", choices=("auto", "cpu", "cuda"))
    mem_fraction_static: float = setting(
        0.88,
        "device",
        "share of the device's memory for weights, KV, steps and CUDA graphs (CUDA)",
        NumberRange(ABOVE_ZERO, 1),
        aliases=("--gpu-memory-utilization",),
    )
    max_total_tokens: int | None = setting(
        None, "device", "tokens that the KV pool holds; by the memory if absent", POOL_TOKENS
    )
    swa_full_tokens_ratio: float = setting(
        0.8,
        "device",
        "KV tokens in layers with a sliding window, as a part of those in the others; with 0 they keep all tokens, as "
        "they do where KV is moved, divided, or computed by kernels that know one pool",
        NumberRange(0, 1),
    )
    threads: int = setting(0, "device", "CPU threads of the executor; 0 lets the library choose", NumberRange(0, 4096))
    dp_size: int = setting(
        1,
        "device",
        "data-parallel ranks: schedulers behind one server, each with its own copy of the model and prefix cache; "
        "limits, KV tokens and CPU threads are for all ranks together",
        NumberRange(1, MAX_RANKS),
        aliases=("--data-parallel-size",),
    )
    tp_size: int = setting(
        1,
        "device",
        "tensor-parallel ranks: processes that divide every layer of the model, each on its own device; on a CPU this "
        "tests exactness and is slower",
        NumberRange(1, MAX_RANKS),
        aliases=("--tensor-parallel-size", "--tp"),
    )
    pp_size: int = setting(
        1,
        "device",
        "pipeline stages: processes with some of the layers each, on their own devices; on a CPU this tests exactness "
        "and is slower",
        NumberRange(1, MAX_RANKS),
        aliases=("--pipeline-parallel-size", "--pp"),
    )
    nnodes: int = setting(
        1,
        "device",
        "machines among which the ranks of a model (--tp-size or --pp-size) are shared out, each with a command of its "
        "own",
        NumberRange(1, MAX_RANKS),
    )
    node_rank: int = setting(
        0,
        "device",
        "which of them this is; node 0 has the server, the others only compute",
        NumberRange(0, MAX_RANKS - 1),
    )
    dist_init_addr: str = setting(
        "", "device", "HOST:PORT where node 0 waits for the others, or a port for nodes on one machine"
    )
    dist_secret: str = setting(
        "",
        "device",
        "secret that nodes must share; needed unless --dist-init-addr is loopback",
        secret=True,
        file_only=True,
    )
    dist_timeout_s: float = setting(
        300.0, "device", "how long nodes wait for each other, in seconds", POSITIVE, file_only=True
    )
    enable_dp_attention: bool = setting(
        False,
        "device",
        "data-parallel ranks (--dp-size, and --tp-size of the same) share one model's MLPs: each attends for its own "
        "requests, and all compute every step together",
    )
    pp_async_batch_depth: int = setting(
        0, "device", "plans in flight beyond one for each stage (--pp-size)", NumberRange(0, 6)
    )
    load_balance_method: str = setting(
        LOAD_BALANCE_METHODS[0],
        "device",
        "which of several ranks (--dp-size) gets a request",
        choices=LOAD_BALANCE_METHODS,
    )
    model_impl: str = setting(
        "auto",
        "device",
        "what computes a step: native runs it whole by the CPU's own kernels, torch layer by layer; auto takes native "
        "kernels where they can serve",
        choices=("auto", "torch", "native"),
    )
    quantization: str = setting(
        "none",
        "device",
        "rounds weights at load, for the CPU's native kernels: q4 and q8 to 4 and 8 bits in blocks of 32, int8 to 8 "
        "bits per output; a checkpoint that is stored quantized needs no flag",
        choices=("none", "int8", "q4", "q8"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "device",
        "type of keys and values in the pool: one byte with a scale for each head of a token, for the CPU's native "
        "kernels and for Triton's on a GPU, or --dtype (auto)",
        choices=("auto", "int8", "fp8_e4m3", "fp8_e5m2"),
    )
    enable_deterministic_inference: bool = setting(
        False,
        "device",
        "answers are the same bit for bit under every schedule, in bfloat16 too, by the CPU's native kernels; prompts "
        "take longer",
    )
    attention_backend: str = setting(
        "auto",
        "device",
        "what attends between torch's layers: gather is plain torch, native the CPU's own kernels, triton those for "
        "CUDA devices, where auto takes them if the package triton is there; flashinfer is that package's, on CUDA",
        choices=("auto", "gather", "native", "triton", "flashinfer"),
    )
    prefill_attention_backend: str = setting(
        "auto",
        "device",
        "what attends to prompts without a prefix: varlen is torch's Flash Attention, next to Triton; auto is what "
        "attends to all else, as varlen was never run",
        choices=("auto", "varlen"),
        file_only=True,
    )
    disable_cuda_graph: bool = setting(
        False,
        "device",
        "do not record steps as CUDA graphs at the start; without them small models are slower",
        aliases=("--enforce-eager",),
    )
    cuda_graph_max_bs: int | None = setting(
        None,
        "device",
        "largest batch whose decode steps are recorded as CUDA graphs; 256 or --max-running-requests if absent",
        NumberRange(1, 4096),
        aliases=("--max-cudagraph-capture-size",),
    )
    cuda_graph_max_tokens: int = setting(
        512,
        "device",
        "most tokens of a step with chunks or drafts that is recorded as a CUDA graph; 0 records decodes alone",
        NumberRange(0, 8192),
        file_only=True,
    )
    enable_tp_cuda_graph: bool = setting(
        False,
        "device",
        "with --tp-size on GPUs, record steps as CUDA graphs too, with exchanges by NCCL; off, as it was never run",
        file_only=True,
    )
    enable_torch_symm_mem: bool = setting(
        False,
        "device",
        "with --tp-size on GPUs of one machine, make sums of at most 256 KiB (decodes) in torch's symmetric memory "
        "instead of by NCCL; off, as it was never run",
        file_only=True,
    )
    speculative_algorithm: str = setting(
        "none",
        "device",
        "what drafts tokens for a step to verify: NGRAM looks up what followed the latest tokens before, STANDALONE "
        "asks a small model (--speculative-draft-model-path), NEXTN the head that the checkpoint brings (MTP), EAGLE "
        "and EAGLE3 one that was trained for the model (--speculative-draft-model-path)",
        choices=("none", "NGRAM", "STANDALONE", *DRAFT_HEADS),
    )
    speculative_draft_model_path: str = setting(
        "",
        "device",
        "folder or repository of the small model that drafts, with the tokenizer of the large one, or of an EAGLE head",
    )
    speculative_num_draft_tokens: int = setting(
        15, "device", "most drafts of a request that one step verifies; fewer where more do not pay", NumberRange(1, 64)
    )
    cost_profile: str = setting(
        "",
        "device",
        "how long steps take, as device/model or a file of `tokenyard calibrate`: what policies assume until measured "
        "steps correct it, and what the mock executor keeps to; if absent, a few steps are measured at the start for a "
        "policy that asks and for drafts",
        aliases=("--mock-profile",),
    )
    mock_step_ms: float | None = setting(
        None, "device", "time that every step of the mock executor takes, in milliseconds", ANY_COUNT
    )
    mock_draft_acceptance: float | None = setting(
        None,
        "device",
        "share of the mock executor's drafts that are right, for speculative decoding with it",
        NumberRange(0.0, 1.0),
    )

    kv_events_endpoint: str = setting(
        "tcp://127.0.0.1:5557",
        "scheduler",
        "ZeroMQ address where events of the prefix cache are published; another machine's is connected to",
    )
    kv_events_topic: str = setting(
        "kv-events", "scheduler", "topic of these events; {ip}, {port} and {model} stand for those of the server"
    )
    kv_events_replay_endpoint: str = setting(
        "", "scheduler", "ZeroMQ address where subscribers ask for events that they have missed; nowhere if absent"
    )
    disable_overlap_schedule: bool = setting(
        False,
        "scheduler",
        "do not plan the next step while the device works",
        negated=("--async-scheduling", "--enable-overlap-schedule"),
    )

    hicache_storage_backend: str = setting(
        "none",
        "kv_store",
        "where KV is kept below the device and its host memory (--enable-hierarchical-cache): on disk, or in a Valkey "
        "or Redis that several engines share",
        choices=("none", "disk", "valkey"),
    )
    hicache_storage_url: str = setting(
        "", "kv_store", "address of that Valkey or Redis: redis://[:password@]host[:port]", secret=True
    )
    hicache_ratio: float | None = setting(
        None,
        "kv_store",
        "size of that in host memory, as a multiple of a GPU's KV pool; 2 if not given",
        POSITIVE,
    )
    hicache_size: float = setting(0.0, "kv_store", "the same in gigabytes, instead of --hicache-ratio", ANY_COUNT)
    hicache_storage_dir: str = setting(
        "", "kv_store", "folder for KV on disk, used by one engine at a time; it may outlive the engine"
    )
    hicache_storage_gb: float = setting(10.0, "kv_store", "most gigabytes of KV on disk, for each rank", POSITIVE)
    hicache_storage_min_free_gb: float = setting(
        1.0, "kv_store", "gigabytes that are left free on that disk", ANY_COUNT, file_only=True
    )
    hicache_storage_write_mb_s: float = setting(
        KV_STORE_LIMITS.write_mb_s,
        "kv_store",
        "most megabytes per second that are written there; 0 for no limit",
        ANY_COUNT,
        file_only=True,
    )
    hicache_storage_prefetch_policy: str = setting(
        KV_STORE_LIMITS.prefetch_policy,
        "kv_store",
        "how long a request waits for its KV on disk: best_effort not at all, wait_complete for all of it, timeout as "
        "long as hicache-prefetch-timeout-s and hicache-prefetch-timeout-per-1k-tokens-s say",
        choices=PREFETCH_POLICIES,
    )
    hicache_prefetch_timeout_s: float = setting(
        KV_STORE_LIMITS.timeout_s, "kv_store", "longest wait for KV on disk, in seconds", POSITIVE, file_only=True
    )
    hicache_prefetch_timeout_per_1k_tokens_s: float = setting(
        KV_STORE_LIMITS.timeout_per_1k_tokens_s, "kv_store", "what 1,000 tokens add to it", ANY_COUNT, file_only=True
    )

    disaggregation_mode: str = setting(
        "null",
        "transfer",
        "prefill computes prompts for other engines, decode has prompts computed by --prefill-engines, both does "
        "either, as the cost model says for each request",
        choices=DISAGGREGATION_MODES,
    )
    prefill_engines: list[str] = setting(
        list, "transfer", "HTTP addresses of engines that compute prompts for this one, separated by commas"
    )
    disaggregation_transfer_backend: str = setting(
        "auto",
        "transfer",
        "how KV moves: process_vm within a machine, or tcp; auto takes the former where the kernel allows it",
        choices=TRANSFER_BACKENDS,
    )
    disaggregation_bootstrap_port: int = setting(
        0,
        "transfer",
        "port at which other engines ask for KV; rank r has the r-th after it; 0 takes free ones",
        NumberRange(0, 65535),
    )
    disaggregation_secret: str = setting(
        "", "transfer", "secret that engines must share to exchange KV; needed unless --host is loopback", secret=True
    )
    disaggregation_lease_s: float = setting(
        30.0, "transfer", "how long KV is kept for an engine of which nothing is heard", POSITIVE, file_only=True
    )
    disaggregation_beat_s: float = setting(
        1.0,
        "transfer",
        "time between heartbeats; after three without an answer KV is computed here",
        POSITIVE,
        file_only=True,
    )

    priority_function: str = setting(
        "", "urgency", "function of your own, as module:name, that adds levels of urgency to waiting requests"
    )
    slo_classes: dict[str, ClassTargets] = setting(
        dict, "urgency", "targets of service classes, by name", file_only=True
    )

    host: str = setting("127.0.0.1", "server", "address to listen on; 0.0.0.0 for all")
    port: int = setting(30000, "server", "port to listen on; 0 takes a free one", NumberRange(0, 65535))
    uds: str = setting("", "server", "path of a Unix socket to listen on instead of host and port")
    ssl_certfile: str = setting("", "server", "file with the certificate chain (PEM); clients then speak https")
    ssl_keyfile: str = setting("", "server", "file with its key, if that is not in the same file")
    api_key: str = setting("", "server", "key that clients must send as a bearer token", secret=True)
    admin_api_key: str = setting(
        "", "server", "key for flush, abort, pause and server info; the API key if absent", secret=True
    )
    tenant_keys: dict[str, str] = setting(dict, "server", "API keys of tenants, by tenant", file_only=True, secret=True)
    cors_allow_origins: list[str] = setting(
        list, "server", "web origins that may call, separated by commas; none if absent"
    )
    max_body_mb: float = setting(32.0, "server", "largest request body in megabytes", NumberRange(ABOVE_ZERO, 1e6))
    file_storage_path: str = setting(
        "", "server", "folder for /v1/files and /v1/batches, of this server alone; off if absent"
    )
    max_file_storage_mb: float = setting(
        1000.0, "server", "most megabytes of files that a tenant may keep there", NumberRange(ABOVE_ZERO, 1e9)
    )
    max_prompts: int = setting(1024, "server", "most prompts in one request", POSITIVE_COUNT)
    strict_api: bool = setting(False, "server", "refuse requests with unknown fields instead of ignoring the fields")
    stream_interval: int = setting(1, "server", "tokens between two chunks of a stream", POSITIVE_COUNT)
    metrics_compat: list[str] = setting(
        list, "server", "also give metrics under the names of these engines", choices=("sglang", "vllm")
    )
    health_timeout_s: float = setting(
        20.0, "server", "age in seconds of the last heartbeat at which /health returns 503", POSITIVE
    )
    watchdog_timeout_s: float = setting(
        300.0,
        "server",
        "longest time in seconds for a step, or for the loop's work between two, before the scheduler is ended and "
        "started again; 0 for no limit",
        ANY_COUNT,
        aliases=("--watchdog-timeout",),
    )
    shutdown_timeout_s: float = setting(
        30.0,
        "server",
        "seconds that open requests may continue after SIGTERM",
        ANY_COUNT,
        aliases=("--shutdown-timeout",),
    )

    log_level: str = setting(
        "info", "logging", "lowest level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", "logging", "format of the log lines", choices=("text", "json"))
    log_requests: bool = setting(
        False, "logging", "log a line for every finished request", aliases=("--enable-log-requests",)
    )
    log_requests_content: bool = setting(
        False, "logging", "add the text of prompts and answers to those lines; without it only ids and lengths"
    )
    record: str = setting("", "logging", "file for a tape of all that the scheduler sees and plans; see replay")
    record_plain: bool = setting(False, "logging", "record token ids and names as they are instead of anonymized")
    otlp_traces_endpoint: str = setting(
        "", "logging", "send a trace of every request to this OpenTelemetry collector, as http://host:4318/v1/traces"
    )
    decode_log_interval: int = setting(40, "logging", "decode steps between two log lines")
