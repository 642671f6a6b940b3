import numpy as np
import pytest

from tokenyard.cache import OutOfPages, PageAllocator


def test_hands_out_every_page_once_and_never_page_zero():
    allocator = PageAllocator(10)
    pages = np.concatenate((allocator.alloc(3), allocator.alloc(0), allocator.alloc(7)))
    assert pages.dtype == np.int32
    assert sorted(pages) == list(range(1, 11))
    assert allocator.available == 0


def test_too_many_pages_raise_and_take_nothing():
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(OutOfPages, match="4 pages requested, 3 of 4 free"):
        allocator.alloc(4)
    assert allocator.available == 3
    assert len(allocator.alloc(3)) == 3


def test_pages_are_the_callers_own_copy():
    allocator = PageAllocator(4)
    first = allocator.alloc(2)
    kept = first.copy()
    allocator.free(first)
    first[:] = 99
    assert sorted(allocator.alloc(4)) == [1, 2, 3, 4]
    assert sorted(kept) == [1, 2]


def test_freed_pages_come_back_in_the_order_in_which_they_were_held():
    allocator = PageAllocator(8)
    pages = allocator.alloc(5)
    allocator.free(pages)
    np.testing.assert_array_equal(allocator.alloc(5), pages)


def test_freeing_more_than_there_is_raises():
    allocator = PageAllocator(3)
    allocator.alloc(1)
    with pytest.raises(ValueError, match="2 pages freed while 2 of 3 are free"):
        allocator.free(np.array([1, 1], np.int32))


def test_check_finds_double_and_foreign_pages():
    allocator = PageAllocator(4)
    allocator.alloc(4)
    allocator.check()
    allocator.free(np.array([2, 2], np.int32))
    with pytest.raises(AssertionError, match=r"more than once: \[2\]"):
        allocator.check()
    allocator.clear()
    allocator.check()
    allocator.alloc(2)
    allocator.free(np.array([0, 5], np.int32))
    with pytest.raises(AssertionError, match=r"outside 1..4"):
        allocator.check()


def test_clear_makes_everything_free():
    allocator = PageAllocator(4)
    allocator.alloc(3)
    allocator.clear()
    assert allocator.available == 4
    np.testing.assert_array_equal(allocator.alloc(4), [1, 2, 3, 4])


def test_a_pool_without_pages():
    allocator = PageAllocator(0)
    allocator.check()
    assert len(allocator.alloc(0)) == 0
    with pytest.raises(OutOfPages):
        allocator.alloc(1)
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(-1)
