"""The router's workers: what the dispatch machine knows of them, with their URLs and connections."""

import ssl
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from tokenyard.base import ConfigError
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.stream_continuation import ANY_API, BY_OUTPUT_IDS, BY_PROMPT_IDS
from tokenyard.router.worker_connection import ConnectionPool, WorkerUrl
from tokenyard.routing.gpu_seconds import EngineCost
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.workers import DECODE, PREFILL, Target, Worker, Workers


@dataclass(slots=True, eq=False, kw_only=True)
class HttpWorker(Worker):
    """A worker with a URL and connections."""

    url: WorkerUrl
    """Its address."""
    source: str
    """static, api, or the name of a `DiscoverySource`."""
    pool: ConnectionPool
    """Connections to it."""
    cards: list[dict[str, Any]] = field(default_factory=list)
    """Its /v1/models."""
    context_length: int | None = None
    """Of its model; None if unknown."""
    bootstrap_port: int = 0
    """Port where decode engines reach an SGLang prefill engine."""
    bootstrap_ports: tuple[int, ...] = ()
    """The same for each rank of a Tokenyard engine."""
    by_params: bool = False
    """Whether it transfers KV as vLLM does, by `kv_transfer_params`."""
    cost: EngineCost | None = None
    """Its cost model; None if it reports none."""
    path_and_host: tuple[bytes, bytes] = (b"", b"")
    """Path prefix and Host header, encoded."""

    def __post_init__(self) -> None:
        self.path_and_host = self.url.path.encode(), self.url.authority.encode()

    def note_abilities(self) -> None:
        """Set whether it computes prompts alone as a decode engine: vLLM and Tokenyard do, SGLang does not."""
        self.computes_alone = self.by_params or self.continues in (BY_OUTPUT_IDS, ANY_API)


HttpTarget = Target[HttpWorker]


class HttpWorkers(Workers[HttpWorker]):
    """The registry of workers, by URL."""

    def __init__(self, settings: RouterSettings, index: PrefixIndex) -> None:
        super().__init__(settings.dispatch(), index)
        self._router_settings = settings
        self._made = 0
        self._context: ssl.SSLContext | None = None

    def add(self, url_text: str, source: str, role: str = "") -> HttpWorker:
        """Add a worker. Raises ConfigError for an invalid or duplicate URL and for an unknown role."""
        if role not in ("", PREFILL, DECODE):
            raise ConfigError(f"unknown worker role {role!r}; use {PREFILL}, {DECODE}, or no role for both")
        url = WorkerUrl.parse(url_text)
        if self.at(str(url)) is not None:
            raise ConfigError(f"worker {url} already exists; name each worker once")
        settings = self._router_settings
        pool = ConnectionPool(url, self._tls() if url.scheme == "https" else None, settings.connect_timeout_secs)
        worker = HttpWorker(
            name=f"w{self._made}",
            address=str(url),
            role=role,
            url=url,
            source=source,
            pool=pool,
            bootstrap_port=settings.bootstrap_port,
        )
        self._made += 1
        return self.join(worker)

    def find(self, name: str) -> HttpWorker | None:
        """The worker with this name or URL."""
        for worker in self:
            if name in (worker.name, worker.address):
                return worker
        try:
            return self.at(str(WorkerUrl.parse(name)))
        except ConfigError:
            return None

    @override
    def remove(self, worker: HttpWorker) -> None:
        super().remove(worker)
        worker.pool.close()

    def set_cards(self, worker: HttpWorker, cards: list[dict[str, Any]]) -> None:
        """Set what the worker serves, from its /v1/models: models, and adapters by their name and by "base:name".

        A model whose `root` is another one's name is an alias of it.
        """
        named = {str(card["id"]): card.get("root") for card in cards if not card.get("parent")}
        aliases = frozenset(name for name, root in named.items() if root != name and root in named)
        bases = frozenset(named) - aliases
        parents = {name: [name, *(one for one in aliases if named[one] == name)] for name in bases}
        names = (
            f"{name}:{card['id']}"
            for card in cards
            if card.get("parent")
            for name in parents.get(str(card["parent"]), [card["parent"]])
        )
        worker.cards = cards
        lengths = [card.get("max_model_len") for card in cards]
        worker.context_length = lengths[0] if lengths and isinstance(lengths[0], int) else None
        worker.by_params = any(card.get("owned_by") == "vllm" for card in cards)
        if worker.continues not in (BY_OUTPUT_IDS, ANY_API):
            worker.continues = BY_PROMPT_IDS if worker.by_params else ""
        worker.note_abilities()
        self.set_models(worker, frozenset(str(card["id"]) for card in cards) | frozenset(names), bases, aliases)

    def set_info(self, worker: HttpWorker, info: dict[str, Any]) -> None:
        """Apply a worker's /server_info. Bootstrap ports have SGLang's names."""
        if info.get("continues_output_ids") is True:
            worker.continues = ANY_API if info.get("continues_any_api") is True else BY_OUTPUT_IDS
        worker.note_abilities()
        port, ports = info.get("disaggregation_bootstrap_port"), info.get("disaggregation_bootstrap_ports")
        if port and _is_port(port):
            worker.bootstrap_port = port
        worker.bootstrap_ports = tuple(ports) if isinstance(ports, list) and all(map(_is_port, ports)) else ()
        worker.cost = EngineCost.from_report(info.get("cost_model"))
        self.report(worker, info)

    def close(self) -> None:
        """Close all idle connections."""
        for worker in self:
            worker.pool.close()

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            path = self._router_settings.ca_cert_path
            try:
                self._context = ssl.create_default_context(cafile=path or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--ca-cert-path {path} cannot be read: {error}") from None
        return self._context


def _is_port(value: object) -> bool:
    return type(value) is int and 0 <= value < 65536
