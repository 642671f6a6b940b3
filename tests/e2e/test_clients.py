"""Those clients of `make clients` that do not mind a shared environment, where they happen to be installed."""

import importlib.util
import sys

import pytest

from tests.clients.run import CLIENTS, check


def case(client):
    """A client to try; schemathesis takes a minute."""
    return pytest.param(client, id=client.name, marks=() if client.light else pytest.mark.slow)


@pytest.mark.parametrize("client", [case(each) for each in CLIENTS if each.light or each.name == "schemathesis"])
def test_client(mock_server, client):
    if importlib.util.find_spec(client.name.replace("-", "_")) is None:
        pytest.skip(f"{client.name} is not installed here; make clients tries it in its own environment")
    line = check(sys.executable, client, mock_server.url)
    assert line.startswith("PASS "), line
