"""What the libraries under the model are told, by the environment that they read when they load or are first used."""

import os

LIBRARY_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""OpenMP threads yield their core soon: by default they spin for milliseconds, which on a machine whose cores the model
shares with the rest of the server made it many times slower (benchmarks/results/gsm8k.md). oneDNN, and torch's layer
above it once more, keep a compiled kernel per shape, and almost every step has a new shape: fewer of them bound the
memory.
"""


def child_environment() -> dict[str, str]:
    """The environment of a process that will load the model; what the user has set wins."""
    return LIBRARY_ENVIRONMENT | os.environ


def set_library_environment() -> None:
    """The same for this process. A library that was loaded before has read its part already and keeps its defaults."""
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
