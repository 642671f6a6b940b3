"""What engines of several models get, and what memory they are taken to need."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.flags import resolve
from tokenyard.cli.serve_models import (
    ENGINE_BYTES,
    GB,
    engine_environment,
    engine_values,
    front_settings,
    plan_model,
    serve_models,
)
from tokenyard.config import DEMO_MODEL, Settings
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.proxy import Router
from tokenyard.router.proxy_exchange import Exchange
from tokenyard.router.request_features import ParsedRequest
from tokenyard.router.router_settings import RouterSettings


def test_engines_have_the_environment_without_settings():
    given = {"PATH": "/bin", "TOKENYARD_API_KEY": "k", "TOKENYARD_CONFIG": "c", "TOKENYARD_DISABLE_NATIVE": "1"}
    assert engine_environment(given) == {"PATH": "/bin", "TOKENYARD_DISABLE_NATIVE": "1"}


@pytest.mark.parametrize("flag", ["cors_allow_origins", "lora_dirs"])
def test_settings_that_would_do_nothing_are_refused(flag):
    with pytest.raises(ConfigError, match="is for one model"):
        serve_models(resolve({flag: "https://a.example"}), [DEMO_MODEL, "other"])


def test_each_rank_takes_weights_and_a_store_in_host_memory():
    one = plan_model(Settings(), 10**12, Path(DEMO_MODEL)).need - ENGINE_BYTES
    both = dataclasses.replace(Settings(), dp_size=2, enable_hierarchical_cache=True, hicache_size=1.5)
    need = plan_model(both, 10**12, Path(DEMO_MODEL)).need - 2 * (ENGINE_BYTES + round(1.5 * GB))
    size = (Path(DEMO_MODEL) / "model.safetensors").stat().st_size
    assert one + size / 2 < need < 2 * one


def test_a_config_that_is_nested_too_deeply_is_damaged(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="recursion"):
        plan_model(Settings(), 10**12, tmp_path)


def test_a_long_prompt_may_keep_an_engine_silent_for_an_hour():
    """As without a router in front. Others give a request half an hour, and five minutes to the first byte."""

    async def silent(settings):
        router, said = Router(settings), []
        router.workers.set_healthy(router.workers.add("http://127.0.0.1:1", "static"), True)
        front = SimpleNamespace(paused=False, fail=lambda error, path: said.append(error.code))
        passing = SimpleNamespace(headers=lambda request: [])
        request = ClientRequest(b"POST", b"/v1/completions", [], True, False)
        exchange = Exchange(router, passing, front, request, ParsedRequest(stream=True))
        router.arrived(exchange)
        begin_s = router.now()
        for seconds in (1, 3600):
            exchange.check_time(begin_s + seconds)
        return said, router.metrics.retries

    assert asyncio.run(silent(front_settings(Settings()))) == ([], 0)
    assert asyncio.run(silent(RouterSettings())) == (["timeout"], 0)
    assert asyncio.run(silent(RouterSettings(request_timeout_secs=1e6))) == ([], 1)


def test_each_model_has_a_folder_and_an_equal_part_of_the_kv_store(tmp_path):
    plans = {name: SimpleNamespace(path=tmp_path / name, pool_tokens=None) for name in ("a", "b", "c", "d")}
    given = {"hicache_storage_dir": str(tmp_path / "kv"), "hicache_storage_gb": 20.0}
    values = {name: engine_values(given, plans, name) for name in plans}
    assert {one["hicache_storage_gb"] for one in values.values()} == {5.0}
    assert [values[name]["hicache_storage_dir"] for name in plans] == [str(tmp_path / "kv" / name) for name in plans]
    # Without a size it is a part of the default, and without a folder there is no store.
    del given["hicache_storage_gb"]
    assert engine_values(given, plans, "a")["hicache_storage_gb"] == Settings().hicache_storage_gb / 4
    assert "hicache_storage_gb" not in engine_values({}, plans, "a")
