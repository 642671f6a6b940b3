"""`tokenyard serve` with several models: a router in front of their engines, which run while requests need them."""

import asyncio
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import setproctitle

from tokenyard.base import ConfigError
from tokenyard.base.cross_site import is_loopback
from tokenyard.base.durations import parse_keep_alive
from tokenyard.base.errors import InvalidRequestError
from tokenyard.base.model_facts import ModelFacts
from tokenyard.base.ranges import MAX_SECONDS
from tokenyard.cli.event_loop import loop_factory
from tokenyard.cli.flags import ENV_PREFIX, Resolved, all_settings
from tokenyard.config import Settings
from tokenyard.engine.text.chat_template import load_chat_template
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.memory_fit import free_memory
from tokenyard.executor.model_facts import read_model_facts
from tokenyard.multi_model.catalog import Catalog, ModelPlan
from tokenyard.multi_model.model_router import ModelRouter, ModelRouterSettings
from tokenyard.multi_model.ollama_routes import OllamaRoutes
from tokenyard.router.process import listen, run
from tokenyard.router.request_features import Tokenize
from tokenyard.router.router_settings import RouterSettings
from tokenyard.server.ollama.entries import capabilities
from tokenyard.server.parse.output_style import OutputStyle

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.8
"""Of the memory that is free at the start, the part that engines may take."""

ENGINE_BYTES = 600_000_000
"""What the processes of an engine take besides weights, KV pool and activations: mostly torch and the interpreters."""

MIN_POOL_TOKENS = 2048
"""The smallest KV pool that a model is given to make it fit; a smaller memory is refused."""

GB = 1e9

OF_ONE_MODEL = (
    *("tokenizer_path", "served_model_name", "chat_template", "tool_call_parser", "lora_paths", "lora_dirs"),
    *("speculative_draft_model_path", "record", "nnodes", "node_rank", "dist_init_addr", "disaggregation_mode"),
    *("prefill_engines", "enable_kv_cache_events", "file_storage_path", "tenant_keys", "uds"),
    "cors_allow_origins",
)
"""Settings that fit one engine only, or that the front does not have."""

OF_THE_FRONT = (
    *("host", "port", "ssl_certfile", "ssl_keyfile", "api_key", "admin_api_key"),
    *("keep_alive", "max_loaded_models", "model_memory_gb", "model_load_timeout_s"),
)
"""Settings of the process that clients reach; engines listen on sockets that only it can open."""


def serve_models(resolved: Resolved, models: Sequence[str]) -> int:
    """Serve `models`, files and folders, until told to stop. Returns 0.

    Raises ConfigError for settings that fit one model only, and if no model can be served.
    """
    settings = resolved.settings
    for name in OF_ONE_MODEL:
        if name in resolved.sources:
            raise ConfigError(f"{resolved.sources[name]} is for one model, and several are given; leave it out")
    keep_alive_ns = _keep_alive(settings.keep_alive)
    settings.validate()
    setproctitle.setproctitle("tokenyard: models")
    memory = round(settings.model_memory_gb * GB) if settings.model_memory_gb else int(free_memory() * MEMORY_SHARE)
    catalog = Catalog([Path(model) for model in models], partial(plan_model, settings, memory))
    for name, why in catalog.broken.items():
        log.warning("model %s cannot be served: %s", name, why)
    for name in catalog:
        need, facts = catalog[name].need, catalog[name].facts
        fits = "" if need <= memory else "; it does not fit, and requests for it are refused (--model-memory-gb)"
        size = f"{facts.size_bytes / GB:.2f} GB of {facts.quantization or 'no'} weights"
        log.info("model %s: %s, takes %.2f of %.2f GB%s", name, size, need / GB, memory / GB, fits)
    given = given_values(resolved)
    folder = Path(tempfile.mkdtemp(prefix="tokenyard-"))
    front = ModelRouterSettings(
        keep_alive_ns=keep_alive_ns,
        memory=memory,
        max_loaded=settings.max_loaded_models,
        shutdown_s=settings.shutdown_timeout_s,
        environment=engine_environment(os.environ),
        folder=folder,
    )

    def make_router(router_settings: RouterSettings, tokenize: Tokenize | None) -> ModelRouter:
        router = ModelRouter(router_settings, tokenize, catalog, front, partial(engine_values, given, catalog))
        router.own_routes = OllamaRoutes(router).routes()
        return router

    router_settings = front_settings(settings)
    if not (settings.api_key or is_loopback(settings.host)):
        what = "--host %s without --api-key: whoever reaches the port may use and control the models"
        log.warning(what, settings.host)
    try:
        listener = listen(router_settings)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(router_settings, listener, announce="Tokenyard is ready at", make_router=make_router))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _keep_alive(text: str) -> int | None:
    try:
        return parse_keep_alive(text)
    except InvalidRequestError as error:
        raise ConfigError(f"--keep-alive is {text!r}: {error.message}") from None


