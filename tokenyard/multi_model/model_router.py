"""The router in front of the engines of several models, which it loads and unloads."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import override

from tokenyard.base import NS_PER_S, ConfigError, InvalidRequestError
from tokenyard.base.durations import parse_keep_alive
from tokenyard.multi_model.catalog import Catalog
from tokenyard.multi_model.engine_process import EngineProcess
from tokenyard.multi_model.residency import LOADED, UNLOADED, Load, Residency, Unload, Usage, Yield
from tokenyard.router.access import check_access
from tokenyard.router.client_connection import JSON_TYPE, ClientConnection, ClientHandler, ClientRequest
from tokenyard.router.dispatch_driver import OpenRequest
from tokenyard.router.errors import RouterError
from tokenyard.router.proxy import Router, unknown_model
from tokenyard.router.request_features import ParsedRequest, Tokenize
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.workers import HttpWorker
from tokenyard.routing.dispatch import MODEL_UNAVAILABLE, QUEUE_TIMEOUT
from tokenyard.server.ollama.entries import time_text

log = logging.getLogger(__name__)

GB = 1e9
SOURCE = "model"
CHAT = "/api/chat"
LOADS = (CHAT, "/api/generate")
"""Paths that load or unload a model where they come without a prompt."""

EngineSettings = Callable[[str], Mapping[str, Any]]
"""The settings of a model's engine, as in the file of --config."""


@dataclass(frozen=True, slots=True)
class ModelRouterSettings:
    """What the front needs beyond a router's settings.

    keep_alive_ns: how long a model stays loaded without requests; None for ever.
    memory: bytes that the engines may take together.
    max_loaded: most models in memory at once; 0 for no limit.
    shutdown_s: how long an engine finishes its requests.
    environment: that of engines.
    folder: private, for sockets and settings of engines.
    """

    keep_alive_ns: int | None
    memory: int
    max_loaded: int
    shutdown_s: float
    environment: Mapping[str, str]
    folder: Path


