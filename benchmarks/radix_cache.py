"""Time the prefix tree on a fixed workload, next to SGLang's figures for the same one.

    python benchmarks/radix_cache.py [--page-size 1] [--sequences 1000,20000] [--eviction-policy lru]

The workload: eight system prompts of 256 tokens; conversations of four turns of 192 tokens below them, inserted turn
by turn until the tree has seen the asked number of sequences; twelve probes each of 512, 4096 and 32768 tokens,
inserted in four steps. Every operation is timed alone, as CPU time of the thread (the timer's own cost, printed first,
is part of every figure), with the garbage collector off and keys made beforehand in new memory. A match gives a handle;
its page ids are a separate row. `evict` includes giving the pages back to the allocator.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.cache import PageAllocator, RadixCache, TreeNode, make_key

LENGTHS = (512, 4096, 32768)
PROBES = 12
SYSTEM_TOKENS = 256
TURN_TOKENS = 192
TURNS = 4

# CPU microseconds, min / median, of SGLang's own code on this workload, page size 1, on two shared cores of an AMD EPYC
# under KVM, each on one pinned core with Python 3.11: 0.5.7 is RadixCache and its allocator in Python, as published;
# 0.5.23 is the Rust core of its tree, called through its Python binding without the adapter around it.
SGLANG_0_5_7: dict[str, dict[int, tuple[str, ...]]] = {
    "match hit": {1000: ("18.2 / 19.5", "110 / 115", "819 / 860"), 20000: ("17.5 / 18.4", "103 / 107", "794 / 823")},
    "match system only": {
        1000: ("8.8 / 9.5", "16.4 / 17.5", "75.6 / 82.1"),
        20000: ("8.7 / 9.1", "14.7 / 16.4", "76.6 / 80.0"),
    },
    "match cold": {1000: ("2.9 / 3.3", "2.9 / 3.5", "3.0 / 3.9"), 20000: ("2.8 / 3.1", "2.9 / 3.1", "2.9 / 3.8")},
    "match with split": {
        1000: ("22.9 / 27.2", "84.6 / 90.1", "591 / 606"),
        20000: ("22.3 / 24.9", "82.5 / 85.9", "614 / 626"),
    },
    "insert duplicate": {
        1000: ("21.3 / 22.0", "110 / 114", "805 / 838"),
        20000: ("20.8 / 21.4", "104 / 108", "818 / 844"),
    },
    "insert new tail": {
        1000: ("10.3 / 11.3", "17.0 / 18.8", "170 / 205"),
        20000: ("9.7 / 10.8", "18.1 / 20.3", "75 / 171"),
    },
    "lock + unlock": {1000: ("5.5 / 7.9", "6.7 / 7.4", "5.7 / 8.0"), 20000: ("7.7 / 9.5", "6.6 / 6.9", "6.1 / 8.0")},
    "evict": {
        1000: ("156 / 179", "169 / 174", "965 / 1728"),
        20000: ("12216 / 14074", "12065 / 12809", "12472 / 15830"),
    },
}
SGLANG_0_5_23: dict[str, dict[int, tuple[str, ...]]] = {
    "match hit": {1000: ("2.8 / 3.7", "3.9 / 4.6", "14.8 / 23.0"), 20000: ("2.9 / 4.3", "5.1 / 7.1", "24.5 / 31.4")},
    "match system only": {20000: ("1.5 / 1.7", "2.1 / 2.4", "8.1 / 9.6")},
    "insert duplicate": {20000: ("14.6 / 16.2", "15.6 / 17.7", "40.3 / 49.8")},
    "insert new tail": {20000: ("9.0 / 10.1", "10.9 / 33.5", "214 / 235")},
    "make key from a list": {20000: ("5.7 / 5.9", "42.6 / 43.7", "342 / 347")},
}
EVICT_PAGES = ((1, 15), (256, 15), (16384, 8))
EVICT_FREE_TOKENS = 2048


def ids(seed: int, count: int) -> Int32Array:
    """The token ids that a seed stands for."""
    return np.random.default_rng(seed).integers(1000, 128000, count).astype(np.int32)


def system_prompt(number: int) -> Int32Array:
    return ids(10_000_000 + number % 8, SYSTEM_TOKENS)


def conversation(number: int) -> Int32Array:
    return np.concatenate((system_prompt(number), ids(20_000_000 + number, TURNS * TURN_TOKENS)))


def probe(length: int, number: int) -> Int32Array:
    return np.concatenate((system_prompt(number), ids(30_000_000 + 100 * length + number, length - SYSTEM_TOKENS)))


def system_and(seed: int, length: int, number: int) -> Int32Array:
    return np.concatenate((system_prompt(number), ids(seed + number + length, length - SYSTEM_TOKENS)))


def half_probe(length: int, number: int) -> Int32Array:
    """The front of a probe, ending inside one of its runs, and something else."""
    shared = SYSTEM_TOKENS + 5 * (length - SYSTEM_TOKENS) // 8
    return np.concatenate((probe(length, number)[:shared], ids(63_000_000 + number + length, 3 * length // 8)))


class Bench:
    """A tree, the pages behind it, and a stopwatch."""

    def __init__(self, sequences: int, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.tree = RadixCache(page_size, policy)
        self.allocator = PageAllocator((400 * sequences + 8_000_000) // page_size)
        self._fill(sequences)

    def insert(self, tokens: Int32Array) -> None:
        """Put a prompt into the tree, to whole pages."""
        key, pages = self.with_pages(tokens)
        present = self.tree.insert(key, pages).present_tokens // self.page_size
        self.allocator.free(pages[:present])

    def with_pages(self, tokens: Int32Array) -> tuple[bytes, Int32Array]:
        """Key and fresh pages for the whole pages of a prompt."""
        pages = len(tokens) // self.page_size
        return make_key(tokens[: pages * self.page_size]), self.allocator.alloc(pages)

    def _fill(self, sequences: int) -> None:
        conversations = [conversation(number) for number in range(sequences // TURNS)]
        for turn in range(1, TURNS + 1):
            for tokens in conversations:
                self.insert(tokens[: SYSTEM_TOKENS + turn * TURN_TOKENS])
        for length in LENGTHS:
            for number in range(PROBES):
                for step in range(1, 5):
                    self.insert(probe(length, number)[: SYSTEM_TOKENS + (length - SYSTEM_TOKENS) * step // 4])

    def match(self, prompts: Iterator[Int32Array]) -> str:
        """Time one match of each prompt."""
        return summary(timed(self.tree.match, make_key(tokens)) for tokens in prompts)

    def inserts(self, prompts: Iterator[Int32Array]) -> str:
        """Time one insert of each prompt."""
        return summary(timed(self.tree.insert, *self.with_pages(tokens)) for tokens in prompts)

    def probe_nodes(self, length: int) -> list[TreeNode]:
        """The ends of the probes, three times over."""
        return 3 * [self.tree.match(make_key(probe(length, number))).node for number in range(PROBES)]

    def lock_and_unlock(self, node: TreeNode) -> None:
        """What an admission that fails costs beyond its match."""
        self.tree.lock(node)
        self.tree.unlock(node)

    def evictions(self, tokens: int, rounds: int) -> str:
        """Time evictions of so many tokens, with a short free list as in a full server."""
        pages = max(tokens // self.page_size, 1)
        self.allocator.alloc(max(self.allocator.available - EVICT_FREE_TOKENS // self.page_size, 0))
        return summary(timed(self.evict, pages) for _ in range(rounds))

    def evict(self, pages: int) -> None:
        """Move pages from the tree to the free list."""
        self.allocator.free(self.tree.evict(pages))

    def rows(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every operation's name and its figures for the three lengths."""
        operations: dict[str, Callable[[int], str]] = {
            "match hit": lambda n: self.match(probe(n, j) for _ in range(3) for j in range(PROBES)),
            "match system only": lambda n: self.match(system_and(60_000_000, n, j) for j in range(3 * PROBES)),
            "match cold": lambda n: self.match(ids(61_000_000 + j + n, n) for j in range(3 * PROBES)),
            "insert duplicate": lambda n: self.inserts(probe(n, j) for _ in range(3) for j in range(PROBES)),
            "insert new tail": lambda n: self.inserts(system_and(62_000_000, n, j) for j in range(2 * PROBES)),
            "match with split": lambda n: self.match(half_probe(n, j) for j in range(PROBES)),
            "page ids of a hit": lambda n: summary(timed(self.tree.pages, node) for node in self.probe_nodes(n)),
            "lock + unlock": lambda n: summary(timed(self.lock_and_unlock, node) for node in self.probe_nodes(n)),
            "make key from an array": lambda n: make_keys(ids(n, n)),
            "make key from a list": lambda n: make_keys(ids(n, n).tolist()),
        }
        for name, operation in operations.items():
            yield name, tuple(operation(length) for length in LENGTHS)
        yield "evict", tuple(self.evictions(tokens, rounds) for tokens, rounds in EVICT_PAGES)


