"""What a step of decodes over a mixture of experts costs beside the bytes of the experts that it touches.

One layer of experts with drawn weights, as many rows as a batch has tokens. A batch's floor is what reading the weights
of the experts it chose takes at the speed at which one product reads: a row times all of them, laid out as one matrix
of the same bytes, measured in turns with the layer.

Run: python benchmarks/experts_step.py [--hidden 1024 --inter 384 --experts 64 --active 8] [--dtype bfloat16]
"""

import argparse
import time

import torch

from tokenyard.executor.layers.linear import Linear
from tokenyard.executor.layers.mlp import Experts, GatedMlp

BATCHES = (1, 2, 4, 8, 16, 32)


def drawn(dtype, *shape):
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)


def best_s(calls, repeats):
    """Best seconds of each call; calls take turns, so that all meet the same machine."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for place, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - begin)
    return best


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("hidden", 1024), ("inter", 384), ("experts", 64), ("active", 8), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, hidden, inter = getattr(torch, options.dtype), options.hidden, options.inter
    each = [
        GatedMlp(Linear(drawn(dtype, 2 * inter, hidden)), Linear(drawn(dtype, hidden, inter)))
        for _ in range(options.experts)
    ]
    router = Linear(drawn(dtype, options.experts, hidden))
    layer = Experts(router, each, options.active, normed=True)
    one = 3 * inter * hidden * dtype.itemsize
    print(f"{options.experts} experts of {one / 1e6:.2f} MB, {options.active} a token, {options.dtype}, one thread")
    print("batch  experts    MB   layer ms   reading ms   ratio")
    for batch in BATCHES:
        x = drawn(dtype, batch, hidden)
        touched = int(router(x).float().topk(options.active).indices.unique().numel())
        # Each repeat reads other memory than the one before, as the layers of a model do.
        whole = Linear(drawn(dtype, touched * 3 * inter, hidden))
        row = x[:1].contiguous()
        layer_s, read_s = best_s((lambda x=x: layer(x), lambda whole=whole, row=row: whole(row)), options.repeats)
        print(
            f"{batch:5} {touched:8} {touched * one / 1e6:5.0f} {layer_s * 1e3:10.2f} {read_s * 1e3:12.2f}"
            f" {layer_s / read_s:7.2f}"
        )


if __name__ == "__main__":
    main()
