"""The settings of the router: names, defaults and help texts, from which the flags are built.

Settings that SGLang's router has too use its names.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard.base import ConfigError
from tokenyard.base.declare import USER_CLASS, check_declared, check_rules, setting
from tokenyard.base.ranges import ANY_COUNT, MAX_SECONDS, POSITIVE_COUNT, SHARE, NumberRange
from tokenyard.routing.dispatch_settings import DispatchSettings
from tokenyard.routing.policies import BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD, CACHE_THRESHOLD, KvUsage
from tokenyard.routing.registry import DEFAULT_POLICY, POLICY_NAMES

POLICY_CHOICES = (*POLICY_NAMES, USER_CLASS)

GROUPS = {
    "workers": "which workers there are",
    "listening": "how clients reach the router",
    "batches": "files and batches that the router keeps",
    "choice": "which target gets a request",
    "queue": "limits, and requests that wait",
    "failures": "timeouts, retries and health checks",
    "logging": "log output",
}
ANY = NumberRange(0)
SECONDS = NumberRange(0.01, MAX_SECONDS)
ANY_SECONDS = NumberRange(0, MAX_SECONDS)


@dataclass(frozen=True)
class RouterSettings:
    """The settings of `tokenyard route`. Times are seconds unless the name ends with _ms."""

    worker_urls: tuple[str, ...] = setting((), "workers", "engines to route to, such as http://10.0.0.1:30000")
    prefill_urls: tuple[str, ...] = setting(
        (), "workers", "engines that only prefill, for the engines of --decode-urls"
    )
    decode_urls: tuple[str, ...] = setting(
        (), "workers", "engines that only decode, with the KV of the engines of --prefill-urls"
    )
    bootstrap_port: int = setting(
        8998, "workers", "bootstrap port of SGLang prefill engines that do not report theirs", NumberRange(1, 65535)
    )
    worker_file: str = setting("", "workers", "file with one worker URL per line, read every --discovery-interval-secs")
    worker_dns: str = setting("", "workers", "host:port; each address of the DNS name is a worker")
    worker_selector: str = setting(
        "", "workers", "label selector of Kubernetes pods that are workers, such as app=engine"
    )
    worker_namespace: str = setting("", "workers", "namespace of those pods [the router's]")
    worker_port: int = setting(30000, "workers", "port of those pods", NumberRange(1, 65535))
    discovery_interval_secs: float = setting(
        5.0, "workers", "time between two reads of the file, DNS name or pods", NumberRange(0.1, 3600)
    )

    host: str = setting("127.0.0.1", "listening", "address to listen on")
    port: int = setting(30000, "listening", "port to listen on; 0 for a free port", NumberRange(0, 65535))
    processes: int = setting(1, "listening", "processes that share the port", NumberRange(1, 64))
    endpoint_picker_port: int = setting(
        0,
        "listening",
        "port of the endpoint picker for a Kubernetes gateway (gRPC, ext_proc); 0: none",
        NumberRange(0, 65535),
    )
    tls_cert_path: str = setting("", "listening", "TLS certificate file")
    tls_key_path: str = setting("", "listening", "TLS key file")
    ca_cert_path: str = setting("", "listening", "CA certificates for https workers [the system's]")
    api_key: str = setting("", "listening", "key that clients must send", secret=True)
    admin_api_key: str = setting(
        "", "listening", "key for /workers and the other admin routes [the API key]", secret=True
    )
    keys_file: str = setting(
        "", "listening", "YAML file of tenants' API keys with limits, read again when it changes; needs --admin-api-key"
    )
    auth_url: str = setting(
        "",
        "listening",
        "URL that is asked with a client's key, and answers with its tenant and limits; needs --admin-api-key",
    )
    oidc_issuer: str = setting(
        "",
        "listening",
        "URL of the OpenID provider whose tokens are keys; needs --oidc-audience, --admin-api-key and tokenyard[oidc]",
    )
    oidc_audience: str = setting("", "listening", "audience that tokens must be for")
    oidc_tenant_claim: str = setting("sub", "listening", "claim of a token that is its tenant")
    auth_timeout_secs: float = setting(5.0, "listening", "maximum time for the check of a key", SECONDS)
    auth_cache_secs: float = setting(60.0, "listening", "time for which a checked key is not checked again", SECONDS)
    worker_api_key: str = setting("", "listening", "key sent to workers instead of the client's", secret=True)

    file_storage_path: str = setting(
        "", "batches", "folder for /v1/files and /v1/batches, of this router alone; off if absent"
    )
    max_file_storage_mb: float = setting(
        1000.0, "batches", "most megabytes of files that a tenant may keep there", NumberRange(0.001, 1e9)
    )

    policy: str = setting(DEFAULT_POLICY, "choice", "policy that chooses the target", choices=POLICY_CHOICES)
    prefill_policy: str = setting(
        DEFAULT_POLICY, "choice", "policy that chooses engines that only prefill", choices=POLICY_CHOICES
    )
    decode_policy: str = setting(
        KvUsage.name, "choice", "policy that chooses engines that only decode", choices=POLICY_CHOICES
    )
    cache_threshold: float = setting(
        CACHE_THRESHOLD, "choice", "cache_aware: share of the prompt that a match must exceed", SHARE
    )
    balance_abs_threshold: int = setting(
        BALANCE_ABS_THRESHOLD, "choice", "cache_aware: difference in requests above which load decides", ANY_COUNT
    )
    balance_rel_threshold: float = setting(
        BALANCE_REL_THRESHOLD, "choice", "cache_aware: ratio of requests above which load decides", NumberRange(1)
    )
    seed: int = setting(0, "choice", "seed of the policies that draw at random", ANY_COUNT)
    session_header: str = setting(
        "x-session-id", "choice", "header with the session, which stays on one target; '' for none"
    )
    index_mb: float = setting(256.0, "choice", "memory limit of the prefix index, in MB", NumberRange(1, 1 << 20))
    tokenizer: str = setting(
        "", "choice", "folder of the model's tokenizer; prompts are then indexed by tokens, not text"
    )
    kv_events: str = setting(
        "", "choice", "where workers publish KV events, such as tcp://{host}:5557; needs --tokenizer"
    )
    kv_events_replay: str = setting("", "choice", "where workers replay missed KV events, such as tcp://{host}:5657")
    shared_url: str = setting(
        "", "choice", "Valkey or Redis that several routers share prefixes and sessions through, redis://host:port"
    )
    dp_aware: bool = setting(True, "choice", "choose the data-parallel rank of workers that have several")

    max_worker_requests: int = setting(
        0, "queue", "maximum open requests per target; 0: what the engine reports, else no limit", ANY_COUNT
    )
    queue_size: int = setting(1000, "queue", "maximum queued requests", ANY_COUNT)
    queue_timeout_secs: float = setting(60.0, "queue", "maximum time in the queue", SECONDS)
    unavailable_timeout_secs: float = setting(
        10.0, "queue", "maximum time in the queue while no worker for the model is healthy; 0: no limit", ANY_SECONDS
    )
    queue_aging_secs: float = setting(
        10.0, "queue", "queueing time that raises the priority by one; 0: never", ANY_SECONDS
    )
    tenant_weights: tuple[str, ...] = setting((), "queue", "weights of tenants in the queue, such as gold=4 [1]")
    max_concurrent_requests: int = setting(0, "queue", "maximum open requests, queued or sent; 0: no limit", ANY_COUNT)

    max_body_mb: float = setting(64.0, "failures", "maximum size of a request body, in MB", NumberRange(0.001, 4096))
    request_timeout_secs: float = setting(
        1800.0, "failures", "maximum time of a request", NumberRange(0.1, MAX_SECONDS)
    )
    first_byte_timeout_secs: float = setting(
        300.0, "failures", "maximum time to the first byte of a stream; 0: no limit", ANY_SECONDS
    )
    stall_timeout_secs: float = setting(
        120.0, "failures", "maximum silence of a worker within a response; 0: no limit", ANY_SECONDS
    )
    client_timeout_secs: float = setting(
        60.0, "failures", "maximum idle time of a client connection", NumberRange(0.1, MAX_SECONDS)
    )
    connect_timeout_secs: float = setting(5.0, "failures", "maximum time to connect to a worker", SECONDS)
    shutdown_grace_period_secs: float = setting(
        180.0, "failures", "time for open requests to finish after SIGTERM", ANY_SECONDS
    )

    max_retries: int = setting(
        5,
        "failures",
        "maximum retries of a request, while nothing was sent to the client; also how often a stream may continue",
        ANY_COUNT,
    )
    initial_backoff_ms: float = setting(50.0, "failures", "base of the wait before a target is tried again", ANY)
    max_backoff_ms: float = setting(2000.0, "failures", "maximum of that wait", ANY)
    retry_share: float = setting(
        0.2, "failures", "retry budget: retries per request, averaged over recent requests", NumberRange(0, 10)
    )
    continuation: bool = setting(True, "failures", "continue a stream at another worker if its worker fails")

    health_check_interval_secs: float = setting(
        5.0, "failures", "time between two health checks of a worker", NumberRange(0.05, MAX_SECONDS)
    )
    health_check_timeout_secs: float = setting(5.0, "failures", "timeout of a health check", SECONDS)
    health_failure_threshold: int = setting(
        3, "failures", "failed checks in a row that make a worker unhealthy", POSITIVE_COUNT
    )
    health_success_threshold: int = setting(
        2, "failures", "successful checks in a row that make it healthy again", POSITIVE_COUNT
    )
    health_check_endpoint: str = setting("/health", "failures", "path of the health check")
    cb_failure_threshold: int = setting(
        10, "failures", "failed requests in a row that open a target's circuit breaker", POSITIVE_COUNT
    )
    cb_success_threshold: int = setting(3, "failures", "successful requests in a row that close it", POSITIVE_COUNT)
    cb_timeout_secs: float = setting(30.0, "failures", "time until an open breaker lets a request through", SECONDS)

    log_level: str = setting(
        "info", "logging", "minimum level of log lines", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("text", "logging", "format of the log lines", choices=("text", "json"))
    log_requests: bool = setting(False, "logging", "log a line for every request", aliases=("--enable-log-requests",))

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid value or combination."""
        check_declared(self)
        check_rules(
            (
                (
                    bool(self.tls_cert_path) == bool(self.tls_key_path),
                    "--tls-cert-path and --tls-key-path need each other; give both",
                ),
                (
                    not self.has_tenant_keys or bool(self.admin_api_key),
                    "--keys-file, --auth-url and --oidc-issuer need --admin-api-key, or every tenant could control the"
                    " engines",
                ),
                (
                    not (self.auth_url and self.oidc_issuer),
                    "--auth-url and --oidc-issuer both check keys; leave one of them out",
                ),
                (
                    bool(self.oidc_issuer) == bool(self.oidc_audience),
                    "--oidc-issuer and --oidc-audience need each other; give both",
                ),
                (
                    not self.file_storage_path or self.processes == 1,
                    "--file-storage-path belongs to one process; it needs --processes 1",
                ),
                (
                    not self.endpoint_picker_port or self.processes == 1,
                    "--endpoint-picker-port needs --processes 1",
                ),
                (
                    not self.endpoint_picker_port or not (self.prefill_urls or self.decode_urls),
                    "--endpoint-picker-port names one engine for a request; prefill and decode engines need a router",
                ),
                (
                    not self.kv_events or bool(self.tokenizer),
                    "--kv-events needs --tokenizer, because events name token ids",
                ),
            )
        )

    @property
    def has_tenant_keys(self) -> bool:
        """Whether clients have keys of tenants."""
        return bool(self.keys_file or self.auth_url or self.oidc_issuer)

    def dispatch(self) -> DispatchSettings:
        """The settings of the dispatch machine. Raises ConfigError for an invalid weight of a tenant."""
        return DispatchSettings(
            max_worker_requests=self.max_worker_requests,
            dp_aware=self.dp_aware,
            queue_size=self.queue_size,
            queue_timeout_s=self.queue_timeout_secs,
            unavailable_timeout_s=self.unavailable_timeout_secs,
            queue_aging_s=self.queue_aging_secs,
            tenant_weights=dict(_weights(self.tenant_weights)),
            max_retries=self.max_retries,
            retry_share=self.retry_share,
            initial_backoff_s=self.initial_backoff_ms / 1e3,
            max_backoff_s=self.max_backoff_ms / 1e3,
            cb_failure_threshold=self.cb_failure_threshold,
            cb_success_threshold=self.cb_success_threshold,
            cb_timeout_s=self.cb_timeout_secs,
            health_failure_threshold=self.health_failure_threshold,
            health_success_threshold=self.health_success_threshold,
            health_check_interval_s=self.health_check_interval_secs,
        )


def _weights(texts: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not 0.0 < weight < float("inf"):
            raise ConfigError(f"--tenant-weights takes name=weight with a weight above 0, not {text!r}")
        yield name, weight
