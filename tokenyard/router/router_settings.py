"""Every setting of the router, declared once: name, default and help, from which the flags follow.

Names are those of SGLang's router where it has the same setting.
"""

from dataclasses import dataclass

from tokenyard.base.declare import check_declared, check_rules, setting
from tokenyard.base.ranges import ANY_COUNT, MAX_SECONDS, POSITIVE_COUNT, SHARE, NumberRange
from tokenyard.routing.choice import (
    BALANCE_ABS_THRESHOLD,
    BALANCE_REL_THRESHOLD,
    CACHE_THRESHOLD,
    DEFAULT_POLICY,
    POLICY_NAMES,
    KvUsage,
)

GROUPS = {
    "workers": "where engines are",
    "listening": "how clients reach the router",
    "choice": "which engine gets a request",
    "queue": "what waits when engines are full",
    "failures": "what happens when something is slow or fails",
    "logging": "what is logged",
}
ANY = NumberRange(0)
SECONDS = NumberRange(0.01, MAX_SECONDS)
ANY_SECONDS = NumberRange(0, MAX_SECONDS)


@dataclass(frozen=True)
class RouterSettings:
    """What `tokenyard route` can be told. Times in seconds where the name says so."""

    worker_urls: tuple[str, ...] = setting((), "workers", "engines to route to, such as http://10.0.0.1:30000")
    prefill_urls: tuple[str, ...] = setting((), "workers", "engines that only prefill, for those of --decode-urls")
    decode_urls: tuple[str, ...] = setting((), "workers", "engines that only decode, for prompts computed by others")
    bootstrap_port: int = setting(
        8998, "workers", "where prefill engines of SGLang hand over, unless they tell it", NumberRange(1, 65535)
    )
    worker_file: str = setting("", "workers", "file with one URL a line, read again when it changes")
    worker_dns: str = setting("", "workers", "host:port whose every address is a worker")
    worker_selector: str = setting(
        "", "workers", "label selector of Kubernetes pods that are workers, such as app=engine"
    )
    worker_namespace: str = setting("", "workers", "their namespace [the router's own]")
    worker_port: int = setting(30000, "workers", "port of those pods", NumberRange(1, 65535))
    discovery_interval_secs: float = setting(
        5.0, "workers", "between two looks at the file, name or pods", NumberRange(0.1, 3600)
    )

    host: str = setting("127.0.0.1", "listening", "address to listen on")
    port: int = setting(30000, "listening", "port to listen on; 0 takes a free one", NumberRange(0, 65535))
    processes: int = setting(1, "listening", "processes that share the port", NumberRange(1, 64))
    tls_cert_path: str = setting("", "listening", "certificate, to listen with TLS")
    tls_key_path: str = setting("", "listening", "its key")
    ca_cert_path: str = setting(
        "", "listening", "certificates that workers with https are checked against [the system's]"
    )
    api_key: str = setting("", "listening", "key that clients must send", secret=True)
    admin_api_key: str = setting("", "listening", "key for /workers and other levers [the API key]", secret=True)
    worker_api_key: str = setting("", "listening", "key sent to workers instead of the client's", secret=True)

    policy: str = setting(DEFAULT_POLICY, "choice", "how targets are chosen", choices=POLICY_NAMES)
    prefill_policy: str = setting(
        DEFAULT_POLICY, "choice", "how engines that only prefill are chosen", choices=POLICY_NAMES
    )
    decode_policy: str = setting(
        KvUsage.name, "choice", "how engines that only decode are chosen", choices=POLICY_NAMES
    )
    cache_threshold: float = setting(
        CACHE_THRESHOLD, "choice", "of cache_aware: least share of the prompt that counts", SHARE
    )
    balance_abs_threshold: int = setting(
        BALANCE_ABS_THRESHOLD, "choice", "of cache_aware: requests more than the idlest", ANY_COUNT
    )
    balance_rel_threshold: float = setting(
        BALANCE_REL_THRESHOLD, "choice", "of cache_aware: times as many as the idlest", NumberRange(1)
    )
    seed: int = setting(0, "choice", "of random choices", ANY_COUNT)
    session_header: str = setting(
        "x-session-id", "choice", "header whose value must come back to the same target; '' for none"
    )
    index_mb: float = setting(256.0, "choice", "most memory of the prefix index", NumberRange(1, 1 << 20))
    tokenizer: str = setting("", "choice", "folder with the model's tokenizer, to count in tokens instead of bytes")
    kv_events: str = setting(
        "", "choice", "where workers publish KV events, such as tcp://{host}:5557; needs --tokenizer"
    )
    kv_events_replay: str = setting(
        "", "choice", "where workers tell KV events again, such as tcp://{host}:5657; nowhere if absent"
    )
    shared_url: str = setting(
        "", "choice", "Valkey or Redis through which several routers tell each other, redis://host:port"
    )
    dp_aware: bool = setting(True, "choice", "choose the data-parallel rank of workers that have several")

    max_worker_requests: int = setting(
        0, "queue", "most requests at a time per target; 0: as many as the engine says, or any", ANY_COUNT
    )
    queue_size: int = setting(1000, "queue", "most requests that wait here for room", ANY_COUNT)
    queue_timeout_secs: float = setting(60.0, "queue", "longest wait here", SECONDS)
    queue_aging_secs: float = setting(10.0, "queue", "wait that lifts a request by one priority; 0: never", ANY_SECONDS)
    tenant_weights: tuple[str, ...] = setting((), "queue", "shares of waiting tenants, such as gold=4; others have 1")
    max_concurrent_requests: int = setting(
        0, "queue", "most requests at a time in all, waiting or sent; 0: any number", ANY_COUNT
    )

    max_body_mb: float = setting(64.0, "failures", "largest request body", NumberRange(0.001, 4096))
    request_timeout_secs: float = setting(1800.0, "failures", "longest answer", NumberRange(0.1, MAX_SECONDS))
    first_byte_timeout_secs: float = setting(
        300.0, "failures", "longest silence of a worker before its answer begins; 0: any", ANY_SECONDS
    )
    stall_timeout_secs: float = setting(
        120.0, "failures", "longest silence of a worker within an answer; 0: any", ANY_SECONDS
    )
    client_timeout_secs: float = setting(
        60.0, "failures", "longest silence of a client that sends or should read", NumberRange(0.1, MAX_SECONDS)
    )
    connect_timeout_secs: float = setting(5.0, "failures", "longest time to connect to a worker", SECONDS)
    shutdown_grace_period_secs: float = setting(
        180.0, "failures", "how long open answers may go on after a signal", ANY_SECONDS
    )

    max_retries: int = setting(5, "failures", "tries on other targets while nothing was sent to the client", ANY_COUNT)
    initial_backoff_ms: float = setting(50.0, "failures", "wait before the second try on the same target", ANY)
    max_backoff_ms: float = setting(2000.0, "failures", "longest such wait", ANY)
    retry_share: float = setting(0.2, "failures", "most retries per request over the last requests", NumberRange(0, 10))
    continuation: bool = setting(True, "failures", "go on with a stream on another worker when its own dies")

    health_check_interval_secs: float = setting(
        5.0, "failures", "between two looks at a worker", NumberRange(0.05, MAX_SECONDS)
    )
    health_check_timeout_secs: float = setting(5.0, "failures", "longest such look", SECONDS)
    health_failure_threshold: int = setting(3, "failures", "failed looks that make a worker unhealthy", POSITIVE_COUNT)
    health_success_threshold: int = setting(2, "failures", "good looks that make it healthy again", POSITIVE_COUNT)
    health_check_endpoint: str = setting("/health", "failures", "what is asked")
    cb_failure_threshold: int = setting(
        10, "failures", "failed requests in a row that open a target's circuit breaker", POSITIVE_COUNT
    )
    cb_success_threshold: int = setting(3, "failures", "good ones that close it", POSITIVE_COUNT)
    cb_timeout_secs: float = setting(30.0, "failures", "time until one is tried again", SECONDS)

    log_level: str = setting(
        "info", "logging", "least level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", "logging", "format of the log lines", choices=("text", "json"))

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot work."""
        check_declared(self)
        check_rules(
            (
                (
                    bool(self.tls_cert_path) == bool(self.tls_key_path),
                    "--tls-cert-path and --tls-key-path belong together; give both",
                ),
                (
                    not self.kv_events or bool(self.tokenizer),
                    "--kv-events names blocks of tokens; give --tokenizer too",
                ),
            )
        )
