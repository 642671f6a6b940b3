"""How far predictions of the roofline are from measured runs, by family of models, GPU and engine.

The figures are those of `benchmarks/silicon.py` on its held-out rows where there are five, else on all.
"""

from dataclasses import dataclass

from tokenyard.sim.hardware.devices import Device


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """Median absolute errors in percent of TTFT and TPOT over `runs` measured runs."""

    ttft: float
    tpot: float
    runs: int

    def __str__(self) -> str:
        """In words."""
        return f"TTFT {self.ttft:.0f} %, TPOT {self.tpot:.0f} % (median of {self.runs} measured runs)"


MEASURED: dict[tuple[str, str, str], MeasuredError] = {}


def measured_error(family: str, device: Device, engine: str) -> str:
    """The error of predictions for a family of models on a device under an engine, in words: its own row, or the
    nearest one and that it is not its own.
    """
    own = MEASURED.get((family, device.name, engine))
    if own is not None:
        return f"{own}: {family} on {device.name} with {engine}"
    nearest = _nearest(family, device, engine)
    if nearest is None:
        return "not measured here"
    kind, name, by = nearest
    return f"not measured here, nearest: {MEASURED[nearest]}: {kind} on {name} with {by}"


def _nearest(family: str, device: Device, engine: str) -> tuple[str, str, str] | None:
    """The row that agrees in most: the family first, then the device or its kin, then the engine."""

    def score(key: tuple[str, str, str]) -> tuple[bool, bool, bool, bool, bool, int]:
        moe = ("moe" in key[0] or key[0] == "hybrid") == ("moe" in family or family == "hybrid")
        return key[0] == family, moe, key[1] == device.name, key[1] == device.kin, key[2] == engine, MEASURED[key].runs

    return max(MEASURED, key=score, default=None)
