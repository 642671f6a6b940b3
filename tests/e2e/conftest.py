"""One mock server for all tests that only ask it questions."""

from collections.abc import Iterator

import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL


@pytest.fixture(scope="session")
def mock_server() -> Iterator[Server]:
    """A server with the demo model's tokenizer and the mock executor."""
    if not (DEMO_MODEL / "tokenizer.json").is_file():
        pytest.skip("the demo model is not there")
    server = Server("--executor", "mock", "--mock-step-ms", "2")
    yield server
    assert server.close() == 0
