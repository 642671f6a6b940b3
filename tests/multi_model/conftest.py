"""A folder of models."""

import pytest


@pytest.fixture
def folder(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "c.gguf").touch()
    (tmp_path / "notes").mkdir()
    return tmp_path
