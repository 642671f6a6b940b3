"""Which devices a planner may take, and what they cost: names of built-in profiles, or a YAML file."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tokenyard.base import ConfigError
from tokenyard.cost import Profile, get_profile, load_profile

MAX_DEVICES = 1 << 20
FIELDS = ("device", "profile", "price", "error", "most")


@dataclass(frozen=True)
class DeviceOffer:
    """A device that may be had: price of one for an hour, None where nobody gave one; most: how many there are."""

    profile: Profile
    price: float | None = None
    most: int = MAX_DEVICES


def read_devices(text: str, model: str) -> list[DeviceOffer]:
    """The devices of a file if `text` names one, else of built-in profiles of `model`, with commas between them.

    Raises ConfigError, in one line, for a file of another form, an unknown device, or prices of some devices only.
    """
    path = Path(text)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(f"--devices {text}: there is no such file")
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ConfigError("--devices names nothing; give devices such as h100,h200 or a file")
        return [DeviceOffer(get_profile(word, model)) for word in words]
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"--devices {path} cannot be read as YAML") from None
    rows = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--devices {path}: give a list 'devices' of mappings such as {{device: h100, price: 2.5}}")
    devices = [_device(row, model, f"--devices {path}") for row in rows]
    if len({device.price is None for device in devices}) > 1:
        raise ConfigError(f"--devices {path}: some devices have a price and others do not; give all or none")
    return devices


def _device(row: dict[Any, Any], model: str, where: str) -> DeviceOffer:
    unknown = [str(key) for key in row if key not in FIELDS]
    if unknown or ("device" in row) == ("profile" in row):
        raise ConfigError(
            f"{where}: a device has either device or profile, and of {', '.join(FIELDS[2:])} what is known"
        )
    profile = get_profile(str(row["device"]), model) if "device" in row else load_profile(Path(str(row["profile"])))
    price, error = _number(row, "price", where), _number(row, "error", where)
    most = row.get("most", MAX_DEVICES)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"{where}: most is {most!r}; it must be a number of devices")
    if price is not None and price <= 0.0:
        raise ConfigError(f"{where}: a price is {price:g}; it must be above 0, or not given at all")
    if error is not None and not 0.0 <= error < 1.0:
        raise ConfigError(f"{where}: an error is {error:g}; it must be a share from 0 to below 1")
    return DeviceOffer(profile if error is None else replace(profile, error=error), price, most)


def _number(row: dict[Any, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a number")
    return float(value)
