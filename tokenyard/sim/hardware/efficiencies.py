"""What engines get out of devices, fitted to measured runs (`benchmarks/silicon.py --fit`)."""

from tokenyard.sim.hardware.devices import Device, find_device
from tokenyard.sim.hardware.roofline import Efficiency

_HOPPER = ("h100_sxm", "h200_sxm")

_FITTED: dict[tuple[str, str], Efficiency] = {
    ("sglang", "blackwell"): Efficiency(
        memory=0.95,
        expert_memory=0.937,
        kv_memory=0.91,
        compute16=0.286,
        compute8=0.0738,
        compute4=0.327,
        attention=0.246,
        layer_us=22.7,
        moe_us=22.6,
        latent_us=25.5,
        state_us=16.6,
        chunk_layer_us=24.8,
        reduce_us=24.5,
        link=0.6,
        imbalance=1.3,
        host_ms=0.867,
        request_ms=73.9,
        request_us_per_token=20.3,
    ),
    ("sglang", "hopper"): Efficiency(
        memory=0.95,
        expert_memory=0.621,
        kv_memory=0.95,
        compute16=0.866,
        compute8=0.329,
        compute4=0.4,
        attention=0.509,
        layer_us=23.7,
        moe_us=39.1,
        latent_us=17.5,
        state_us=22.8,
        chunk_layer_us=21.8,
        reduce_us=8.83,
        link=0.6,
        imbalance=1.3,
        host_ms=1.08,
        request_ms=73.9,
        request_us_per_token=30.6,
    ),
    ("vllm", "blackwell"): Efficiency(
        memory=0.95,
        expert_memory=0.905,
        kv_memory=0.95,
        compute16=0.847,
        compute8=0.299,
        compute4=0.529,
        attention=0.137,
        layer_us=52.3,
        moe_us=20.0,
        latent_us=8.39,
        state_us=20.0,
        chunk_layer_us=148.0,
        reduce_us=7.45,
        link=0.6,
        imbalance=1.3,
        host_ms=0.576,
        request_ms=13.4,
        request_us_per_token=6.86,
    ),
    ("vllm", "hopper"): Efficiency(
        memory=0.772,
        expert_memory=0.534,
        kv_memory=0.939,
        compute16=0.477,
        compute8=0.66,
        compute4=0.4,
        attention=0.169,
        layer_us=29.7,
        moe_us=15.8,
        latent_us=24.8,
        state_us=20.0,
        chunk_layer_us=45.1,
        reduce_us=13.5,
        link=0.6,
        imbalance=1.3,
        host_ms=0.567,
        request_ms=20.6,
        request_us_per_token=15.5,
    ),
}


def engines() -> list[str]:
    """The engines with measured efficiencies, sorted."""
    return sorted({engine for engine, _ in _FITTED})


def efficiency_of(engine: str, device: Device) -> Efficiency:
    """The efficiency of `engine` on `device`, or on the measured device that is most like it."""
    generation = "hopper" if find_device(device.kin).name in _HOPPER else "blackwell"
    return _FITTED.get((engine, generation), Efficiency())
