"""Where the tests of Triton kernels run: in Triton's interpreter on the CPU, or on the device that is named."""

import pytest
import torch

from tests.executor.tiny_models import DEVICE
from tokenyard.executor.attention.triton.available import why_not

MISSING = why_not(torch.device(DEVICE), 64)


def need_triton():
    """Skip the module that calls this where no Triton kernel can run."""
    if MISSING:
        pytest.skip(f"{MISSING}; make test-triton runs these", allow_module_level=True)
