"""What a step of decodes over a mixture of experts costs, compared with reading the bytes of the experts that it uses.

One layer of experts with drawn weights, as many rows as a batch has tokens, by the native kernels and by torch. The
floor of a batch is what reading the weights of the experts it chose takes at the speed at which one product reads: a
row times all of them, laid out as one matrix of the same bytes, by the native kernels and by torch, of which the
faster counts. All take turns, and each finds other memory in the caches than its own.

Run: python -m benchmarks.experts_step [--threads 1 2] [--hidden 1024 --inter 384 --experts 64 --active 8]
"""

import argparse
import time

import torch

from tokenyard.executor.layers.linear import Linear
from tokenyard.executor.layers.mlp import GatedMlp, SparseMoe
from tokenyard.executor.models.config import ModelConfig, MoeConfig, RopeConfig
from tokenyard.executor.native.library import load_library
from tokenyard.executor.native.moe import NativeMoe
from tokenyard.executor.native.runtime import NativeRuntime

BATCHES = (1, 2, 4, 8, 16, 32)


class DrawnWeights:
    """Weights of a layer, drawn once; see Weights."""

    def __init__(self, dtype):
        self._dtype, self._drawn = dtype, {}

    def get(self, name, shape):
        """The tensor of a name: [outputs, inputs]."""
        if name not in self._drawn:
            self._drawn[name] = (torch.randn(*shape) * shape[-1] ** -0.5).to(self._dtype)
        return self._drawn[name]


def best_s(calls, repeats):
    """Best seconds of each call; calls take turns, so that all meet the same machine."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for place, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - begin)
    return best


def config_of(options):
    """A model of one layer of experts."""
    experts = MoeConfig(options.experts, options.active, options.inter, normed=True, layers=frozenset({0}))
    return ModelConfig(
        *("", 1, options.hidden, options.inter, 1, 1, 1, 64, 1e-6, 64),
        rope=RopeConfig(),
        windows=(0,),
        experts=experts,
    )


def torch_layer(config, weights):
    """The same layer by torch, and its router."""
    hidden, inter, prefix = config.hidden_size, config.experts.intermediate_size, "model.layers.0.mlp"

    def product(name, outputs, inputs):
        return weights.get(f"{prefix}.{name}.weight", (outputs, inputs))

    each = []
    for expert in range(config.experts.count):
        gate, up = (product(f"experts.{expert}.{name}_proj", inter, hidden) for name in ("gate", "up"))
        down = product(f"experts.{expert}.down_proj", hidden, inter)
        each.append(GatedMlp(Linear(torch.cat((gate, up))), Linear(down)))
    router = Linear(product("gate", config.experts.count, hidden))
    return SparseMoe(router, each, config.experts.active, normed=True), router


def reading(engine, config, dtype, touched):
    """A native product over as many bytes as those experts have: one expert that is always chosen."""
    one = MoeConfig(1, 1, touched * config.experts.intermediate_size, normed=True, layers=frozenset({0}))
    fields = {name: getattr(config, name) for name in ModelConfig.__slots__} | {"experts": one}
    return NativeMoe(engine, dtype, ModelConfig(**fields), DrawnWeights(dtype), 0)


def measure(config, dtype, threads, weights, layer, router, repeats):
    """Print one line for each batch."""
    torch.set_num_threads(threads)
    engine = NativeRuntime(load_library(), threads)
    native = NativeMoe(engine, dtype, config, weights, 0)
    one = 3 * config.experts.intermediate_size * config.hidden_size * dtype.itemsize
    print(f"{config.experts.count} experts of {one / 1e6:.2f} MB, {config.experts.active} a token, {dtype}", end="")
    print(f", {threads} thread{'s' if threads > 1 else ''}, {engine.name}")
    print("batch  experts    MB  native ms  torch ms  reading ms   GB/s  native ratio  torch ratio")
    for batch in BATCHES:
        x = (torch.randn(batch, config.hidden_size)).to(dtype)
        touched = int(router(x).float().topk(config.experts.active).indices.unique().numel())
        row = x[:1].contiguous()
        whole = Linear(torch.randn(touched * one // dtype.itemsize // config.hidden_size, config.hidden_size).to(dtype))
        own = reading(engine, config, dtype, touched)
        native_s, torch_s, *reads_s = best_s(
            (
                lambda x=x: native(x),
                lambda x=x: layer(x),
                lambda own=own, row=row: own(row),
                lambda whole=whole, row=row: whole(row),
            ),
            repeats,
        )
        read_s, size = min(reads_s), touched * one
        print(
            f"{batch:5} {touched:8} {size / 1e6:5.0f} {native_s * 1e3:10.2f} {torch_s * 1e3:9.2f} {read_s * 1e3:11.2f}"
            f" {size / read_s / 1e9:6.1f} {native_s / read_s:13.2f} {torch_s / read_s:12.2f}",
            flush=True,
        )


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("hidden", 1024), ("inter", 384), ("experts", 64), ("active", 8), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype, config = getattr(torch, options.dtype), config_of(options)
    weights = DrawnWeights(dtype)
    layer, router = torch_layer(config, weights)
    for threads in options.threads:
        measure(config, dtype, threads, weights, layer, router, options.repeats)


if __name__ == "__main__":
    main()
