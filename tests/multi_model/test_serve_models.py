"""What engines of several models get, and what memory they are taken to need."""

import dataclasses
from pathlib import Path

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.flags import resolve
from tokenyard.cli.serve_models import ENGINE_BYTES, GB, engine_environment, plan_model, serve_models
from tokenyard.config import DEMO_MODEL, Settings


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
