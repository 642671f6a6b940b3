"""The notebooks of the docs run from top to bottom."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs/notebooks").glob("*.ipynb"))


FOUND = {
    "compare_policies": "95 % interval",
    "fair_shares": "vtc: the fast client has had 0.85, 1.02, 0.98 times",
    "plan_a_fleet": "3 engines are enough",
}
"""A part of what each notebook prints."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    names = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert FOUND[path.stem] in capsys.readouterr().out
