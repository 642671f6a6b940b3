"""From the blocks of a GGUF tensor to numbers, a slice of rows at a time, in threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

SLICE_WEIGHTS = 1 << 18
"""What a thread makes at a time: the float32 numbers in between stay in its cache."""

Q8_0_WEIGHTS = 32


def dequantized(data: npt.NDArray[np.generic], kind: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `data` ([..., bytes of a row] of a quantized kind, else numbers), rounded to `dtype`.

    kind: of gguf.GGMLQuantizationType. Raises NotImplementedError, ValueError or KeyError for a kind that the gguf
    package cannot read.
    """
    from gguf import GGMLQuantizationType, quant_shape_from_byte_shape

    kind = GGMLQuantizationType(kind)
    quantized = data.dtype == np.uint8
    shape = quant_shape_from_byte_shape(data.shape, kind) if quantized else data.shape
    out = torch.empty(shape, dtype=dtype)
    rows, target = data.reshape(-1, data.shape[-1]), out.view(-1, shape[-1])
    step = max(SLICE_WEIGHTS // shape[-1], 1)

    @torch.inference_mode()
    def fill(first: int) -> None:
        _fill(target[first : first + step], rows[first : first + step], kind)

    if len(rows) <= step:
        fill(0)
        return out
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # The list raises what a thread raised.
        list(pool.map(fill, range(0, len(rows), step)))
    return out


def _fill(out: torch.Tensor, data: npt.NDArray[np.generic], kind: int) -> None:
    """Write the numbers of rows of blocks to `out`, [rows, weights]."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(kind)
    if kind != GGMLQuantizationType.Q8_0:
        # A copy, as numbers that need no dequantizing are still those of the file, which are read-only.
        out.copy_(torch.from_numpy(np.array(dequantize(data, kind))))
        return
    # A float16 scale, then 32 signed bytes.
    blocks = np.asarray(data).reshape(-1, 2 + Q8_0_WEIGHTS)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    out.view(-1, Q8_0_WEIGHTS).copy_(torch.from_numpy(blocks[:, 2:].view(np.int8) * scales))
