"""Constraints between settings of a server, each with its error message."""

from urllib.parse import urlsplit

from tokenyard.config.server_settings import DeclaredSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Rules = tuple[tuple[bool, str], ...]


def rules(settings: DeclaredSettings) -> Rules:
    """All rules as (whether it holds, what to do otherwise), in the order in which they are reported."""
    return (
        *_division_rules(settings),
        *_node_rules(settings),
        *_transfer_rules(settings),
        *_tier_rules(settings),
        *_memory_rules(settings),
        *_model_rules(settings),
        *_request_rules(settings),
        *_server_rules(settings),
    )


def _division_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on a model that is divided among processes."""
    flag = "--tp-size" if settings.tp_size > 1 else "--pp-size"
    whole = settings.tp_size == settings.pp_size == 1
    together = settings.nnodes == 1 and not settings.enable_dp_attention
    apart = "--enable-dp-attention" if settings.enable_dp_attention else "--nnodes"
    return (
        (
            settings.tp_size == 1 or settings.pp_size == 1,
            "--tp-size and --pp-size divide a model in one way or the other, not both yet; leave one of them out",
        ),
        (
            whole or settings.executor == "torch",
            f"{flag} divides a model, and --executor {settings.executor} has none; leave one of them out",
        ),
        (
            together or settings.disaggregation_mode == "null",
            f"{apart} divides the KV, so it cannot be moved yet; leave --disaggregation-mode out",
        ),
        (
            together or not settings.enable_hierarchical_cache,
            f"{apart} divides the KV, so it cannot be stored yet; leave --enable-hierarchical-cache out",
        ),
        (
            whole or not settings.enable_lora,
            f"--enable-lora serves models that are not divided; drop {flag}",
        ),
        (
            not settings.enable_dp_attention or settings.dp_size == settings.tp_size > 1,
            f"--enable-dp-attention needs the same number from 2 on as --dp-size and --tp-size, not {settings.dp_size} "
            f"and {settings.tp_size}",
        ),
        (
            settings.pp_size > 1 or not settings.pp_async_batch_depth,
            "--pp-async-batch-depth is for --pp-size 2 and more",
        ),
    )


def _node_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on a model that is divided among machines."""
    nodes, size = settings.nnodes, max(settings.tp_size, settings.pp_size)
    flag = "--tp-size" if settings.tp_size > 1 else "--pp-size"
    place = split_address(settings.dist_init_addr)
    return (
        (
            nodes > 1 or not (settings.node_rank or settings.dist_init_addr or settings.dist_secret),
            "--node-rank, --dist-init-addr and dist-secret are for --nnodes 2 and more",
        ),
        (
            nodes == 1 or size > 1,
            "--nnodes shares out the ranks of a model; add --tp-size or --pp-size",
        ),
        (size % nodes == 0, f"--nnodes {nodes} does not divide {flag} {size}"),
        (settings.node_rank < nodes, f"--node-rank {settings.node_rank} must be below --nnodes {nodes}"),
        (
            nodes == 1 or place is not None,
            "--nnodes needs --dist-init-addr, where node 0 waits, such as 10.0.0.1:5000; it is "
            f"{settings.dist_init_addr!r}",
        ),
        (
            nodes == 1 or settings.dp_size == 1,
            "--nnodes is for one model; leave out --dp-size, and put a router in front of several engines",
        ),
        (
            place is None or place[0] in LOOPBACK or bool(settings.dist_secret),
            f"--dist-init-addr {settings.dist_init_addr} opens this model to other machines; give all nodes the same "
            "TOKENYARD_DIST_SECRET",
        ),
    )


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT, or of a port of this machine; None for anything else."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return None
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _transfer_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on KV transfer between engines."""
    mode = settings.disaggregation_mode
    return (
        (
            mode in ("decode", "both") or not settings.prefill_engines,
            f"--prefill-engines is for --disaggregation-mode decode or both, not {mode}",
        ),
        (
            all(_is_url(url) for url in settings.prefill_engines),
            "--prefill-engines takes addresses such as http://127.0.0.1:30001",
        ),
        (
            mode not in ("prefill", "both") or settings.host in LOOPBACK or bool(settings.disaggregation_secret),
            f"--host {settings.host} opens KV transfer to other machines; add --disaggregation-secret",
        ),
        (
            mode == "null" or not settings.disable_radix_cache,
            "--disaggregation-mode keeps KV in the prefix cache, which --disable-radix-cache switches off",
        ),
    )


def _tier_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on the KV store."""
    enabled, backend = settings.enable_hierarchical_cache, settings.hicache_storage_backend
    asked = backend != "none" or settings.hicache_size > 0 or settings.hicache_ratio is not None
    return (
        (
            enabled or not (asked or settings.hicache_storage_dir or settings.hicache_storage_url),
            "the flags --hicache-... need --enable-hierarchical-cache",
        ),
        (
            bool(settings.hicache_storage_dir) == (backend == "disk") or not enabled,
            "--hicache-storage-backend disk needs --hicache-storage-dir, a folder for KV on disk, and no other has one",
        ),
        (
            bool(settings.hicache_storage_url) == (backend == "valkey") or not enabled,
            "--hicache-storage-backend valkey needs --hicache-storage-url, and no other has one",
        ),
        (
            not (enabled and settings.disable_radix_cache),
            "--enable-hierarchical-cache lies below the prefix cache, which --disable-radix-cache switches off",
        ),
    )


