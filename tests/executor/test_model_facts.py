"""What the files of a model say about it."""

import json

import pytest

from tokenyard.executor.model_facts import read_model_facts


@pytest.mark.parametrize("part", [{"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}])
def test_the_length_is_that_of_the_language_model(tmp_path, part):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"} | part))
    facts = read_model_facts(tmp_path)
    assert (facts.family, facts.context_length) == ("qwen3_5", 512)
