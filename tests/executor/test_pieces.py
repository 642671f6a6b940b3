"""`Executor.pieces` says where the KV of pages lies: what is copied there is what another row then attends to."""

import ctypes

import numpy as np
import pytest

from tests.executor.driver import Driver
from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.kv_ownership_check import KvMismatchError
from tokenyard.executor.mock import load_executor as load_mock

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the test reads the pool's memory itself")


def read(executor, pages):
    """Bytes of pages: [page][piece]."""
    found = executor.pieces(np.array(pages, dtype=np.int32))
    assert found.addresses.shape[0] == len(pages)
    return [[ctypes.string_at(int(address), found.nbytes) for address in row] for row in found.addresses]


def write(executor, pages, content):
    found = executor.pieces(np.array(pages, dtype=np.int32))
    for row, pieces in zip(found.addresses, content, strict=True):
        for address, piece in zip(row, pieces, strict=True):
            assert len(piece) == found.nbytes
            ctypes.memmove(int(address), piece, len(piece))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("impls", [("auto", "auto"), ("torch", "native"), ("native", "torch")])
def test_a_prefix_copied_to_another_executor_is_as_good_as_computed(make_driver, page_size, impls):
    prompt = prompt_of(30, seed=4)
    try:
        source, target = (
            make_driver("qwen2-window", page_size=page_size, model_impl=impl, attention_backend="auto")
            for impl in impls
        )
    except ConfigError as error:
        pytest.skip(error.message)
    owner = source.start(prompt)
    source.prefill(owner)
    copied = owner.pages[: 24 // page_size]
    guest_pages = target.pages[: len(copied)]
    del target.pages[: len(copied)]
    write(target.executor, guest_pages, read(source.executor, copied))
    guest = target.start(prompt)
    guest.pages, guest.planned = guest_pages, 24
    assert target.generate(guest, 5) == greedy("qwen2-window", prompt, 5)


def assert_copies_serve(executor):
    """A row that attends to copies of another row's pages answers the same."""
    driver, prompt = Driver(executor), prompt_of(30, seed=4)
    owner = driver.start(prompt)
    expected = driver.generate(owner, 5)
    size = executor.info.page_size
    guest = driver.start(prompt)
    guest.pages = [driver.pages.pop() for _ in range(24 // size)]
    write(executor, guest.pages, read(executor, owner.pages[: len(guest.pages)]))
    guest.planned = 24
    assert driver.generate(guest, 5) == expected


def test_pieces_cover_the_pool_once(make_driver):
    executor = make_driver("llama", page_size=4).executor
    found = executor.pieces(np.arange(executor.info.num_pages + 1, dtype=np.int32))
    begins = np.sort(found.addresses.ravel())
    assert begins[0] == executor.kv_pool.tensor.data_ptr()
    assert (np.diff(begins) == found.nbytes).all()
    assert begins[-1] + found.nbytes - begins[0] == executor.kv_pool.tensor.nbytes


def mock_driver(**options):
    return Driver(load_mock(vocab_size=199, page_size=4, max_total_tokens=256, max_pool_rows=4, step_ms=0.0, **options))


def test_the_mock_hands_its_marks_over():
    prompt = prompt_of(17, seed=5)
    source, target = mock_driver(check_kv=True), mock_driver(check_kv=True)
    owner = source.start(prompt)
    source.prefill(owner)
    guest = target.start(prompt)
    guest.pages, guest.planned = [target.pages.pop() for _ in range(4)], 16
    write(target.executor, guest.pages, read(source.executor, owner.pages[:4]))
    target.prefill(guest)
    assert guest.output == owner.output

    broken = target.start(prompt)
    broken.pages, broken.planned = [target.pages.pop() for _ in range(4)], 16
    write(target.executor, broken.pages, read(source.executor, owner.pages[1:4] + owner.pages[:1]))
    with pytest.raises(KvMismatchError):
        target.prefill(broken)


def test_a_mock_that_checks_nothing_has_no_pieces():
    executor = mock_driver(check_kv=False).executor
    assert executor.pieces(np.array([1, 2], dtype=np.int32)).addresses.shape == (2, 0)
