"""A cost profile for a model on a device, from a built-in profile, a roofline, or measured kernels."""

from dataclasses import dataclass, replace
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.cost import Profile, closest_terms, get_profile, profile_names
from tokenyard.cost.linear import Link
from tokenyard.cost.profiles import LINKS_CPU, LINKS_GPU
from tokenyard.sim.hardware.devices import Device, find_device
from tokenyard.sim.hardware.efficiencies import efficiency_of, engines
from tokenyard.sim.hardware.kernel_tables import kernel_table
from tokenyard.sim.hardware.measured_errors import measured_error
from tokenyard.sim.hardware.model_shape import find_model
from tokenyard.sim.hardware.roofline import Parallel, Roofline

MAX_ROWS = 256
"""Requests whose windows and recurrent states have room next to the KV pool."""

BATCH_TOKENS = 8192
"""Tokens of a step that activations have room for."""

DEFAULT_ENGINE = "vllm"
MEM_FRACTION = 0.9
KV_TYPES = {"auto": None, "bf16": 16, "fp8": 8}


@dataclass(frozen=True, slots=True)
class Hardware:
    """How a model is served, as far as its step time depends on it.

    tp: devices that share each layer.
    dp: groups of them that share the experts (DP attention).
    ep: expert-parallel size; 1 divides each expert.
    engine: whose measured efficiency applies: vllm or sglang. With a version (vllm@0.24.0, vllm@current) the step times
        come from kernels that were measured with it, not from the roofline.
    weights: type of the weights; "" for the checkpoint's own.
    kv_type: type of the KV cache, one of `KV_TYPES`.
    mem_fraction: share of a device's memory for weights, activations and KV.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    engine: str = DEFAULT_ENGINE
    weights: str = ""
    kv_type: str = "auto"
    mem_fraction: float = MEM_FRACTION

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that does not exist."""
        if not 0.05 <= self.mem_fraction <= 1.0:
            raise ConfigError(f"--mem-fraction-static is {self.mem_fraction:g}; it must be from 0.05 to 1")
        if self.kv_type not in KV_TYPES:
            raise ConfigError(f"there is no KV type {self.kv_type!r}; choose one of {', '.join(KV_TYPES)}")
        if self.engine.partition("@")[0] not in engines():
            raise ConfigError(f"there is no engine {self.engine!r}; choose one of {', '.join(engines())}")


def find_device_profile(device: str, model: str, hardware: Hardware | None = None) -> Profile:
    """The cost profile of `model` on `device`.

    device: a name of `device_names`, or of a built-in profile.
    model: a known name, a `config.json` or a folder with one.
    hardware: None takes the built-in profile if there is one, else a roofline with the defaults.

    Raises ConfigError for an unknown device or model, and for one that does not fit.
    """
    name = f"{device}/{model}".lower()
    built_in = any(one == name or one.startswith(f"{name}-tp") for one in profile_names())
    if hardware is None and built_in:
        return get_profile(device, model)
    return data_sheet_profile(device, model, hardware or Hardware())


def data_sheet_profile(device: str, model: str, hardware: Hardware) -> Profile:
    """The profile from the model's sizes and the device's data sheet, with its kernels where they were measured."""
    sheet, shape = find_device(device), find_model(model)
    if hardware.weights:
        shape = shape.with_types(hardware.weights)
    bits = KV_TYPES[hardware.kv_type]
    if bits is not None:
        shape = replace(shape, kv_bits=bits)
    if any(attention.heads % hardware.tp for attention, _, _ in shape.layers):
        heads = next(attention.heads for attention, _, _ in shape.layers if attention.heads % hardware.tp)
        raise ConfigError(f"--tp-size {hardware.tp} does not divide the {heads} attention heads of {shape.name}")
    engine, _, version = hardware.engine.partition("@")
    parallel = Parallel(hardware.tp, hardware.dp, hardware.ep)
    roofline = Roofline(shape, sheet, parallel, efficiency_of(engine, sheet, shape.family))
    if version:
        if hardware.weights or bits is not None:
            raise ConfigError(
                "measured kernels take the types of the checkpoint; leave out --quantization and --kv-cache-dtype"
            )
        table = kernel_table(sheet, _folder(model), parallel, engine, version)
        known = f"kernels measured, tables precomputed within {100 * (table.error or 0.0):.2g} % (median of a step)"
    else:
        table = roofline.table(f"roofline of {shape.name} on {sheet.name}, efficiencies of {engine}")
        known = measured_error(shape.family, sheet, engine)
    return Profile(
        device=sheet.name,
        model=shape.name,
        terms=closest_terms(table),
        kv_pool_tokens=roofline.kv_pool_tokens(hardware.mem_fraction, MAX_ROWS, BATCH_TOKENS),
        kv_bytes_per_token=shape.kv_bytes_per_token(hardware.tp) * hardware.tp,
        context_length=shape.context_length,
        source=table.origin,
        tp=hardware.tp,
        links=_links(sheet),
        table=table,
        measured=known,
        request_ms=0.0 if version else roofline.efficiency.request_ms,
        request_us_per_token=0.0 if version else roofline.efficiency.request_us_per_token,
        state_slot_bytes=shape.state_slot_bytes(hardware.tp) * hardware.tp,
    )


def _folder(model: str) -> str:
    """The folder of a `config.json`, or the name as it is."""
    path = Path(model).expanduser()
    return str(path.parent) if path.is_file() else model


def _links(device: Device) -> dict[str, Link]:
    return dict(LINKS_CPU if device.name == "cpu" else LINKS_GPU)
