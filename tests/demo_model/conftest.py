"""Makes the scripts in tools/ importable and names the folder of the demo model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ROOT / "tokenyard" / "demo_model"
