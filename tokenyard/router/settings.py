"""Every setting of the router, declared once: name, default and help, from which the flags follow.

Names are those of SGLang's router where it has the same setting.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.router.choice import (
    BALANCE_ABS_THRESHOLD,
    BALANCE_REL_THRESHOLD,
    CACHE_THRESHOLD,
    DEFAULT_POLICY,
    POLICIES,
)


def _setting(default: Any, help_text: str, least: float = 0, most: float = float("inf")) -> Any:
    return field(default=default, metadata={"help": help_text, "range": (least, most)})


@dataclass(frozen=True)
class RouterSettings:
    """What `tokenyard route` can be told. Times in seconds where the name says so."""

    worker_urls: tuple[str, ...] = _setting((), "engines to route to, such as http://10.0.0.1:30000")
    worker_file: str = _setting("", "file with one URL a line; read again when it changes")
    worker_dns: str = _setting("", "host:port whose every address is a worker")
    worker_selector: str = _setting("", "label selector of Kubernetes pods that are workers, such as app=engine")
    worker_namespace: str = _setting("", "their namespace [the router's own]")
    worker_port: int = _setting(30000, "port of those pods", 1, 65535)
    discovery_interval_secs: float = _setting(5.0, "between two looks at the file, name or pods", 0.1, 3600)

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(30000, "port to listen on; 0 takes a free one", 0, 65535)
    processes: int = _setting(1, "processes that share the port", 1, 64)
    tls_cert_path: str = _setting("", "certificate, to listen with TLS")
    tls_key_path: str = _setting("", "its key")
    ca_cert_path: str = _setting("", "certificates that workers with https are checked against [the system's]")
    api_key: str = _setting("", "key that clients must send")
    admin_api_key: str = _setting("", "key for /workers and other levers [the API key]")
    worker_api_key: str = _setting("", "key sent to workers instead of the client's")

    policy: str = _setting(DEFAULT_POLICY, f"how targets are chosen: {', '.join(POLICIES)}")
    cache_threshold: float = _setting(CACHE_THRESHOLD, "of cache_aware: least share of the prompt that counts", 0, 1)
    balance_abs_threshold: int = _setting(BALANCE_ABS_THRESHOLD, "of cache_aware: requests more than the idlest")
    balance_rel_threshold: float = _setting(BALANCE_REL_THRESHOLD, "of cache_aware: times as many as the idlest", 1)
    seed: int = _setting(0, "of random choices")
    session_header: str = _setting("x-session-id", "header whose value must come back to the same target; '' for none")
    index_mb: float = _setting(256.0, "most memory of the prefix index", 1, 1 << 20)
    tokenizer: str = _setting("", "folder with the model's tokenizer, to count in tokens instead of bytes")
    kv_events: str = _setting("", "where workers publish KV events, such as tcp://{host}:5557; needs --tokenizer")
    shared_url: str = _setting("", "Valkey or Redis through which several routers tell each other, redis://host:port")
    dp_aware: bool = _setting(True, "choose the data-parallel rank of workers that have several")

    max_worker_requests: int = _setting(0, "most requests at a time per target; 0: as many as the engine says, or any")
    queue_size: int = _setting(1000, "most requests that wait here for room", 0)
    queue_timeout_secs: float = _setting(60.0, "longest wait here", 0.01)
    queue_aging_secs: float = _setting(10.0, "wait that lifts a request by one priority; 0: never")
    tenant_weights: tuple[str, ...] = _setting((), "shares of waiting tenants, such as gold=4; others have 1")
    max_concurrent_requests: int = _setting(0, "most requests at a time in all, waiting or sent; 0: any number")

    max_body_mb: float = _setting(64.0, "largest request body", 0.001, 4096)
    request_timeout_secs: float = _setting(1800.0, "longest answer", 0.1)
    stall_timeout_secs: float = _setting(120.0, "longest silence of a worker within an answer; 0: any", 0)
    client_timeout_secs: float = _setting(60.0, "longest silence of a client that sends or should read", 0.1)
    connect_timeout_secs: float = _setting(5.0, "longest time to connect to a worker", 0.01)
    shutdown_grace_period_secs: float = _setting(180.0, "how long open answers may go on after a signal")

    max_retries: int = _setting(5, "tries on other targets while nothing was sent to the client")
    initial_backoff_ms: float = _setting(50.0, "wait before the second try on the same target")
    max_backoff_ms: float = _setting(2000.0, "longest such wait")
    retry_share: float = _setting(0.2, "most retries per request over the last requests", 0, 10)
    continuation: bool = _setting(True, "go on with a stream on another worker when its own dies")

    health_check_interval_secs: float = _setting(5.0, "between two looks at a worker", 0.05)
    health_check_timeout_secs: float = _setting(5.0, "longest such look", 0.01)
    health_failure_threshold: int = _setting(3, "failed looks that make a worker unhealthy", 1)
    health_success_threshold: int = _setting(2, "good looks that make it healthy again", 1)
    health_check_endpoint: str = _setting("/health", "what is asked")
    cb_failure_threshold: int = _setting(10, "failed requests in a row that open a target's circuit breaker", 1)
    cb_success_threshold: int = _setting(3, "good ones that close it", 1)
    cb_timeout_secs: float = _setting(30.0, "time until one is tried again", 0.01)

    log_level: str = _setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of its range."""
        for item in fields(self):
            value = getattr(self, item.name)
            least, most = item.metadata["range"]
            if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= most:
                raise ConfigError(f"{flag_of(item)} is {value:g}; it must be from {least:g} to {most:g}")
        if bool(self.tls_cert_path) != bool(self.tls_key_path):
            raise ConfigError("--tls-cert-path and --tls-key-path belong together; give both")
        if self.kv_events and not self.tokenizer:
            raise ConfigError("--kv-events names blocks of tokens; give --tokenizer too")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"--log-level is {self.log_level!r}; it takes debug, info, warning and error")


def flag_of(item: "Field[Any]") -> str:
    """The flag of a setting."""
    return "--" + item.name.replace("_", "-")
