"""Every kernel compiles for an NVIDIA GPU, which needs no GPU: types and shapes that the interpreter lets pass."""

import os
import subprocess
import sys

import pytest

from tests.executor.triton_available import need_triton

need_triton()

COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenyard.executor.attention.triton import attention_kernel as attend
from tokenyard.executor.attention.triton import sampling_kernels as draw
from tokenyard.executor.attention.triton import layer_kernels as layers
from tokenyard.executor.sampling.top_k_top_p import Draws
from tokenyard.executor.sampling.sampling_batch import SamplingRows

class Caught(Exception):
    pass

def types(kernel, args, constants):
    names = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    names |= {torch.int64: "*i64", torch.int32: "*i32"}
    found = {}
    for name, value in zip(kernel.arg_names, args):
        if isinstance(value, torch.Tensor):
            found[name] = names[value.dtype]
        else:
            found[name] = "fp32" if isinstance(value, float) else "i32"
    return {**found, **{name: "constexpr" for name in constants}}

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **constants):
            source = ASTSource(self.kernel, types(self.kernel, args, constants), constants)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
            assert made.metadata.shared <= 227 * 1024, (self.kernel, made.metadata.shared)
            print(self.kernel.fn.__name__, made.metadata.shared, flush=True)
        return launch

for module in (attend, draw, layers):
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel"):
            setattr(module, name, Compiled(value))

dtype = getattr(torch, sys.argv[1])
heads, kv_heads, head_dim, window = map(int, sys.argv[2:])
q = torch.zeros(6, heads, head_dim, dtype=dtype)
keys = torch.zeros(9, kv_heads, head_dim, dtype=dtype)
sinks = torch.zeros(heads) if window else None
layer = attend.Layer(q, keys, keys, window, 0.1, 2.0 if window else 0.0, sinks)
long, table, out = torch.zeros(6, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int32), torch.empty_like(q)
scratch = torch.zeros(9)
for size, splits in ((1, attend.SPLITS), (5, 4), (attend.block_size(heads // kv_heads), 1)):
    attend.attend(attend.Blocks(long, long, size, splits, scratch, scratch), layer, table, 16, long, long, out)
x, weight = torch.zeros(6, 1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
layers.norm(x, weight, 1e-5)
layers.add_norm(x, x, weight, 1e-5)
layers.silu_gate(x, x)
qkv = torch.zeros(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
cos_sin, weight = torch.zeros(6, 2, 1, head_dim // 2), qkv[0, kv_heads:].contiguous()
layers.rotate_and_store(qkv, cos_sin, long, keys, keys, weight, 1e-5)
drawer, logits = draw.TritonSamplingBackend(), torch.zeros(6, 50000)
drawer.draw(logits, Draws(long, long, long, drawer.likeliest(logits), SamplingRows(8, 50000, (), torch.device("cpu"))))
"""


@pytest.mark.parametrize(
    "arguments",
    ["bfloat16 32 8 128 0", "float16 14 2 64 24", "float32 3 1 40 24", "bfloat16 8 4 256 4096"],
)
def test_kernels_compile_for_a_gpu(arguments):
    pytest.importorskip("triton.backends.nvidia.compiler")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, *arguments.split()]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(ran.stdout.splitlines()) == 12, ran.stdout