class ModelRouter(Router):
    """A router with one worker per model, whose engine runs only while requests need it."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenize: Tokenize | None,
        catalog: Catalog,
        models: ModelRouterSettings,
        engine_settings: EngineSettings,
    ) -> None:
        super().__init__(settings, tokenize)
        max_load_ns = round(settings.queue_timeout_secs * NS_PER_S)
        self.catalog, self.residency = catalog, Residency(models.memory, models.max_loaded, max_load_ns)
        self._models, self._engine_settings = models, engine_settings
        self._engines: dict[str, EngineProcess] = {}
        self._workers: dict[str, HttpWorker] = {}
        self._open: Counter[str] = Counter()
        self._told: set[str] = set()
        # Such a line is not written at every level.
        self._says_ready_in_json = settings.log_format == "json"
        self._closing = False
        for name in catalog:
            self._add(name)

    def _add(self, name: str) -> None:
        """Add a model, which is not loaded."""
        engine = EngineProcess(
            name,
            self._models.folder,
            len(self._engines),
            shutdown_s=self._models.shutdown_s,
            environment=self._models.environment,
            ready=lambda: self._engine_ready(name),
            ended=lambda: self._engine_ended(name),
        )
        worker = self.workers.add(engine.url, SOURCE)
        self.workers.set_models(worker, frozenset({name}), frozenset({name}))
        self._engines[name], self._workers[name] = engine, worker
        self.residency.add(name, self.catalog[name].need, self._models.keep_alive_ns)

    def refresh(self) -> None:
        """Look for new models in the folders of models, and for new files of those that are not loaded."""
        for name in self.catalog.refresh():
            log.info("there is a new model, %s", name)
            self._add(name)
        for model in self.residency:
            if model.phase == UNLOADED:
                model.need = self.catalog[model.name].need

    @override
    def add_worker(self, url: str, source: str, role: str = "") -> HttpWorker:
        raise ConfigError("this server starts its engines itself; put the model into its folder of models")

    @override
    def remove_worker(self, worker: HttpWorker) -> None:
        what = "this server starts its engines itself; `ollama stop` (keep_alive 0) unloads a model"
        raise RouterError(409, what, code="worker_refused")

    @override
    def why_not_ready(self) -> str:
        """Models are loaded when requests come, so none has to be there."""
        return "draining" if self.draining else ""

    # Requests.

    @override
    def handle(self, front: ClientConnection, request: ClientRequest) -> ClientHandler | None:
        if request.path in LOADS and b'"keep_alive"' in request.body and self._only_unloads(front, request):
            return None
        return super().handle(front, request)

    def _only_unloads(self, front: ClientConnection, request: ClientRequest) -> bool:
        """Answer a request without a prompt whose `keep_alive` is 0, which asks for its model to be unloaded. False for
        any other request, which an engine answers.
        """
        try:
            fields = orjson.loads(request.body)
            idle_ns = parse_keep_alive(fields["keep_alive"])
        except (orjson.JSONDecodeError, LookupError, TypeError, InvalidRequestError):
            return False
        name = self.catalog.find(str(fields.get("model") or ""))
        if idle_ns != 0 or not name or fields.get("prompt") or fields.get("messages"):
            return False
        request.request_id = self.request_id(request)
        try:
            check_access(request, self.settings, admin=False)
        except RouterError as error:
            front.fail(error, request.path)
            return True
        self.residency.keep(name, 0)
        self.plan()
        line = {"model": name, "created_at": time_text(time.time()), "done": True, "done_reason": "unload"}
        said = {"message": {"role": "assistant", "content": ""}} if request.path == CHAT else {"response": ""}
        front.answer(200, orjson.dumps(line | said), [JSON_TYPE])
        return True

    @override
    def resolve_model(self, request: ClientRequest, parsed: ParsedRequest) -> None:
        """Find the model that a request means, and write its name into the body in place of a copy's.

        Raises RouterError (400, 404, 503) for a request that names no model, for one that is not there, and for one
        that does not fit into memory; InvalidRequestError for an invalid `keep_alive`.
        """
        names = list(self.catalog)
        given = parsed.model
        if given == "default" and not self.catalog.find(given):
            given = ""
        name = self.catalog.find(given) if given else names[0] if len(names) == 1 else ""
        if given and (not name or self.residency[name].phase == UNLOADED):
            self.refresh()
            name = self.catalog.find(given)
        if not name:
            if given in self.catalog.broken:
                raise RouterError(503, self.catalog.broken[given], code="model_broken", param="model")
            raise unknown_model(given, names)
        need = self.catalog[name].need
        if need > self.residency.budget:
            what = (
                f"the model {name!r} takes {need / GB:.2f} GB, and all models together may take "
                f"{self.residency.budget / GB:.2f} GB (--model-memory-gb)"
            )
            raise RouterError(503, what, code="model_does_not_fit", param="model")
        keep_alive = parsed.fields.get("keep_alive")
        if keep_alive is not None and request.path.startswith("/api/"):
            self.residency[name].keep_alive_ns = parse_keep_alive(keep_alive)
        if given and parsed.model != name:
            parsed.fields = {**parsed.fields, "model": name}
            request.body = orjson.dumps(parsed.fields)
        parsed.model = name

    @override
    def arrived(self, request: OpenRequest) -> None:
        self._open[request.facts.model] += 1
        super().arrived(request)
        self.plan()

    @override
    def ended(self, request: OpenRequest) -> None:
        name = request.facts.model
        self._open[name] -= 1
        self.residency.ended(name, self.now_ns())
        super().ended(request)
        self.plan()

    @override
    def refusal(self, request: OpenRequest, cause: str) -> RouterError:
        if cause not in (MODEL_UNAVAILABLE, QUEUE_TIMEOUT):
            return super().refusal(request, cause)
        name = request.facts.model
        model, waited_s = self.residency[name], (self.now_ns() - request.arrived_ns) / NS_PER_S
        if model.phase == LOADED and not model.yields:
            return super().refusal(request, cause)
        others = ", ".join(other.name for other in self.residency if other.phase != UNLOADED and other is not model)
        why = "is still loading" if model.phase != UNLOADED else f"waits for memory, which {others or 'nobody'} has"
        what = f"the model {name!r} {why}, after {waited_s:.0f} s; try again later"
        return RouterError(503, what, code="model_loading", param="model")

    @override
    def model_cards(self) -> dict[str, dict[str, Any]]:
        self.refresh()
        cards: dict[str, dict[str, Any]] = {}
        for name in [*self.catalog, *self.catalog.copies]:
            base = self.catalog.find(name)
            facts, worker = self.catalog[base].facts, self._workers[base]
            cards[name] = {
                "id": name,
                "object": "model",
                "created": round(facts.modified_s),
                "owned_by": "tokenyard",
                "root": base,
                "max_model_len": worker.context_length or facts.context_length,
                "status": self.residency[base].phase,
            }
        return cards

    # Engines.

    def context_length(self, name: str) -> int:
        """Most tokens of prompt and answer together, as the model's engine reports it, or else its files."""
        return self._workers[name].context_length or self.catalog[name].facts.context_length

    def expires_s(self, name: str) -> float | None:
        """When a model is unloaded if no request comes, as Unix time; None for never."""
        model = self.residency[name]
        expires = model.expires_ns()
        if expires is None:
            return None
        left_ns = (model.keep_alive_ns or 0) if self._open[name] else expires - self.now_ns()
        return time.time() + left_ns / NS_PER_S

    @override
    def sweep(self) -> None:
        super().sweep()
        self.plan()

    def plan(self) -> None:
        """Load and unload what the residency decides now. Called after every event."""
        if self._closing:
            return
        usage = {}
        for name, worker in self._workers.items():
            if worker.healthy:
                self.residency.loaded(name, self.now_ns())
            running = worker.open_requests
            usage[name] = Usage(running, max(self._open[name] - running, 0))
        for action in self.residency.plan(self.now_ns(), usage):
            match action:
                case Load():
                    self._load(action.name)
                case Unload():
                    self._unload(action)
                case Yield():
                    log.info("model %s takes no new requests: another model waits for its memory", action.name)
                    self.drain_worker(self._workers[action.name], draining=True)
                case _:
                    log.info("model %s takes new requests again: no other model waits", action.name)
                    self.drain_worker(self._workers[action.name], draining=False)

    def _load(self, name: str) -> None:
        """Start the engine of a model. It gets requests once it has said that it is ready and answers a probe."""
        plan, used = self.catalog[name], self.residency.used
        log.info(
            "loading model %s: it takes %.2f GB; with it %.2f of %.2f GB are taken",
            *(name, plan.need / GB, used / GB, self.residency.budget / GB),
        )
        worker = self._workers[name]
        worker.healthy = None
        self.workers.drain(worker, draining=False)
        self._engines[name].start(self._engine_settings(name))
        if self._says_ready_in_json:
            self.health.watch(worker)

    def _engine_ready(self, name: str) -> None:
        """The engine of a model says that it is ready. Probes before would only be failures to log."""
        if not self._says_ready_in_json:
            self.health.watch(self._workers[name])

    def _unload(self, action: Unload) -> None:
        log.info("unloading model %s: %s", action.name, action.why)
        worker = self._workers[action.name]
        self.health.leave(worker)
        self.workers.down(worker)
        worker.pool.close()
        self._told.add(action.name)
        self._engines[action.name].stop()

    def _engine_ended(self, name: str) -> None:
        """The engine of a model has ended, as it was told or by itself."""
        model, worker, engine = self.residency[name], self._workers[name], self._engines[name]
        loading = model.phase != LOADED
        self.health.leave(worker)
        self.workers.down(worker)
        if name in self._told or self._closing:
            self._told.discard(name)
        else:
            log.error("the engine of model %s has ended: %s", name, engine.reason)
            if loading:
                what = f"the model {name!r} cannot be loaded: {engine.reason}"
                error = RouterError(503, what, code="model_load_failed", param="model")
                for request in [one for one in self.exchanges if one.facts.model == name]:
                    request.abort(error)
        # Only now, or the end of the first of these requests would load the model again for the others.
        self.residency.stopped(name)
        self.plan()

    @override
    async def close(self) -> None:
        self._closing = True
        await super().close()
        for engine in self._engines.values():
            engine.stop()
        for engine in self._engines.values():
            await engine.wait()
