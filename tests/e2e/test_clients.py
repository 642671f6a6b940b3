"""The light ones of the clients that `make clients` tries, where they happen to be installed."""

import importlib.util
import sys

import pytest

from tests.clients.run import CLIENTS, check


@pytest.mark.parametrize("client", [client for client in CLIENTS if client.light], ids=lambda client: client.name)
def test_light_client(mock_server, client):
    if importlib.util.find_spec(client.name.replace("-", "_")) is None:
        pytest.skip(f"{client.name} is not installed here; make clients tries it in its own environment")
    line = check(sys.executable, client, mock_server.url)
    assert line.startswith("PASS "), line
