"""Every kernel as the JIT makes it for a device, through ptxas: it fits shared memory, and threads spill nothing.

No GPU is needed: Triton's launcher binds the arguments, and its wheel has ptxas.
"""

import re
from itertools import product

import pytest
import torch

from tests.executor.triton_launches import SHARED_LIMITS, columns, need_compiler, pretended_launches

need_compiler()

from tokenyard.executor.attention.backend import KvSlots  # noqa: E402
from tokenyard.executor.attention.triton import attention_kernel as attention  # noqa: E402
from tokenyard.executor.attention.triton import layer_kernels as layers  # noqa: E402
from tokenyard.executor.attention.triton.backend import FEW_QUERIES, FEW_SPLITS  # noqa: E402
from tokenyard.executor.attention.triton.expert_kernels import FEW, PackedExperts, multiply_groups  # noqa: E402
from tokenyard.executor.attention.triton.fp8_kernels import quantize_rows  # noqa: E402
from tokenyard.executor.attention.triton.lora_kernels import add_lora, output_tiles  # noqa: E402
from tokenyard.executor.attention.triton.packed_kv import store_packed  # noqa: E402
from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton  # noqa: E402
from tokenyard.executor.attention.triton.sampling_kernels import TritonSamplingBackend  # noqa: E402
from tokenyard.executor.forward_batch import PageTable  # noqa: E402
from tokenyard.executor.future_map import FutureMap  # noqa: E402
from tokenyard.executor.kv_pool import KV_BYTES, SCALE_BYTES  # noqa: E402
from tokenyard.executor.plan_inputs import UploadedPlan  # noqa: E402
from tokenyard.executor.sampling.sampling_batch import SamplingRows  # noqa: E402
from tokenyard.executor.sampling.top_k_top_p import SamplingInputs  # noqa: E402

MAX_SPILLS = 64
"""Bytes of a thread; some registers of long blocks are spilled outside the loop over keys."""

CASES = [
    (80, "bfloat16", 32, 8, 128, 0),
    (86, "float16", 14, 2, 64, 24),
    (89, "float32", 8, 4, 256, 0),
    (90, "bfloat16", 32, 8, 128, 0),
    (90, "float32", 3, 1, 40, 24),
    (100, "bfloat16", 8, 4, 256, 4096),
    (120, "bfloat16", 64, 8, 64, 128),
]
ALL = [
    (capability, dtype, group * 2, 2, head_dim, window)
    for capability, dtype, group, head_dim, window in product(
        SHARED_LIMITS, ("bfloat16", "float16", "float32"), (1, 4, 7, 16), (40, 64, 80, 128, 256), (0, 4096)
    )
]


def stages(capability):
    """What decode_stages answers on the device."""
    little = divmod(capability, 10) in attention.LITTLE_SHARED_MEMORY
    assert little == (SHARED_LIMITS[capability] < 100)
    return attention.CHUNK_STAGES if little else attention.DECODE_STAGES


BYTES = [
    (80, "bfloat16", "int8", 32, 8, 128),
    (86, "float16", "fp8_e5m2", 14, 2, 64),
    (89, "float16", "fp8_e4m3", 8, 4, 256),
    (90, "bfloat16", "fp8_e4m3", 32, 8, 128),
    (90, "bfloat16", "int8", 8, 1, 64),
    (100, "bfloat16", "fp8_e4m3", 32, 8, 128),
    (120, "bfloat16", "fp8_e5m2", 8, 4, 256),
]
"""Pools of bytes."""


def attend(capability, dtype, heads, kv_heads, head_dim, window, kind=None):
    """Launch what steps launch: decodes, a few queries, long blocks. Windows come with a soft cap and sinks."""
    dtype, group = getattr(torch, dtype), heads // kv_heads
    q, pool = torch.zeros(6, heads, head_dim, dtype=dtype), pool_of(kv_heads, head_dim, dtype, kind)
    sinks = torch.zeros(heads) if window else None
    layer = attention.AttentionInputs(q, pool[0], pool[1], window, 0.1, 2.0 if window else 0.0, sinks, kind)
    positions, pool_rows, tokens, counts = columns(4, 6)
    table, room = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(64)
    long = attention.block_size(group, dtype)
    few = min(FEW_QUERIES, long)
    for size, splits in {1: attention.SPLITS, few: FEW_SPLITS, long: 1}.items():
        scratch = attention.SplitScratch(tokens, counts, room, room)
        own = () if splits == 1 else (stages(capability), scratch)
        blocks = attention.QueryBlocks(tokens, counts, size, splits, *own)
        attention.attend(blocks, layer, table, 16, positions, pool_rows, torch.empty_like(q))


def pool_of(kv_heads, head_dim, dtype, kind):
    """A layer's keys and values; see KvPool."""
    if kind is None:
        return torch.zeros(2, 64, kv_heads, head_dim, dtype=dtype)
    return torch.zeros(2, 64, kv_heads, head_dim + SCALE_BYTES, dtype=torch.uint8)


def check(binaries, capability):
    for each in binaries:
        assert each.shared <= SHARED_LIMITS[capability] << 10, each[:4]
        assert each.spills <= MAX_SPILLS, each[:4]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in ALL)], ids=str)
def test_attention_fits_devices(case):
    capability, dtype, _, _, head_dim, _ = case
    with pretended_launches(capability, compiled=True) as launches:
        attend(*case)
    check(launches.binaries, capability)
    decode = launches.binaries[0]
    assert decode.name == "attention_kernel.attend_kernel"
    # Keys and values come asynchronously, and two tiles of each are there at once where the device has the room.
    assert "cp.async" in decode.ptx
    if stages(capability) == attention.DECODE_STAGES and dtype != "float32" and head_dim in (64, 128, 256):
        tile = attention.key_tile(head_dim, getattr(torch, dtype)) * head_dim * 2
        assert decode.shared >= 4 * tile