def _memory_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on the KV pool and on the numbers of running and queued requests."""
    total = settings.max_total_tokens
    return (
        (
            total is None or settings.page_size <= total,
            f"--max-total-tokens is {total}; it must hold a page of {settings.page_size} tokens (--page-size)",
        ),
        (
            total is None or settings.page_size * settings.dp_size <= total,
            f"--max-total-tokens is {total}; each of the {settings.dp_size} ranks (--dp-size) needs a page of it",
        ),
        (
            settings.max_running_requests >= settings.dp_size
            and (settings.max_queued_requests < 0 or settings.max_queued_requests >= settings.dp_size),
            "--max-running-requests and --max-queued-requests are for all ranks together; each rank needs one, so "
            f"they must be at least {settings.dp_size} (--dp-size)",
        ),
    )


def _draft_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on speculative decoding."""
    drafts, mock = settings.speculative_algorithm != "none", settings.executor == "mock"
    elsewhere = settings.speculative_algorithm in ("STANDALONE", "EAGLE", "EAGLE3")
    return (
        (
            bool(settings.speculative_draft_model_path) or not elsewhere or mock,
            f"--speculative-algorithm {settings.speculative_algorithm} needs --speculative-draft-model-path, a folder"
            " or repository; a head in the model's own checkpoint drafts with NEXTN",
        ),
        (
            elsewhere or not settings.speculative_draft_model_path or mock,
            "--speculative-draft-model-path needs --speculative-algorithm STANDALONE, EAGLE or EAGLE3",
        ),
        (
            settings.speculative_algorithm in ("none", "NGRAM") or settings.tp_size * settings.pp_size == 1,
            "only --speculative-algorithm NGRAM drafts for a model that is divided; drop --tp-size and --pp-size",
        ),
        (
            not (drafts and mock) or settings.mock_draft_acceptance is not None,
            "--speculative-algorithm needs a model, as the mock's tokens follow no pattern; to pretend, say with "
            "--mock-draft-acceptance which share of its drafts is right",
        ),
        (
            settings.mock_draft_acceptance is None or (drafts and mock),
            "--mock-draft-acceptance needs --executor mock and --speculative-algorithm",
        ),
    )


def _model_rules(settings: DeclaredSettings) -> Rules:
    """Constraints of the executor on the model."""
    max_adapters = settings.max_loaded_loras
    return (
        (settings.mock_step_ms is None or settings.executor == "mock", "--mock-step-ms needs --executor mock"),
        *_draft_rules(settings),
        (
            max_adapters is None or len(settings.lora_paths) <= max_adapters,
            f"--lora-paths names {len(settings.lora_paths)} adapters; --max-loaded-loras is {max_adapters}",
        ),
    )


def _request_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on tenants, priorities and targets."""
    keys = settings.tenant_keys.values()
    own_policy = ":" in settings.schedule_policy
    return (
        (
            not settings.priority_function or settings.uses_priorities,
            "--priority-function adds to priorities, which do not count here; add --enable-priority-scheduling",
        ),
        (
            all(keys) and len({*keys}) == len(keys),
            "tenant-keys: give every tenant its own key",
        ),
        (
            not keys or bool(settings.api_key or settings.admin_api_key),
            "tenant-keys needs --admin-api-key as well, or every tenant could pause and end what others run",
        ),
        (
            settings.default_priority_value is None or settings.uses_priorities,
            "--default-priority-value needs --enable-priority-scheduling",
        ),
        (
            not (settings.slo_reject or settings.slo_max_wait_s > 0.0)
            or settings.schedule_policy in ("slo", "adaptive")
            or own_policy,
            f"--slo-reject and --slo-max-wait-s are for --schedule-policy slo, not {settings.schedule_policy}",
        ),
    )


def _server_rules(settings: DeclaredSettings) -> Rules:
    """Constraints on the server, its cache events, logs and templates."""
    return (
        (settings.record != "" or not settings.record_plain, "--record-plain needs --record FILE"),
        (
            not (settings.enable_kv_events and settings.disable_radix_cache),
            "--enable-kv-events publishes events of the prefix cache, which --disable-radix-cache switches off",
        ),
        (
            settings.log_requests or not settings.log_requests_content,
            "--log-requests-content adds to the lines of --log-requests; add that too",
        ),
        (
            not settings.otlp_traces_endpoint or _is_url(settings.otlp_traces_endpoint),
            f"--otlp-traces-endpoint is {settings.otlp_traces_endpoint!r}; it must be like http://host:4318/v1/traces",
        ),
        (
            not (settings.skip_tokenizer_init and settings.chat_template),
            "--chat-template and --skip-tokenizer-init contradict each other: without a tokenizer there is no chat",
        ),
        (not settings.ssl_keyfile or settings.ssl_certfile != "", "--ssl-keyfile needs --ssl-certfile"),
    )


def _is_url(text: str) -> bool:
    """Whether `text` is an HTTP URL with a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # malformed brackets or port
        return False
