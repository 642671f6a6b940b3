"""Names of models, folders of models and copies."""

import pytest

from tokenyard.base import ConfigError
from tokenyard.base.model_facts import ModelFacts
from tokenyard.multi_model.catalog import Catalog, ModelPlan, are_several


def plan(path):
    if "broken" in path.name:
        raise ConfigError("it is damaged")
    need = len(list(path.iterdir())) if path.is_dir() else 1
    return ModelPlan(path, path, ModelFacts(), need, None, "", ())


def test_a_folder_has_its_models(folder):
    assert are_several([str(folder)])
    assert not are_several([str(folder / "a")])
    assert are_several([str(folder / "a"), str(folder / "b")])
    assert list(Catalog([folder], plan)) == ["a", "b", "c"]


def test_models_that_are_added_later_are_found_and_broken_ones_tried_again(folder):
    (folder / "broken.gguf").touch()
    found = Catalog([folder], plan)
    assert found.broken == {"broken": "it is damaged"}
    (folder / "d.gguf").touch()
    assert found.refresh() == ["d"]
    assert found.find("d:latest") == "d"
    assert found.find("broken") == ""


def test_a_model_is_read_again_once_its_files_have_changed(folder):
    tried = []

    def plan_and_note(path):
        tried.append(path.name)
        return plan(path)

    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    found = Catalog([folder], plan_and_note)
    found.refresh()
    assert tried.count("broken") == 1
    (folder / "broken" / "config.json").write_text("{}")
    found.refresh()
    assert tried.count("broken") == 2
    (folder / "a" / "second.safetensors").touch()
    assert found.refresh() == []
    assert tried == ["a", "b", "broken", "c.gguf", "broken", "a"]
    (folder / "c").mkdir()
    (folder / "c" / "config.json").touch()
    assert found.refresh() == []
    assert found["c"].path == folder / "c.gguf"


def test_copies_are_second_names(folder):
    found = Catalog([folder], plan)
    found.copy("a", "mine:latest")
    assert found.find("mine") == found.find("mine:latest") == "a"
    with pytest.raises(ConfigError, match="already"):
        found.copy("a", "b")
    with pytest.raises(ConfigError, match="characters"):
        found.copy("a", "x\n")
    assert not found.remove_copy("a")
    assert found.remove_copy("mine:latest")
    assert found.find("mine") == ""


def test_second_names_are_bounded(folder, monkeypatch):
    monkeypatch.setattr("tokenyard.multi_model.catalog.MAX_COPIES", 2)
    found = Catalog([folder], plan)
    for name in ("one", "two", "two"):
        found.copy("a", name)
    with pytest.raises(ConfigError, match="which is the limit"):
        found.copy("a", "three")


def test_two_models_of_one_name_and_no_model_at_all_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"two models have the name a: .*rename"):
        Catalog([folder, folder / "a"], plan)
    with pytest.raises(ConfigError, match="no model in"):
        Catalog([tmp_path / "broken.gguf", tmp_path / "broken-too"], plan)
