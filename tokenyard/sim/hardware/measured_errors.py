"""How far predictions of the roofline are from measured runs, by family of models, GPU and engine.

The figures are those of `benchmarks/silicon.py --sample 409 --errors`, a random sample, on runs held out of the fit
where there are five, else on all: closed loops of a fixed number of clients with prompts of 1,000 to 8,000 tokens,
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
    ("dense", "b200_sxm", "vllm"): MeasuredError(21, 11, 6),
    ("dense", "h100_sxm", "sglang"): MeasuredError(15, 13, 14),
    ("dense", "h100_sxm", "vllm"): MeasuredError(31, 6, 22),
    ("dense", "h200_sxm", "sglang"): MeasuredError(89, 34, 6),
    ("dense", "h200_sxm", "vllm"): MeasuredError(12, 10, 17),
    ("hybrid", "b200_sxm", "sglang"): MeasuredError(27, 9, 40),
    ("hybrid", "b300_sxm", "sglang"): MeasuredError(30, 11, 11),
    ("hybrid", "h200_sxm", "sglang"): MeasuredError(34, 9, 6),
    ("mla-moe", "b200_sxm", "sglang"): MeasuredError(33, 28, 15),
    ("mla-moe", "b200_sxm", "vllm"): MeasuredError(18, 26, 8),
    ("mla-moe", "b300_sxm", "sglang"): MeasuredError(57, 15, 6),
    ("mla-moe", "b300_sxm", "vllm"): MeasuredError(18, 9, 5),
    ("mla-moe", "h200_sxm", "sglang"): MeasuredError(15, 19, 14),
    ("mla-moe", "h200_sxm", "vllm"): MeasuredError(15, 2, 6),
    ("moe", "b200_sxm", "vllm"): MeasuredError(9, 7, 15),
    ("moe", "b300_sxm", "vllm"): MeasuredError(41, 9, 5),
    ("moe", "h100_sxm", "vllm"): MeasuredError(39, 17, 8),
    ("moe", "h200_sxm", "sglang"): MeasuredError(18, 7, 4),
    ("moe", "h200_sxm", "vllm"): MeasuredError(10, 32, 5),
    ("window-moe", "b200_sxm", "vllm"): MeasuredError(22, 11, 12),
    ("window-moe", "h100_sxm", "vllm"): MeasuredError(6, 6, 5),
    ("window-moe", "h200_sxm", "vllm"): MeasuredError(15, 6, 13),
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
