"""What it costs to store KV on disk and to load it, with gather, checksum and scatter, while the page cache has room.

A KV pool is laid out as the executors' are. Blocks of 64 tokens are gathered from pages and put into a slab, then got
and scattered to other pages, which lie as in a fresh pool (in runs) or as they fall after a while (scattered).

Run: python -m benchmarks.slab_store [--mib 512] [--dir DIR]
"""

import argparse
import statistics
import tempfile
import time

import numpy as np

from benchmarks.kv_transfer import Pool
from tokenyard.base.blocks import BLOCK_TOKENS, block_digests
from tokenyard.kv_layout.layout import PoolView, map_pages
from tokenyard.kv_store.slab import SlabStore
from tokenyard.kv_store.store import BlockFormat, block_buffer

REPEATS = 5
SHAPES = {
    "8B model, 32 layers, page 16": (32, 16, 16 * 1024 * 2),
    "SmolLM2-135M, 30 layers, page 16": (30, 16, 16 * 3 * 64 * 2),
    "SmolLM2-135M, 30 layers, page 1": (30, 1, 3 * 64 * 2),
}


def measure(shape: str, mib: float, scattered: bool, folder: str) -> None:
    """Print the median speed of put and get of a shape."""
    layers, page_size, piece_bytes = SHAPES[shape]
    per_block = BLOCK_TOKENS // page_size
    block_bytes = per_block * 2 * layers * piece_bytes
    blocks = max(1, round(mib * 2**20 / block_bytes))
    count = blocks * per_block
    pool = Pool(layers, piece_bytes, 2 * count + 2)
    view = PoolView(map_pages(pool.pieces), 2 * count + 1)
    pages = np.arange(1, 2 * count + 1, dtype=np.int32)
    if scattered:
        pages = np.random.default_rng(0).permutation(pages)
    source, target, buffer = pages[:count], pages[count:], block_buffer(block_bytes)
    digests = block_digests(np.arange(blocks * BLOCK_TOKENS, dtype=np.int32))
    form = BlockFormat("benchmark", "bfloat16", BLOCK_TOKENS, 2 * layers, block_bytes)
    store = SlabStore(folder, form, (blocks + 1) * (block_bytes + 4096))
    puts, gets = [], []
    for _ in range(REPEATS):
        store.clear()
        begin = time.perf_counter()
        for place, digest in enumerate(digests):
            view.gather(source[place * per_block :][:per_block], buffer)
            store.put(digest, buffer)
        puts.append(blocks * block_bytes / (time.perf_counter() - begin) / 1e9)
        begin = time.perf_counter()
        for place, digest in enumerate(digests):
            assert store.get(digest, buffer)
            view.scatter(buffer, per_block, 0, target[place * per_block :][:per_block])
        gets.append(blocks * block_bytes / (time.perf_counter() - begin) / 1e9)
    store.clear()
    store.close()
    where = "scattered" if scattered else "in runs"
    put, get = statistics.median(puts), statistics.median(gets)
    print(f"{shape:34} {where:9}  put {put:5.2f} GB/s  get {get:5.2f} GB/s  ({blocks} blocks of {block_bytes} bytes)")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=512.0)
    parser.add_argument("--dir", default=None, help="folder for the slabs; one for temporary files if absent")
    chosen = parser.parse_args()
    for shape in SHAPES:
        for scattered in (False, True):
            with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
                measure(shape, chosen.mib, scattered, folder)


if __name__ == "__main__":
    main()
