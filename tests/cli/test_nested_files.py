"""Files that are nested too deeply are refused in one clear line, wherever JSON or YAML is read."""

import argparse

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.bench_serve import read_backend
from tokenyard.cli.flags import all_settings, parse_tenants, read_config_file
from tokenyard.cli.generate import prompt_from_json
from tokenyard.cost.profiles import load_profile
from tokenyard.engine.text.model_files import read_json
from tokenyard.executor.mock import load_executor
from tokenyard.server.parse.json_scan import plain_arguments

DEEP = "[" * 100_000
YAML = "[" * 2000


@pytest.fixture
def deep(tmp_path):
    """Writes a file of nested lists."""

    def write(name, text=DEEP):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize("read", [read_json, load_profile])
def test_json_files(deep, read):
    with pytest.raises(ConfigError, match=r"x\.json") as caught:
        read(deep("x.json"))
    assert "\n" not in caught.value.message


def test_the_config_of_a_model(deep):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_executor(str(deep("config.json").parent))


def test_the_config_of_a_server(deep):
    path = str(deep("x.yaml", YAML))
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be read"):
        read_config_file(path, all_settings())
    with pytest.raises(ValueError, match=r"x\.yaml cannot be read"):
        parse_tenants(path)


def test_words_of_the_command_line():
    with pytest.raises(ConfigError, match="not JSON"):
        prompt_from_json(DEEP, "line 1")
    coroutine = read_backend(None, argparse.Namespace(extra_request_body=DEEP))
    with pytest.raises(ConfigError, match="not JSON"):
        coroutine.send(None)


def test_what_a_model_writes_stays_text():
    assert plain_arguments(DEEP) == DEEP
