"""`tokenyard convert`: writes a model's weights as this machine multiplies them, so that later starts map them."""

import argparse
import time

from tokenyard.base import ConfigError


def convert(namespace: argparse.Namespace) -> int:
    """Write the file. Returns 0. Raises ConfigError, in one line, for a model that cannot be converted."""
    try:
        from tokenyard.executor.layer_loader import convert_weights
    except ImportError as error:
        raise ConfigError("converting needs the package torch: pip install 'tokenyard[torch]'") from error
    begin_s = time.perf_counter()
    path, size = convert_weights(namespace.source, namespace.dtype, namespace.quantization, namespace.threads)
    print(f"{path}: {size / 1e9:.2f} GB in {time.perf_counter() - begin_s:.1f} s")
    return 0