def front_settings(settings: Settings) -> RouterSettings:
    """The settings of the router in front. A request waits as long for a model that loads as for one that is full, and
    its answer may take as long as without a router: an engine that dies closes its connections, and one that is busy
    with a long prompt is silent.
    """
    return RouterSettings(
        host=settings.host,
        port=settings.port,
        tls_cert_path=settings.ssl_certfile,
        tls_key_path=(settings.ssl_keyfile or settings.ssl_certfile) if settings.ssl_certfile else "",
        api_key=settings.api_key,
        admin_api_key=settings.admin_api_key,
        max_body_mb=settings.max_body_mb,
        queue_timeout_secs=settings.model_load_timeout_s,
        unavailable_timeout_secs=settings.model_load_timeout_s,
        request_timeout_secs=MAX_SECONDS,
        first_byte_timeout_secs=0.0,
        stall_timeout_secs=0.0,
        shutdown_grace_period_secs=settings.shutdown_timeout_s,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


def given_values(resolved: Resolved) -> dict[str, Any]:
    """The settings that the user has given, as the file of --config has them, without those of the front."""
    values = dataclasses.asdict(resolved.settings)
    kept = [name for name in resolved.sources if name not in OF_THE_FRONT]
    return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in kept}


def engine_values(given: Mapping[str, Any], catalog: Catalog, name: str) -> dict[str, Any]:
    """The settings of a model's engine. The KV store on disk has a folder and an equal part for each model."""
    plan = catalog[name]
    values = {**given, "model_path": str(plan.path), "served_model_name": [name]}
    if plan.pool_tokens is not None:
        values["max_total_tokens"] = plan.pool_tokens
    if folder := given.get("hicache_storage_dir"):
        values["hicache_storage_dir"] = str(Path(folder).expanduser().absolute() / name)
        values["hicache_storage_gb"] = given.get("hicache_storage_gb", Settings().hicache_storage_gb) / len(catalog)
    return values


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without settings: those that engines have are in their files, and a key of the front is not theirs."""
    ours = {f"{ENV_PREFIX}CONFIG", *(flag.env for flag in all_settings())}
    return {name: value for name, value in environ.items() if name not in ours}


def plan_model(settings: Settings, memory: int, path: Path) -> ModelPlan:
    """What a model takes: each rank has the weights, and all share the KV pool. One whose size no setting says is cut
    to what `memory` bytes hold, down to `MIN_POOL_TOKENS`.

    Raises ConfigError for files that cannot be served.
    """
    folder = resolve_model_path(str(path))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"there is no config.json in {folder}")
    facts = read_model_facts(folder) if settings.executor == "torch" else ModelFacts()
    template = load_chat_template(folder)
    style = OutputStyle(template.sources, response_template=template.response_template)
    ranks = settings.dp_size
    need, pool = (ENGINE_BYTES + round(settings.hicache_size * GB)) * ranks, None
    if settings.executor == "torch" and settings.load_format != "dummy":
        from tokenyard.executor.model_loader import memory_need

        found, _ = memory_need(str(folder), **settings.executor_options())
        copies = 1 if settings.enable_dp_attention else ranks
        need += (copies - 1) * (found.weights + found.activations)
        if settings.max_total_tokens is None and need + found.total > memory:
            least, _ = memory_need(str(folder), **settings.executor_options() | {"max_total_tokens": MIN_POOL_TOKENS})
            left = memory - need - found.total + found.kv_pool
            pool = MIN_POOL_TOKENS * max(left // max(least.kv_pool, 1), 1)
            found = dataclasses.replace(found, kv_pool=pool // MIN_POOL_TOKENS * least.kv_pool)
        need += found.total
    return ModelPlan(path, folder, facts, need, pool, style.template, tuple(capabilities(style)))
