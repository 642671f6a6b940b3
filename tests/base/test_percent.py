"""Shares as they are shown: a target that one request missed is never shown as met by all."""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

from tokenyard.base.percent import percent


@pytest.mark.parametrize(
    ("share", "digits", "shown"),
    [
        (1999 / 2000, 1, "99.9"),
        (1 - 1e-9, 1, "99.9"),
        (1 - 1e-9, 2, "99.99"),
        (1 - 1e-9, 0, "99"),
        (0.9994, 1, "99.9"),
        (1.0, 1, "100.0"),
        (1.0, 2, "100.00"),
        (0.0, 1, "0.0"),
        (0.123456, 2, "12.35"),
        (1.25, 1, "125.0"),
    ],
)
def test_only_the_whole_is_shown_as_a_hundred(share, digits, shown):
    assert percent(share, digits) == shown


def test_the_live_page_shows_only_the_whole_as_a_hundred():
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's code")
    browser = (
        "globalThis.document = {documentElement: {dataset: {}}, addEventListener() {}};"
        "globalThis.window = {matchMedia: () => ({matches: false}), addEventListener() {}};"
    )
    charts = (files("tokenyard.ui") / "charts.js").read_text(encoding="utf-8")
    shares = [0.9999999, 1999 / 2000, 0.9994, 1, 0.5, 0, None]
    program = f"{browser}{charts}\nconsole.log(JSON.stringify({json.dumps(shares)}.map(Yard.percent)));"
    found = subprocess.run([node, "-e", program], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(found.stdout) == ["99.99 %", "99.95 %", "99.9 %", "100 %", "50 %", "0 %", "–"]
