"""Those clients of `make clients` that do not mind a shared environment, where they happen to be installed."""

import importlib.util
import sys
from collections.abc import Iterator

import pytest

from tests.clients.run import CLIENTS, check
from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    """A server with the demo model: made-up tokens of the mock executor keep to no grammar."""
    if not (DEMO_MODEL / "model.safetensors").is_file():
        pytest.skip("the demo model is not there")
    server = Server("--device", "cpu")
    yield server
    assert server.close() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "client", [each for each in CLIENTS if each.light or each.name == "schemathesis"], ids=lambda client: client.name
)
def test_client(demo_server, client):
    if importlib.util.find_spec(client.name.replace("-", "_")) is None:
        pytest.skip(f"{client.name} is not installed here; make clients tries it in its own environment")
    line = check(sys.executable, client, demo_server.url)
    assert line.startswith("PASS "), line
