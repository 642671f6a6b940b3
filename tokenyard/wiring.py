"""Derives the model's folder and the engine's configuration from the settings."""

import os
import socket
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError, Slo
from tokenyard.base.cross_site import is_loopback
from tokenyard.base.model_facts import ModelFacts
from tokenyard.cache.eviction import get_eviction_policy
from tokenyard.config import Settings
from tokenyard.config.rules import split_address
from tokenyard.cost import find_profile
from tokenyard.engine.frontend.input_processor import ns_from_ms
from tokenyard.engine.frontend.lora_registry import parse_adapters
from tokenyard.engine.frontend.sampling_defaults import read_sampling_defaults
from tokenyard.engine.processes.engine_config import DisaggConfig, EngineConfig, KvStoreConfig, NodesConfig
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.lora_config import read_lora_config
from tokenyard.executor.model_facts import read_model_facts
from tokenyard.policy.eviction_value import load_eviction_value
from tokenyard.policy.priority_function import load_priority_function
from tokenyard.policy.registry import POLICIES, create_policy
from tokenyard.server.parse.detect import named
from tokenyard.server.state import ServerOptions

MAX_CONTEXT_TOKENS = 1 << 20
TEST_NET = "192.0.2.1"
"""An address that is assigned to no host (RFC 5737, documentation)."""


def with_model_folder(settings: Settings) -> Settings:
    """Effective settings with the model's folder in place of its name on the hub, downloaded if necessary.

    Raises ConfigError for settings that contradict each other and for a model that cannot be found.
    """
    chosen = settings.effective()
    own_tokenizer = chosen.tokenizer_path == chosen.model_path and not chosen.skip_tokenizer_init
    if chosen.executor == "mock" and not own_tokenizer:
        return chosen
    found = resolve_model_path(chosen.model_path)
    if chosen.executor == "torch" and not (found / "config.json").is_file():
        raise ConfigError(f"there is no config.json in {found}; give the folder of a Hugging Face checkpoint")
    folder = str(found)
    return replace(chosen, model_path=folder, tokenizer_path=folder if own_tokenizer else chosen.tokenizer_path)


def server_options(settings: Settings) -> ServerOptions:
    """The HTTP side's part of the settings."""
    shared = {item.name for item in fields(ServerOptions)}
    values = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name in shared}
    if settings.tool_call_parser:
        named(settings.tool_call_parser)
    return ServerOptions(
        model_name=settings.model_name,
        model_facts=_facts(settings),
        model_aliases=settings.served_model_name[1:],
        max_body_bytes=int(settings.max_body_mb * 1_000_000),
        loopback_only=not settings.uds and is_loopback(settings.host),
        info=settings.public(),
        policies=[*POLICIES, "priority"],
        default_sampling=read_sampling_defaults(settings.model_path, settings.sampling_defaults),
        class_targets={
            name: Slo(ns_from_ms(targets.ttft_ms, name), ns_from_ms(targets.tpot_ms, name))
            for name, targets in settings.slo_classes.items()
        },
        **values,
    )


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's configuration from effective settings. Raises ConfigError for unknown names."""
    if settings.node_rank:
        raise ConfigError("--node-rank is for `tokenyard serve`: only node 0 has a scheduler")
    # The engine takes the context length from the loaded model; the value here only has to be large enough.
    scheduler = settings.scheduler_settings(context_length=settings.context_length or MAX_CONTEXT_TOKENS)
    create_policy(scheduler.schedule_policy, scheduler)
    get_eviction_policy(scheduler.radix_eviction_policy)
    load_eviction_value(scheduler.radix_eviction_policy)
    if settings.prior_costs():
        find_profile(settings.prior_costs()).cost()
    if settings.priority_function:
        load_priority_function(settings.priority_function)
    alike = {item.name for item in fields(EngineConfig)} & {item.name for item in fields(Settings)}
    adapters = adapter_folders(settings)
    derived: dict[str, Any] = {
        "adapters": adapters,
        "ranks": settings.dp_size,
        "executor_options": executor_options(settings, adapters),
        "scheduler": scheduler,
        "overlap": not settings.disable_overlap_schedule,
        "cost_profile": settings.prior_costs(),
        "kv_events_topic": events_topic(settings),
        "nodes": make_nodes_config(settings),
        "disagg": DisaggConfig(
            role=settings.disaggregation_mode,
            prefill_engines=settings.prefill_engines,
            backend=settings.disaggregation_transfer_backend,
            host=settings.host,
            port=settings.disaggregation_bootstrap_port,
            secret=settings.disaggregation_secret,
            lease_s=settings.disaggregation_lease_s,
            beat_s=settings.disaggregation_beat_s,
        ),
        "kv_store": KvStoreConfig(
            enabled=settings.enable_hierarchical_cache,
            backend=settings.hicache_storage_backend,
            url=settings.hicache_storage_url,
            host_ratio=settings.hicache_ratio,
            host_gb=settings.hicache_size,
            folder=settings.hicache_storage_dir,
            max_gb=settings.hicache_storage_gb,
            min_free_gb=settings.hicache_storage_min_free_gb,
            write_mb_s=settings.hicache_storage_write_mb_s,
            prefetch_policy=settings.hicache_storage_prefetch_policy,
            timeout_s=settings.hicache_prefetch_timeout_s,
            timeout_per_1k_tokens_s=settings.hicache_prefetch_timeout_per_1k_tokens_s,
        ),
    }
    return EngineConfig(**{name: getattr(settings, name) for name in alike} | derived)


def make_nodes_config(settings: Settings) -> NodesConfig:
    """The nodes of a divided model, and the index of this node."""
    host, port = split_address(settings.dist_init_addr) or ("", 0)
    return NodesConfig(
        *(settings.nnodes, settings.node_rank, host, port),
        *(settings.dist_secret, settings.dist_timeout_s),
    )


def adapter_folders(settings: Settings) -> dict[str, str]:
    """The folders of --lora-paths by name. Raises ConfigError for names that clash."""
    adapters = parse_adapters(settings.lora_paths)
    for name in ("default", *settings.served_model_name):
        if name in adapters:
            raise ConfigError(f"--lora-paths: {name!r} is the name of the model itself; choose another one")
    return {name: str(Path(folder).expanduser()) for name, folder in adapters.items()}


def executor_options(settings: Settings, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of the executor's `load_executor`; the largest rank of adapters is that of the given ones.

    Raises ConfigError for an adapter whose config cannot be used.
    """
    options = settings.executor_options()
    if settings.executor == "torch" and adapters and settings.max_lora_rank is None:
        options["lora_rank"] = max(read_lora_config(Path(folder)).max_rank for folder in adapters.values())
    return options


def events_topic(settings: Settings) -> str:
    """The topic of KV events, with the placeholders for the server's address and model filled in."""
    topic = settings.kv_events_topic
    if "{ip}" in topic:
        topic = topic.replace("{ip}", os.environ.get("POD_IP") or own_address(settings.host))
    return topic.replace("{port}", str(settings.port)).replace("{model}", settings.model_name)


def own_address(host: str) -> str:
    """The address under which other machines find this one; nothing is sent to learn it."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((TEST_NET, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _facts(settings: Settings) -> ModelFacts:
    """What the files of the model say; nothing for a mock without files. Raises ConfigError."""
    folder = Path(settings.model_path)
    return read_model_facts(folder) if (folder / "config.json").is_file() else ModelFacts()
