import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.packed_models import packed_saver
from tests.executor.tiny_models import DEVICE, saver
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import NoLibraryError, load_library


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """From a case to the folder of its tiny model."""
    return saver(tmp_path_factory)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """From a model and a kind to a file or folder with packed matrices and a folder of the numbers that they mean."""
    return packed_saver(tmp_path_factory)


BACKENDS = {
    "gather": {"model_impl": "torch", "attention_backend": "gather"},
    "attention": {"model_impl": "torch", "attention_backend": "native"},
    "native": {"model_impl": "native", "attention_backend": "auto"},
}
"""Options of load_executor that choose how a step is computed."""


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Options of one way to compute a step after the other, for tests of what all must do."""
    if request.param != "gather":
        if DEVICE != "cpu":
            pytest.skip("native kernels are for the CPU")
        try:
            load_library()
        except NoLibraryError as error:
            pytest.skip(f"no native library: {error}")
    return BACKENDS[request.param]


@pytest.fixture
def make_driver(folder):
    """Make a driver over a tiny model in float32, computed by torch by default."""

    def make(case="llama", *, page_size=1, max_total_tokens=1024, max_pool_rows=8, **options):
        executor = load_executor(
            folder(case),
            **{**BACKENDS["gather"], **options},
            device=DEVICE,
            dtype="float32",
            page_size=page_size,
            max_total_tokens=max_total_tokens,
            max_pool_rows=max_pool_rows,
        )
        return Driver(executor)

    return make
