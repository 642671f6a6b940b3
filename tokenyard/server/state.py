"""State that all routes share: options, the engine, metrics, and the phase of the server."""

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenyard.base import InvalidRequestError, OverloadedError, Slo
from tokenyard.base.model_facts import ModelFacts
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.server.engine_client import ControlClient, EngineClient, GenerateClient
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.prompt_history import PromptHistory
from tokenyard.server.metrics.prometheus import Metrics
from tokenyard.server.metrics.request_log import RequestLog
from tokenyard.server.metrics.request_timeline import StreamProfile
from tokenyard.server.openai.logprobs import TokenNames
from tokenyard.server.openai.response_store import ResponseStore
from tokenyard.server.parse.output_style import OutputStyle

MAX_NAMED = 20
"""Adapters that the error for an unknown adapter lists."""

Phase = Literal["loading", "ready", "draining"]


@dataclass(slots=True)
class ServerOptions:
    """Options of the HTTP server, which the command line fills from its settings; the fields without a line are
    settings of the same name (`config/server_settings.py`).

    model_name: the name under which the model is served, and which answers have.
    model_aliases: other names for it in requests.
    tenant_keys: API key -> tenant.
    loopback_only: whether the server listens on loopback only.
    max_prompts: most prompts of one request.
    lora_dirs: folders that adapters may be loaded from.
    default_sampling: sampling parameters of requests that do not set them.
    class_targets: service class -> targets.
    policies: names of the policies that may be chosen.
    info: what `/get_server_info` reports.
    """

    model_name: str = "model"
    model_facts: ModelFacts = field(default_factory=ModelFacts)
    model_aliases: tuple[str, ...] = ()
    api_key: str = ""
    admin_api_key: str = ""
    tenant_keys: Mapping[str, str] = field(default_factory=dict)
    cors_allow_origins: list[str] = field(default_factory=list)
    loopback_only: bool = False
    max_body_bytes: int = 32_000_000
    max_prompts: int = 1024
    lora_dirs: tuple[str, ...] = ()
    file_storage_path: str = ""
    max_file_storage_mb: float = 1000.0
    strict_api: bool = False
    tool_call_parser: str = ""
    stream_interval: int = 1
    disaggregation_mode: str = "null"
    speculative_algorithm: str = "none"
    metrics_compat: list[str] = field(default_factory=list)
    health_timeout_s: float = 20.0
    log_requests: bool = False
    log_requests_content: bool = False
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    class_targets: Mapping[str, Slo] = field(default_factory=dict)
    policies: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def base_names(self) -> tuple[str, ...]:
        """What a request may call the model without an adapter."""
        return (self.model_name, *self.model_aliases, "default")


class RequestObserver(Protocol):
    """Observes one request from its arrival on."""

    def delta(self, delta: OutputDelta) -> None:
        """Process a delta of an answer."""


ObserverFactory = Callable[[GenerateReqInput, Mapping[str, str]], RequestObserver]
"""Makes an observer for a request with these headers."""


