"""The frozen tapes replay into the same plans, byte for byte, whatever is built next (tests/tape/freeze.py)."""

import gzip
from pathlib import Path

import pytest

from tests.tape.freeze import FOLDER, cases
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

TAPES = sorted(FOLDER.glob("*.tape.gz"))
MIN_PLANS = 40


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.name.removesuffix(".tape.gz"))
def test_it_replays_alike(path: Path):
    report = replay(Tape(gzip.decompress(path.read_bytes()), path.name))
    assert report.difference is None
    assert report.equal == report.plans >= MIN_PLANS


def test_every_policy_is_there_at_both_depths_and_on_both_executors():
    names = {path.name.removesuffix(".tape.gz") for path in TAPES}
    assert {f"mock-{name}" for name, *_ in cases()} <= names
    assert {name.rpartition("-")[2] for name in names if name.startswith("torch-")} == {"1", "2"}
