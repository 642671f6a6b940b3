"""Data sheets of devices: what makers publish, dense rates without sparsity."""

from dataclasses import dataclass

from tokenyard.base import ConfigError

GIB = 1 << 30
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    memory_bytes: of device memory.
    bytes_per_s: of device memory.
    flops: dense operations per second by bits of the inputs (16, 8, 4). A width that is missing is computed at the
        next wider one.
    link_bytes_per_s: to the other devices of a node, per direction.
    kin: the device whose measured efficiencies are the best guess for this one.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops: dict[int, float]
    link_bytes_per_s: float
    kin: str

    def flops_at(self, bits: int) -> float:
        """Operations per second for inputs of `bits` bits: those of the next wider type that the device has."""
        return self.flops[min(width for width in self.flops if width >= bits)]


def _device(name: str, gib: float, tb_s: float, tflops: dict[int, float], link_gb_s: float, kin: str = "") -> Device:
    flops = {bits: value * TERA for bits, value in tflops.items()}
    return Device(name, int(gib * GIB), tb_s * TERA, flops, link_gb_s * 1e9, kin or name)


_DEVICES = {
    device.name: device
    for device in (
        _device("a100_sxm", 80, 2.039, {16: 312}, 300, kin="h100_sxm"),
        _device("l4", 24, 0.300, {16: 121, 8: 242}, 32, kin="h100_sxm"),
        _device("l40s", 48, 0.864, {16: 362, 8: 733}, 32, kin="h100_sxm"),
        _device("h100_sxm", 80, 3.35, {16: 989, 8: 1979}, 450),
        _device("h200_sxm", 141, 4.8, {16: 989, 8: 1979}, 450),
        _device("b200_sxm", 180, 7.7, {16: 2250, 8: 4500, 4: 9000}, 900),
        _device("b300_sxm", 268, 7.75, {16: 2250, 8: 4500, 4: 13500}, 900),
        _device("gb200", 185, 8.0, {16: 2500, 8: 5000, 4: 10000}, 900),
        _device("mi300x", 192, 5.3, {16: 1307, 8: 2615}, 448, kin="h200_sxm"),
        _device("rtx_4090", 24, 1.008, {16: 165, 8: 330}, 32, kin="h100_sxm"),
        _device("rtx_pro_6000", 96, 1.6, {16: 468, 8: 936, 4: 1871}, 64, kin="b200_sxm"),
        _device("cpu", 256, 0.2, {16: 2.0}, 20, kin="h100_sxm"),
    )
}
"""`cpu` is a server socket with eight channels of DDR5; `tokenyard calibrate` measures yours."""

_ALIASES = {
    "a100": "a100_sxm",
    "a100_sxm4": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200_sxm": "gb200",
    "rtx4090": "rtx_4090",
    "rtx_pro_6000_server": "rtx_pro_6000",
    "rtxpro6000": "rtx_pro_6000",
}


def device_names() -> list[str]:
    """The devices with a data sheet, sorted."""
    return sorted(_DEVICES)


def _word(name: str) -> str:
    word = name.lower().replace("-", "_").replace(" ", "_")
    return _ALIASES.get(word, word)


def find_device(name: str) -> Device:
    """The data sheet of device `name`. Raises ConfigError, which lists the devices, for an unknown one."""
    word = _word(name)
    if word not in _DEVICES:
        raise ConfigError(
            f"there is no data sheet of device {name!r}; choose one of {', '.join(device_names())}, or give --profile "
            "FILE of tokenyard calibrate"
        )
    return _DEVICES[word]
