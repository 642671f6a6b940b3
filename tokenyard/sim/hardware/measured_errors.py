"""How far predictions of the roofline are from measured runs, by family of models, GPU and engine.

The figures are those of `benchmarks/silicon.py --errors`, on runs held out of the fit where there are five, else on
all: closed loops of a fixed number of clients with prompts of 1,000 to 8,000 tokens,
through this scheduler with that engine's rules.
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
        runs = "one measured run" if self.runs == 1 else f"{self.runs} measured runs"
        return f"TTFT {self.ttft:.0f} %, TPOT {self.tpot:.0f} % in the median of {runs}"


MEASURED: dict[tuple[str, str, str], MeasuredError] = {
    ("dense", "b200_sxm", "vllm"): MeasuredError(10, 8, 21),
    ("dense", "h100_sxm", "sglang"): MeasuredError(13, 12, 16),
    ("dense", "h100_sxm", "vllm"): MeasuredError(41, 7, 20),
    ("dense", "h200_sxm", "sglang"): MeasuredError(207, 31, 10),
    ("dense", "h200_sxm", "vllm"): MeasuredError(15, 7, 13),
    ("hybrid", "b200_sxm", "sglang"): MeasuredError(24, 6, 20),
    ("hybrid", "b300_sxm", "sglang"): MeasuredError(22, 15, 10),
    ("hybrid", "h200_sxm", "sglang"): MeasuredError(36, 9, 13),
    ("mla-moe", "b200_sxm", "sglang"): MeasuredError(39, 23, 59),
    ("mla-moe", "b200_sxm", "vllm"): MeasuredError(28, 27, 27),
    ("mla-moe", "b300_sxm", "sglang"): MeasuredError(52, 19, 26),
    ("mla-moe", "b300_sxm", "vllm"): MeasuredError(22, 8, 14),
    ("mla-moe", "h200_sxm", "sglang"): MeasuredError(11, 17, 13),
    ("mla-moe", "h200_sxm", "vllm"): MeasuredError(14, 5, 25),
    ("moe", "b200_sxm", "vllm"): MeasuredError(11, 6, 39),
    ("moe", "b300_sxm", "vllm"): MeasuredError(21, 11, 15),
    ("moe", "h100_sxm", "vllm"): MeasuredError(25, 23, 23),
    ("moe", "h200_sxm", "sglang"): MeasuredError(26, 5, 17),
    ("moe", "h200_sxm", "vllm"): MeasuredError(19, 10, 27),
    ("window-moe", "b200_sxm", "vllm"): MeasuredError(11, 4, 17),
    ("window-moe", "h100_sxm", "vllm"): MeasuredError(9, 5, 15),
    ("window-moe", "h200_sxm", "vllm"): MeasuredError(14, 10, 14),
}
"""By family, device and engine."""


def measured_error(family: str, device: Device, engine: str) -> str:
    """The error of predictions for a family of models on a device under an engine, in words: its own row, or the
    nearest one and that it is not its own.
    """
    own = MEASURED.get((family, device.name, engine))
    if own is not None:
        return f"{own} of {family} models on {device.name} with {engine}"
    nearest = _nearest(family, device, engine)
    if nearest is None:
        return "not measured here"
    kind, name, by = nearest
    return f"not measured here, nearest: {MEASURED[nearest]} of {kind} models on {name} with {by}"


def _nearest(family: str, device: Device, engine: str) -> tuple[str, str, str] | None:
    """The row that agrees in most: the family first, then the device or its kin, then the engine."""

    def score(key: tuple[str, str, str]) -> tuple[bool, bool, bool, bool, bool, int]:
        moe = ("moe" in key[0] or key[0] == "hybrid") == ("moe" in family or family == "hybrid")
        return key[0] == family, moe, key[1] == device.name, key[1] == device.kin, key[2] == engine, MEASURED[key].runs

    return max(MEASURED, key=score, default=None)
