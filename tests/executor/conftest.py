import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import DEVICE, saver
from tokenyard.executor.load import load_executor


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """From a case to the folder of its tiny model."""
    return saver(tmp_path_factory)


@pytest.fixture
def make_driver(folder):
    """Make a driver over a tiny model in float32."""

    def make(case="llama", *, page_size=1, max_total_tokens=1024, max_pool_rows=8, **options):
        executor = load_executor(
            folder(case),
            device=DEVICE,
            dtype="float32",
            page_size=page_size,
            max_total_tokens=max_total_tokens,
            max_pool_rows=max_pool_rows,
            **options,
        )
        return Driver(executor)

    return make
