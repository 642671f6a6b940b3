"""The kernel before a captured step against torch: page writes, tokens that only the device knows, padding."""

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.plan_kernel import LANES, prepare_by_triton  # noqa: E402
from tokenyard.executor.forward_batch import PageTable  # noqa: E402
from tokenyard.executor.future_map import FutureMap  # noqa: E402
from tokenyard.executor.plan_inputs import UploadedPlan, prepare_by_torch  # noqa: E402


@pytest.mark.parametrize(("rows", "size", "writes"), [(1, 1, 0), (3, 4, 3), (5, 8, 1), (LANES + 9, LANES + 20, 300)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("windows", [False, True])
def test_inputs_are_those_of_torch(rows, size, writes, page_size, windows):
    draw, device, most = np.random.default_rng(rows), torch.device(DEVICE), rows + 4
    pool_rows, positions = draw.permutation(most)[:rows], draw.integers(0, 64, rows)
    tokens = np.where(draw.random(rows) < 0.5, -1, draw.integers(0, 1000, rows))
    places = draw.permutation(most * (64 // page_size))[:writes]
    # The pages that rows write their tokens to are among those that the plan brings.
    own = (pool_rows * (64 // page_size) + positions // page_size)[: len(places)]
    places = np.unique(np.concatenate([own, places[len(own) :]]))
    page_ids = [draw.integers(1, 9999, len(places)) for _ in range(1 + windows)]
    block = np.concatenate([tokens, positions, pool_rows, *divmod(places, 64 // page_size), *page_ids])
    plan = UploadedPlan(torch.from_numpy(block).to(device), rows, len(places))
    table = torch.from_numpy(draw.integers(1, 9999, (2, most, 64 // page_size))).to(device, torch.int32)
    found = []
    for prepare in (prepare_by_triton, prepare_by_torch):
        pages, future = PageTable(most, 64, page_size, device, windows=windows), FutureMap(most, device)
        future.last_tokens.copy_(torch.arange(5000, 5001 + most))
        pages.tensor.copy_(table[0])
        tables = [pages.tensor]
        if pages.windows is not None:
            pages.windows.tensor.copy_(table[1])
            tables.append(pages.windows.tensor)
        columns = torch.full((5, size + 3), -7, dtype=torch.int64, device=device)
        prepare(plan, columns[:, :size], pages, future)
        found.append([columns, *tables])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
