"""The zoo's policies rank what they are given, and each entry says whose it is and what differs."""

from pathlib import Path

import pytest

from benchmarks.zoo.__main__ import MODULES
from benchmarks.zoo.preble import Preble
from tokenyard.routing.load import TargetLoad
from tokenyard.routing.policies import PolicyOptions, RequestFeatures


def target(name, requests, prefill_tokens):
    return TargetLoad(name, requests=requests, prefill_tokens=prefill_tokens)


@pytest.mark.parametrize("module", MODULES)
def test_an_entry_names_its_paper_and_fits_a_page(module):
    assert "arXiv" in module.ENTRY.paper
    assert all((module.ENTRY.claim, module.ENTRY.differs))
    assert len(Path(module.__file__).read_text().splitlines()) < 100


@pytest.mark.parametrize(
    ("matched", "busy_tokens", "order"),
    [([0, 900], 0.0, [1, 0]), ([0, 400], 0.0, [1, 0]), ([0, 900], 5000.0, [0, 1]), ([0, 400], 700.0, [0, 1])],
)
def test_preble_exploits_a_long_prefix_unless_its_engine_is_busy(matched, busy_tokens, order):
    targets = [target("a", 0, 0.0), target("b", 0, busy_tokens)]
    assert Preble(PolicyOptions()).rank(RequestFeatures(1000, matched=matched), targets).order == order
