"""The devices that the planner may use, with prices: names of built-in profiles, or a YAML file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tokenyard.base import ConfigError
from tokenyard.base.deprecation import accept_old_keys
from tokenyard.cost import Profile, load_profile
from tokenyard.sim.hardware.device_profile import Hardware, find_device_profile

MAX_DEVICES = 1 << 20
FIELDS = ("device", "profile", "price", "error", "max_count", "tp_size")
RENAMED = {"most": "max_count"}
"""Old field names, accepted with a warning for one release."""


@dataclass(frozen=True)
class DeviceOffer:
    """A device that the planner may use.

    profile: its cost profile.
    price: of one device per hour, in any currency; None if not given.
    max_count: how many are available.
    """

    profile: Profile
    price: float | None = None
    max_count: int = MAX_DEVICES


def read_devices(text: str, model: str, hardware: Hardware | None = None) -> list[DeviceOffer]:
    """Read the devices from the file `text`, or from comma-separated names of devices that serve `model`.

    hardware: how they serve it; None for the built-in profiles, or the defaults.

    Raises ConfigError for a malformed file, an unknown device, or prices for some devices only.
    """
    path = Path(text)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(f"--devices {text}: no such file")
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ConfigError("--devices names nothing; give devices such as h100,h200 or a file")
        return [DeviceOffer(find_device_profile(word, model, hardware)) for word in words]
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"--devices {path} cannot be read as YAML") from None
    rows = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--devices {path}: give a list 'devices' of mappings such as {{device: h100, price: 2.5}}")
    devices = [_device(row, model, hardware, f"--devices {path}") for row in rows]
    if len({device.price is None for device in devices}) > 1:
        raise ConfigError(f"--devices {path}: some devices have a price and others do not; give all or none")
    return devices


def _device(row: dict[Any, Any], model: str, hardware: Hardware | None, where: str) -> DeviceOffer:
    row = accept_old_keys(row, RENAMED, where)
    unknown = [str(key) for key in row if key not in FIELDS]
    if unknown or ("device" in row) == ("profile" in row):
        raise ConfigError(f"{where}: give each device either device or profile, and optionally {', '.join(FIELDS[2:])}")
    if "tp_size" in row:
        tp = row["tp_size"]
        if isinstance(tp, bool) or not isinstance(tp, int) or "profile" in row:
            raise ConfigError(f"{where}: tp_size is {tp!r}; it must be a whole number, next to device")
        hardware = replace(hardware or Hardware(), tp=tp)
    if "device" in row:
        profile = find_device_profile(str(row["device"]), model, hardware)
    else:
        profile = load_profile(Path(str(row["profile"])))
    price, error = _number(row, "price", where), _number(row, "error", where)
    max_count = row.get("max_count", MAX_DEVICES)
    if isinstance(max_count, bool) or not isinstance(max_count, int) or max_count < 1:
        raise ConfigError(f"{where}: max_count is {max_count!r}; it must be a whole number of at least 1")
    if price is not None and price <= 0.0:
        raise ConfigError(f"{where}: price is {price:g}; it must be above 0, or absent")
    if error is not None and not 0.0 <= error < 1.0:
        raise ConfigError(f"{where}: error is {error:g}; it must be at least 0 and below 1")
    return DeviceOffer(profile if error is None else replace(profile, error=error), price, max_count)


def _number(row: dict[Any, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a number")
    return float(value)