def make_keys(tokens: Int32Array | list[int]) -> str:
    """Time making a key from tokens in either form."""
    return summary(timed(lambda: make_key(np.asarray(tokens, np.int32))) for _ in range(3 * PROBES))


def timed(operation: Callable[..., object], *arguments: object) -> float:
    """CPU microseconds of one call."""
    start = time.thread_time_ns()
    operation(*arguments)
    return (time.thread_time_ns() - start) / 1000


def summary(figures: Iterator[float]) -> str:
    """Minimum and median, three digits."""
    values = list(figures)
    return " / ".join(
        f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in (min(values), statistics.median(values))
    )


def report(sequences: int, page_size: int, policy: str) -> None:
    """Print one table."""
    bench = Bench(sequences, page_size, policy)
    tokens = bench.tree.total_pages * page_size
    print(f"\n{sequences} sequences, page size {page_size}, {policy}: {tokens} tokens in the tree")
    print("CPU us, min / median | 512 | 4096 | 32768 tokens (evict: 1 | 256 | 16384)\n---|---|---|---")
    for name, figures in bench.rows():
        print(" | ".join((name, *figures)))
        for version, table in (("0.5.7", SGLANG_0_5_7), ("0.5.23", SGLANG_0_5_23)):
            if page_size == 1 and sequences in table.get(name, {}):
                print(" | ".join((f"- SGLang {version}", *table[name][sequences])))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--sequences", default="1000,20000", help="sizes of the tree, comma-separated")
    parser.add_argument("--eviction-policy", default="lru")
    arguments = parser.parse_args()
    print(f"timer alone, min / median: {summary(timed(lambda: None) for _ in range(1000))} us")
    for sequences in map(int, arguments.sequences.split(",")):
        gc.collect()
        gc.disable()
        report(sequences, arguments.page_size, arguments.eviction_policy)
        gc.enable()


if __name__ == "__main__":
    main()