@pytest.mark.parametrize("case", BYTES, ids=str)
def test_attention_over_bytes_fits_devices(case):
    capability, dtype, name, heads, kv_heads, head_dim = case
    kind, slots = KV_BYTES[name], columns(1, 6)[0]
    pool = pool_of(kv_heads, head_dim, getattr(torch, dtype), kind)
    qkv = torch.zeros(6, heads + 2 * kv_heads, head_dim, dtype=getattr(torch, dtype))
    with pretended_launches(capability, compiled=True) as launches:
        attend(capability, dtype, heads, kv_heads, head_dim, 0, kind)
        layers.rotate_and_store(qkv, torch.zeros(6, 2, 1, head_dim // 2), KvSlots(slots, *pool, kind), None, 1e-5)
        store_packed(*pool, slots, kind, qkv[:, :kv_heads], qkv[:, :kv_heads])
    check(launches.binaries, capability)
    # Four bytes at a time, as heads lie on multiples of four.
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x(\w+), %", launches.binaries[0].ptx)
    assert copies
    assert min(int(size, 16) for size in copies) >= 4


@pytest.mark.parametrize(("capability", "dtype"), [(90, "bfloat16"), (89, "float16"), (120, "float32")])
def test_the_other_kernels_fit_devices(capability, dtype):
    dtype, (slots, rows, positions, pool_rows) = getattr(torch, dtype), columns(4, 6)
    x, weight = torch.zeros(6, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    qkv, pool = torch.zeros(6, 48, 128, dtype=dtype), torch.zeros(2, 64, 8, 128, dtype=dtype)
    cos_sin, norms = torch.zeros(6, 2, 1, 64), torch.zeros(40, 128, dtype=dtype)
    kernels, logits = TritonSamplingBackend(), torch.zeros(6, 128256)
    kept = SamplingRows(8, 128256, (), torch.device("cpu"))
    with pretended_launches(capability, compiled=True) as launches:
        layers.norm(x, weight, 1e-5)
        layers.add_norm(x, x, weight, 1e-5)
        layers.silu_gate(*torch.zeros(6, 28672, dtype=dtype).chunk(2, dim=-1))
        for block in (128, 4096):
            quantize_rows(x, block)
        layers.rotate_and_store(qkv, cos_sin, KvSlots(slots, pool[0], pool[1]), norms, 1e-5)
        kernels.draw(logits, SamplingInputs(rows, pool_rows, positions, kernels.likeliest(logits), kept))
        a, b = torch.zeros(2, 3, 16, 4096, dtype=dtype), torch.zeros(2, 16, 6144, dtype=dtype)
        out, tiles = torch.zeros(6, 6144, dtype=dtype), output_tiles((4096, 1024, 1024), torch.device("cpu"))
        add_lora(out, x, a, b, torch.zeros(6, dtype=torch.int64), tiles)
        # Of any number of rows and writes the same binary.
        pages, future = PageTable(8, 64, 16, torch.device("cpu")), FutureMap(8, torch.device("cpu"))
        for count, writes in ((1, 0), (6, 1), (16, 32)):
            plan = UploadedPlan(torch.zeros(3 * count + 3 * writes, dtype=torch.int64), count, writes)
            prepare_by_triton(plan, torch.zeros(5, 64, dtype=torch.int64)[:, :count], pages, future)
    check(launches.binaries, capability)
    assert len(launches.binaries) == 12


def experts_of(kind, capability):
    """Weights of gpt-oss-20b (mxfp4), and others of Qwen3-30B-A3B's shape."""
    if kind == "mxfp4":
        numbers = torch.zeros(32, 128, 90, 16, dtype=torch.uint8)
        return PackedExperts(numbers, numbers[..., 0].contiguous())
    scales = torch.zeros(128, 128, 16)
    if kind == "int4":
        return PackedExperts(torch.zeros(128, 128, 16, 64, dtype=torch.uint8), scales, scales.to(torch.uint8))
    numbers = torch.zeros(128, 128, 16, 128, dtype=torch.uint8)
    if kind == "int8":
        return PackedExperts(numbers, scales, None, torch.int8)
    return PackedExperts(numbers, scales, None, torch.float8_e4m3fn, convert=capability >= 89)


EXPERTS = [*(("mxfp4", capability) for capability in SHARED_LIMITS), ("int4", 86), ("fp8", 80), ("fp8", 90)]
OTHER_EXPERTS = [one for one in product(("int4", "fp8", "int8"), SHARED_LIMITS) if one not in EXPERTS]


@pytest.mark.parametrize(
    ("kind", "capability"), [*EXPERTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHER_EXPERTS)]
)
def test_packed_experts_fit_devices(kind, capability):
    """For a few rows and for many; packed experts are multiplied in bfloat16 alone."""
    weights = experts_of(kind, capability)
    experts, outputs, groups = weights.scales.shape
    bias = torch.zeros(experts, outputs, dtype=torch.bfloat16) if kind == "mxfp4" else None
    with pretended_launches(capability, compiled=True) as launches:
        for rows in (6, FEW + 1):
            inputs = torch.zeros(rows, groups * weights.group, dtype=torch.bfloat16)
            multiply_groups(inputs, weights, bias, torch.zeros(experts, dtype=torch.int32))
    check(launches.binaries, capability)
    assert len(launches.binaries) == 2
    for each in launches.binaries:
        assert "mma" in each.ptx
        # A device that converts fp8 is not given its bits one by one.
        assert ("e4m3" in each.ptx) == (kind == "fp8" and capability >= 89)
