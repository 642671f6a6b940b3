"""Sampling defaults from a model's generation_config.json."""

import json

import pytest

from tokenyard.base import ConfigError
from tokenyard.engine.frontend.sampling_defaults import read_sampling_defaults


def folder(path, content):
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_models_values_are_taken_and_others_left(tmp_path):
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": None, "max_new_tokens": 5}
    assert read_sampling_defaults(folder(tmp_path, content), "model") == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert read_sampling_defaults(str(tmp_path), "openai") == {}


def test_a_model_without_the_file_has_none(tmp_path):
    assert read_sampling_defaults(str(tmp_path), "model") == {}


def test_top_k_zero_means_all(tmp_path):
    assert read_sampling_defaults(folder(tmp_path, {"top_k": 0}), "model") == {"top_k": -1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ([1], "JSON object"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 1.5}, "whole number"),
        ({"top_p": 0}, "top_p is 0"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words):
        read_sampling_defaults(folder(tmp_path, content), "model")
