import pytest

from tests.executor.tiny_models import saver


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """From a case to the folder of its tiny model."""
    return saver(tmp_path_factory)
