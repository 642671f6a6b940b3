"""Arguments of `simulate`, `compare`, `goodput` and `plan` that say how a model is served by its devices."""

import argparse

from tokenyard.sim.hardware.device_profile import DEFAULT_ENGINE, KV_TYPES, MEM_FRACTION, Hardware
from tokenyard.sim.hardware.efficiencies import engines
from tokenyard.sim.hardware.model_shape import BITS

_FIELDS = {
    "tp_size": "tp",
    "ep_size": "ep",
    "engine": "engine",
    "quantization": "weights",
    "kv_cache_dtype": "kv_type",
    "mem_fraction_static": "mem_fraction",
}


def add_hardware_arguments(group: argparse._ArgumentGroup) -> None:
    """How a model is divided, and in which types. Any of them leaves the built-in profiles for the data sheets."""
    group.add_argument("--tp-size", type=int, metavar="N", help="devices that share each layer [1]")
    group.add_argument("--ep-size", type=int, metavar="N", help="expert-parallel size; 1 divides each expert [1]")
    group.add_argument(
        "--engine",
        metavar="ENGINE",
        help=f"whose measured efficiency the step times have: {', '.join(engines())}; with @VERSION or @current, "
        f"step times from kernels measured with it (pip install 'tokenyard[hardware]') [{DEFAULT_ENGINE}]",
    )
    group.add_argument(
        "--quantization", choices=sorted(BITS), help="type of the weights [what the model's configuration says]"
    )
    group.add_argument("--kv-cache-dtype", choices=sorted(KV_TYPES), help="type of the KV cache [auto]")
    group.add_argument(
        "--mem-fraction-static",
        type=float,
        metavar="F",
        help=f"share of device memory for weights, activations and KV [{MEM_FRACTION}]",
    )


def hardware_of(args: argparse.Namespace) -> Hardware | None:
    """How the model is served, None if no flag says anything. Raises ConfigError for a value that does not exist."""
    given = {field: value for flag, field in _FIELDS.items() if (value := getattr(args, flag, None)) is not None}
    return Hardware(**given) if given else None