class ServerState:
    """The object that all routes share."""

    def __init__(self, options: ServerOptions, engine: EngineClient | None = None) -> None:
        self.options = options
        self.metrics = Metrics(options.model_name, options.metrics_compat, options.info.get("page_size", 1))
        self.observer_factories: list[ObserverFactory] = [lambda spec, headers: self.metrics.tracker(spec)]
        if options.log_requests:
            self.observer_factories.append(
                lambda spec, headers: RequestLog(spec, content=options.log_requests_content, prompts=self.prompts)
            )
        self.responses = ResponseStore()
        self.prompts = PromptHistory()
        self.phase: Phase = "loading"
        self.on_ready: list[Callable[[], None]] = []
        self.created_s = int(time.time())
        self._started_as = uuid.uuid4().hex
        self._engine: EngineClient | None = None
        self._names: TokenNames | None = None
        self._style: OutputStyle | None = None
        self._rids: set[str] = set()
        self._timeline: StreamProfile | None = None
        if engine is not None:
            self.set_ready(engine)

    def set_ready(self, engine: EngineClient) -> None:
        """Accept requests from now on: the engine is ready."""
        self._engine = engine
        self._names = TokenNames(engine.tokenizer)
        self._style = OutputStyle(
            engine.template_sources, engine.tokenizer, self.options.tool_call_parser, engine.response_template
        )
        self.phase = "ready"
        for begin in self.on_ready:
            begin()

    @property
    def boot_id(self) -> str:
        """Changes whenever a prefix cache is lost: when the server restarts, when a scheduler does, and when the
        weights change.
        """
        if self._engine is None:
            return f"{self._started_as}-0"
        return f"{self._started_as}-{self._engine.lost_schedulers()}{self._engine.weight_version}"

    def start_draining(self) -> None:
        """Refuse new requests; open ones continue."""
        self.phase = "draining"

    @property
    def generator(self) -> GenerateClient:
        """The engine, to answer requests. Raises OverloadedError while it loads."""
        return self._loaded_engine()

    @property
    def control(self) -> ControlClient:
        """The engine, to observe and control it. Raises OverloadedError while it loads."""
        return self._loaded_engine()

    def _loaded_engine(self) -> EngineClient:
        if self._engine is None:
            raise OverloadedError("the model is still loading; try again soon", code="loading")
        return self._engine

    @property
    def names(self) -> TokenNames:
        """Tokens as text."""
        assert self._names is not None
        return self._names

    @property
    def style(self) -> OutputStyle:
        """How the model writes reasoning and tool calls."""
        assert self._style is not None
        return self._style

    def admit(self) -> GenerateClient:
        """The engine, for a new request. Raises OverloadedError while loading or draining."""
        if self.phase == "draining":
            raise OverloadedError("the server is shutting down", code="draining")
        return self.generator

    def start_timeline(self) -> None:
        """Start a profile of requests that arrive from now on."""
        self.stop_timeline()
        self._timeline = StreamProfile()
        self.observer_factories.append(self._timeline.watcher)

    def stop_timeline(self) -> list[dict[str, Any]]:
        """End the profile and return its events."""
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return []
        self.observer_factories.remove(timeline.watcher)
        return timeline.events

    def watchers(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> list[RequestObserver]:
        """Observers for one request: metrics, and those that are enabled."""
        return [make(spec, headers) for make in self.observer_factories]

    @contextmanager
    def open_request(self, rid: str) -> Iterator[None]:
        """Count a request as open. Raises InvalidRequestError if one with this id is open already."""
        if rid in self._rids:
            raise InvalidRequestError(
                f"a request with id {rid!r} is already running", param="rid", code="duplicate_rid"
            )
        self._rids.add(rid)
        try:
            yield
        finally:
            self._rids.discard(rid)

    def ids_of(self, rid: str) -> list[str]:
        """The open request ids that belong to `rid`, see `matching`."""
        return matching(rid, self._rids)

    @property
    def open_requests(self) -> int:
        """How many requests are open."""
        return len(self._rids)

    def check_model(self, name: str | None, lora_path: object = None) -> str:
        """The name of the adapter that a request means by its `model` (an adapter, or base:adapter) or `lora_path`, ""
        for none; no model, the model's aliases and "default" mean the base model.

        Raises HttpError (404) if `model` is not what is served, InvalidRequestError for two different adapters.
        """
        adapter = ""
        if name and name not in self.options.base_names:
            bases = [base for base in self.options.base_names if name.startswith(f"{base}:")]
            adapter = name.removeprefix(f"{max(bases, key=len, default='')}:")
            self._check_adapter(adapter, name, "model")
        if not lora_path:
            return adapter
        if not isinstance(lora_path, str):
            raise InvalidRequestError("lora_path must be the name of an adapter", param="lora_path")
        if adapter and adapter != lora_path:
            message = f"model means the adapter {adapter!r} and lora_path another one; give one of the two"
            raise InvalidRequestError(message, param="lora_path")
        self._check_adapter(lora_path, lora_path, "lora_path")
        return lora_path

    def _check_adapter(self, adapter: str, given: str, param: str) -> None:
        """Raise HttpError (404), which shows what was `given`, if no adapter of this name is loaded."""
        loaded = self.generator.adapters.loaded
        if adapter not in loaded:
            names = self.options.model_name, *self.options.model_aliases, *sorted(loaded)[:MAX_NAMED]
            served = ", ".join(map(repr, names))
            message = f"the model {given[:256]!r} does not exist; this server has {served}"
            raise HttpError("model_not_found", message, param=param)


def matching(name: str, rids: Collection[str]) -> list[str]:
    """The ids among `rids` that `name` means, which is the id of a request or of its answer.

    That is the request itself, or its parts if it has several prompts.
    """
    for rid in (name, name.removeprefix("chatcmpl-").removeprefix("cmpl-")):
        found = [known for known in rids if known == rid or _is_part(known, rid)]
        if found:
            return found
    return []


def answer_id(rid: str, *, chat: bool) -> str:
    """The id that an OpenAI answer to request `rid` carries."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{rid}"


def _is_part(open_rid: str, rid: str) -> bool:
    """Whether `open_rid` is `rid` with the number of a prompt appended."""
    head, dash, place = open_rid.rpartition("-")
    return bool(dash) and head == rid and place.isdecimal()
