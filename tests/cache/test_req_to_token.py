import numpy as np
import pytest

from tokenyard.cache import OutOfRows, ReqToTokenPool


@pytest.mark.parametrize(
    ("context_length", "page_size", "columns"), [(100, 1, 101), (15, 16, 1), (16, 16, 2), (127, 16, 8)]
)
def test_shapes_leave_room_for_the_last_sampled_token(context_length, page_size, columns):
    pool = ReqToTokenPool(3, context_length, page_size)
    assert pool.page_table.shape == (3, columns)
    assert pool.token_ids.shape == (3, context_length + 1)
    assert pool.page_table.dtype == pool.token_ids.dtype == np.int32


def test_rows_are_given_out_once_each():
    pool = ReqToTokenPool(3, 8, 1)
    assert sorted(pool.alloc_row() for _ in range(3)) == [0, 1, 2]
    assert pool.available_rows == 0
    with pytest.raises(OutOfRows, match="all 3 rows"):
        pool.alloc_row()
    pool.free_row(1)
    assert pool.available_rows == 1
    assert pool.alloc_row() == 1


@pytest.mark.parametrize("row", [-1, 1, 3])
def test_freeing_a_row_that_is_not_held_raises(row):
    pool = ReqToTokenPool(3, 8, 1)
    assert pool.alloc_row() == 0
    with pytest.raises(ValueError, match="not taken"):
        pool.free_row(row)
    assert pool.available_rows == 2


def test_clear_makes_every_row_free():
    pool = ReqToTokenPool(2, 8, 1)
    pool.alloc_row()
    pool.clear()
    assert pool.available_rows == 2
    with pytest.raises(ValueError, match="not taken"):
        pool.free_row(0)


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ReqToTokenPool(0, 8, 1)
